"""The attention kernel by itself beside softmax in plain torch: odd lengths, rows without numbers, all its kinds."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; the tests of its kernels need it")
if torch.cuda.is_available():
    pytest.skip("on a GPU eval.gpu_check compares the kernels", allow_module_level=True)

from serve.graph.coarse import in_steps  # noqa: E402
from serve.graph.kernels.attention import attention_kernel  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreted")
ROWS, HEADS, WIDTH, POSITIONS = 6, 3, 24, 37
LENGTHS = (1, 4, 5, 37, 13, 8)
ORDER = (4, 0, 3, 1, 2, 5)  # the last one does not run
SCALE = 0.7


class Numbers:
    """Of one attention; row i's keys lie in slot ROWS - 1 - i."""

    def __init__(self, kind: torch.dtype, coarse: bool) -> None:
        draw = torch.Generator().manual_seed(4)
        pool = (ROWS, HEADS, POSITIONS, WIDTH)
        self.slots, self.lengths = torch.arange(ROWS - 1, -1, -1), torch.tensor(LENGTHS)
        self.queries = torch.randn(ROWS, HEADS * WIDTH, generator=draw).to(kind)
        self.keys, self.values = (torch.randn(pool, generator=draw).to(kind) for _ in range(2))
        self.bias = torch.randn(HEADS, POSITIONS, generator=draw)
        for row, slot in enumerate(self.slots.tolist()):
            for pool_of in (self.keys, self.values):
                pool_of[slot, :, LENGTHS[row] :] = float("nan")  # nobody looks there
        self.coarse = coarse

    def kernel(self, biased: bool, block: int) -> Tensor:
        out = torch.full_like(self.queries, 7.0)
        keys, values, key_steps, value_steps = self.keys, self.values, self.bias, self.bias
        if self.coarse:
            keys, steps = in_steps(self.keys, 3)
            values, value_steps = in_steps(self._known(self.values), 2)
            key_steps, value_steps = steps.squeeze(3).contiguous(), value_steps.squeeze(2).contiguous()
        by_slot = torch.zeros(ROWS, dtype=torch.int32)
        by_slot[self.slots] = self.lengths.int()
        attention_kernel[(ROWS, HEADS)](
            self.queries, keys, values, self.lengths - 1 if biased else by_slot, self.bias, key_steps, value_steps,
            self.slots, torch.tensor(ORDER, dtype=torch.int32), torch.tensor(ROWS - 1, dtype=torch.int32), out, HEADS,
            POSITIONS, SCALE, BIASED=biased, COARSE=self.coarse, WIDTH=WIDTH, WIDE=32, BLOCK=block, STAGES=3,
            AHEAD=False,
        )  # fmt: skip
        return out

    def _known(self, pool: Tensor) -> Tensor:
        """Without what lies beyond the rows' ends, which would spoil the steps of values."""
        there = torch.arange(POSITIONS) < self.lengths[self.slots.argsort()][:, None]
        return torch.where(there[:, None, :, None], pool, 0.0)

    def right(self, biased: bool) -> Tensor:
        rows = []
        for row, (slot, length) in enumerate(zip(self.slots.tolist(), LENGTHS, strict=True)):
            query = self.queries[row].view(HEADS, 1, WIDTH).float()
            key, value = (pool[slot, :, :length].float() for pool in (self.keys, self.values))
            score = (query * key).sum(2) * SCALE
            if biased:
                score = score + self.bias[:, :length].flip(1)
            rows.append((score.softmax(1)[:, :, None] * value).sum(1).flatten())
        return torch.stack(rows).to(self.queries.dtype)


KINDS = [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize("block", [4, 16, 64])
@pytest.mark.parametrize(("biased", "coarse"), KINDS, ids=["self", "cross", "int8"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_is_the_softmax_of_each_row_over_its_own_keys(
    kind: torch.dtype, biased: bool, coarse: bool, block: int
) -> None:
    numbers = Numbers(kind, coarse)
    found, right = numbers.kernel(biased, block), numbers.right(biased)
    runs = list(ORDER[:-1])
    bound = 0.03 if coarse else 1e-5 if kind is torch.float32 else 8e-3
    torch.testing.assert_close(found[runs], right[runs], rtol=bound, atol=bound)
    assert (found[ORDER[-1]] == 7.0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, which the interpreter counts with
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("biased", "coarse"), KINDS, ids=["self", "cross", "int8"])
def test_a_row_whose_numbers_are_none_says_nothing_and_its_neighbours_what_they_said(
    biased: bool, coarse: bool, wrong: float
) -> None:
    numbers = Numbers(torch.float32, coarse)
    before = numbers.kernel(biased, 4)
    numbers.keys[numbers.slots[3], 1, 20, :] = wrong
    numbers.values[numbers.slots[4], 0, 12, 5] = wrong
    after = numbers.kernel(biased, 4).view(ROWS, HEADS, WIDTH)
    heads = before.view(ROWS, HEADS, WIDTH)
    assert not after[3, 1].isfinite().any() and not after[4, 0, 5].isfinite()
    for row, head in ((0, 0), (1, 1), (2, 2), (3, 0), (3, 2), (4, 1), (4, 2)):
        assert torch.equal(after[row, head], heads[row, head])


def test_large_scores_and_keys_of_zero_weight() -> None:
    numbers = Numbers(torch.float32, False)
    numbers.queries *= 300.0  # all but one key of a row share nothing
    torch.testing.assert_close(numbers.kernel(True, 4)[:5], numbers.right(True)[:5], rtol=1e-4, atol=1e-4)
