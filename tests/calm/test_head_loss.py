"""The fused head loss against the plain formula: values, gradients, dtypes and memory."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from calm.head_loss import exit_cross_entropy, head_argmax, linear_cross_entropy, rows_per_chunk

R, K, D, V = 7, 3, 5, 11


def inputs(dtype=torch.float64, rows=R, exits=K, width=D, vocab=V):
    torch.manual_seed(0)
    hidden = torch.randn(rows, exits, width, dtype=dtype, requires_grad=True)
    head = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    return hidden, head, torch.randint(0, vocab, (rows,)), torch.tensor([0.5, 1.5, 2.0])[:exits]


def naive(hidden, head, labels, weights, smoothing=0.0, z_loss=0.0, distill=0.0):
    """The definition, one exit at a time, all logits held."""
    total, last = 0.0, hidden.shape[1] - 1
    teacher = (hidden[:, last] @ head.T).log_softmax(-1).detach()
    for exit_, weight in enumerate(weights):
        logits = hidden[:, exit_] @ head.T
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
        if exit_ != last:
            follow = F.kl_div(logits.log_softmax(-1), teacher, log_target=True, reduction="sum")
            loss = (1 - distill) * loss + distill * follow
        total = total + weight * (loss + z_loss * logits.logsumexp(-1).square().sum())
    return total


OPTIONS = [
    {},
    {"smoothing": 0.1},
    {"z_loss": 0.01},
    {"distill": 0.4},
    {"distill": 1.0},
    {"smoothing": 0.2, "z_loss": 0.02, "distill": 0.3},
]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradients_equal_the_definition(options, chunk):
    hidden, head, labels, weights = inputs()
    expected = naive(hidden, head, labels, weights.double(), **options)
    expected_grads = torch.autograd.grad(expected * 1.7, (hidden, head))
    total, nll = exit_cross_entropy(hidden, head, labels, weights, chunk=chunk, **options)
    grads = torch.autograd.grad(total * 1.7, (hidden, head))
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(grads, expected_grads)
    plain = [F.cross_entropy(hidden[:, k] @ head.T, labels, reduction="sum") for k in range(K)]
    torch.testing.assert_close(nll, torch.stack(plain).detach())
    assert not nll.requires_grad


def test_numeric_gradients():
    hidden, head, labels, weights = inputs()

    def loss(hidden, head):
        # distill is left out: its teacher is a constant by definition, which finite differences cannot know
        return exit_cross_entropy(hidden, head, labels, weights, smoothing=0.1, z_loss=0.01, chunk=2)[0]

    assert torch.autograd.gradcheck(loss, (hidden, head))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_linear_cross_entropy_equals_torch(smoothing):
    hidden, head, labels, _ = inputs(torch.float32, exits=1)
    rows = hidden[:, 0]
    ours = linear_cross_entropy(rows, head, labels, smoothing=smoothing, chunk=2)
    theirs = F.cross_entropy(F.linear(rows, head), labels, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, (hidden, head)), torch.autograd.grad(theirs, (hidden, head)), rtol=1e-5, atol=1e-6
    )


def test_bf16_autocast_keeps_the_softmax_in_fp32():
    hidden, head, labels, weights = inputs(torch.float32, rows=64, width=32, vocab=200)
    exact, _ = exit_cross_entropy(hidden, head, labels, weights)
    exact_grads = torch.autograd.grad(exact, (hidden, head))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, nll = exit_cross_entropy(hidden, head, labels, weights, chunk=16)
        # what autocast itself would give: bf16 products, fp32 cross-entropy
        logits = F.linear(hidden.detach(), head.detach())
    assert logits.dtype == torch.bfloat16 and total.dtype == nll.dtype == torch.float32
    by_hand = [F.cross_entropy(logits[:, k].float(), labels, reduction="sum") for k in range(K)]
    torch.testing.assert_close(nll, torch.stack(by_hand), rtol=1e-5, atol=1e-4)
    grads = torch.autograd.grad(total, (hidden, head))
    assert grads[0].dtype == grads[1].dtype == torch.float32
    for grad, expected in zip(grads, exact_grads, strict=True):
        assert F.cosine_similarity(grad.flatten(), expected.flatten(), dim=0) > 0.999


def test_bf16_weights_get_bf16_gradients():
    hidden, head, labels, weights = inputs(torch.bfloat16)
    total, _ = exit_cross_entropy(hidden, head, labels, weights, chunk=2)
    grads = torch.autograd.grad(total, (hidden, head))
    assert total.dtype == torch.float32 and {grad.dtype for grad in grads} == {torch.bfloat16}


def test_extreme_logits_stay_finite():
    hidden, head, labels, weights = inputs(torch.float32)
    total, _ = exit_cross_entropy(hidden * 1e4, head, labels, weights, z_loss=1e-4)
    grads = torch.autograd.grad(total, (hidden, head))
    assert total.isfinite() and all(grad.isfinite().all() for grad in grads)


def test_no_rows_cost_nothing():
    hidden, head, labels, weights = inputs()
    total, nll = exit_cross_entropy(hidden[:0], head, labels[:0], weights)
    total.backward()
    assert total == 0 and not nll.any() and not hidden.grad.any() and not head.grad.any()


def test_frozen_parts_get_no_gradient():
    hidden, head, labels, weights = inputs()
    total, _ = exit_cross_entropy(hidden, head.detach(), labels, weights)
    total.backward()
    assert hidden.grad is not None and head.grad is None
    with torch.no_grad():
        value, _ = exit_cross_entropy(hidden, head, labels, weights)
    assert not value.requires_grad
    torch.testing.assert_close(value, total.detach())


def test_one_graph_can_be_walked_twice():
    hidden, head, labels, weights = inputs()
    total, _ = exit_cross_entropy(hidden, head, labels, weights)
    first = torch.autograd.grad(total * 3, (hidden, head), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(total * 3, (hidden, head)), first)


class LiveElements(TorchDispatchMode):
    """Peak number of elements in live tensors that were made under it."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.seen = set()

    def _free(self, key, count):
        self.live -= count
        self.seen.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, count = storage._cdata, storage.nbytes() // tensor.element_size()
                if key not in self.seen:
                    self.seen.add(key)
                    self.live += count
                    weakref.finalize(storage, self._free, key, count)
        self.peak = max(self.peak, self.live)
        return out


def peak_elements(loss):
    with LiveElements() as counter:
        loss().backward()
    return counter.peak


@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1, "z_loss": 0.01, "distill": 0.5}], ids=["plain", "all"])
def test_memory_is_that_of_one_chunk(options):
    rows, exits, width, vocab, chunk = 96, 6, 4, 2000, 4
    torch.manual_seed(0)
    hidden = torch.randn(rows, exits, width, requires_grad=True)
    head = torch.randn(vocab, width, requires_grad=True)
    labels, weights = torch.randint(0, vocab, (rows,)), torch.ones(exits)
    peak = peak_elements(lambda: exit_cross_entropy(hidden, head, labels, weights, chunk=chunk, **options)[0])
    one_chunk, outputs = chunk * exits * vocab, 3 * (hidden.numel() + head.numel())
    assert peak < 4 * one_chunk + outputs
    # the counter itself sees the naive way's logits of all layers
    assert peak_elements(lambda: naive(hidden, head, labels, weights)) > rows * exits * vocab > 3 * peak


def test_default_chunk_bounds_the_logits():
    cpu = torch.device("cpu")
    for exits, vocab in ((8, 400), (8, 4096), (1, 32128), (8, 32128)):
        elements = rows_per_chunk(exits, vocab, cpu) * exits * vocab
        assert elements <= max(2**20, 128 * vocab)
    assert rows_per_chunk(1000, 10**9, cpu) == 1


def test_head_argmax_is_chunked_and_equal():
    hidden, head, _, _ = inputs()
    torch.testing.assert_close(head_argmax(hidden, head, chunk=2), (hidden @ head.T).argmax(-1))
    assert head_argmax(hidden[:0], head).shape == (0, K)
