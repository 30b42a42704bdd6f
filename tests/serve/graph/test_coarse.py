"""Cross K/V in int8 under the graph runner: near the numbers, far from other sources'."""

import pytest
import torch
from torch import Tensor

from calm.calibration.identity import arithmetic, independent_of_batch
from calm.config import BatchRule, Measure, RunnerName, Weights
from calm.errors import ConfigError
from serve.graph.coarse import in_steps
from serve.graph.frame import Frame
from serve.graph.slots import GraphSlots

from ..models import LENGTH, confident, engine_of, texts, tiny_served, usual


def coarse_slots() -> GraphSlots:
    return GraphSlots(tiny_served().spec, 2, LENGTH, 16, torch.device("cpu"), poison=True, int8_cross=True)


@pytest.mark.parametrize("dim", [2, 3])
def test_numbers_are_half_a_step_off_at_most(dim: int) -> None:
    sizes = torch.tensor([1e-6, 1.0, 1e6, 0.0, 9.0])[:, None]
    numbers = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(1)) * sizes
    whole, step = in_steps(numbers, dim)
    assert whole.dtype is torch.int8 and whole.abs().amax() == 127
    assert ((whole * step - numbers).abs() <= step * 0.5001).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_group_with_a_number_that_is_none_is_none(wrong: float) -> None:
    numbers = torch.ones(2, 1, 3, 4)
    numbers[1, 0, 2, 1] = wrong
    whole, step = in_steps(numbers, 3)
    assert (whole * step).isnan().nonzero().tolist() == [[1, 0, 2, d] for d in range(4)]
    assert (whole * step).nan_to_num(1.0).eq(1.0).all()


def test_a_slot_holds_its_own_source_and_is_poison_when_freed() -> None:
    pool = coarse_slots()
    slot, draw = pool.take(), torch.Generator().manual_seed(2)
    keys, values = (torch.randn(4, 2, 5, 16, generator=draw) for _ in range(2))
    pool.put_source(slot, keys, values)
    assert pool.cross_keys.dtype is torch.int8 and int(pool.source_length[slot]) == 5
    read = pool.cross_keys[:, slot] * pool.key_steps[:, slot, :, :, None]
    assert (read[:, :, :5] - keys).abs().max() < keys.abs().max() / 250 and not read[:, :, 5:].any()
    read = pool.cross_values[:, slot] * pool.value_steps[:, slot, :, None]
    assert (read[:, :, :5] - values).abs().max() < values.abs().max() / 250 and not read[:, :, 5:].any()
    pool.give_back(slot)
    for tensor in (pool.keys, pool.values, pool.key_steps, pool.value_steps):
        assert tensor[:, slot].isnan().all()
    pool.take()
    assert not pool.key_steps[:, slot].any() and not pool.cross_values[:, slot].any()


def first_states(cross_kv: Weights) -> Tensor:
    """What the first tokens of six rows are said from."""
    engine, seen = engine_of(BatchRule.own, runner=RunnerName.graph, cross_kv=cross_kv), []
    ops = engine.machine.ops
    words = ops.words

    def shown(frame: Frame) -> Tensor:
        seen.append(frame.hidden[frame.live].clone())
        return words(frame)

    ops.words = shown
    engine.generate(texts(6), max_tokens=1)
    return torch.cat(seen)


def test_states_lie_near_those_over_numbers_and_far_from_those_of_other_sources() -> None:
    coarse, fine = first_states(Weights.int8), first_states(Weights.model)
    assert coarse.shape == fine.shape == (6, fine.shape[1])
    size = fine.norm(dim=1)
    gap, apart = (coarse - fine).norm(dim=1) / size, (fine - fine.roll(1, 0)).norm(dim=1) / size
    assert 0.0 < gap.median() < 0.02 and gap.max() < 0.2 < apart.median()


def test_answers_are_whole_and_mates_change_nothing() -> None:
    policy = confident(Measure.softmax, usual(Measure.softmax))
    alone = engine_of(BatchRule.own, runner=RunnerName.graph, cross_kv=Weights.int8, max_batch=1)
    apart = alone.generate(texts(8), policy=policy)
    engine = engine_of(BatchRule.compact, runner=RunnerName.graph, cross_kv="int8", max_batch=4, overlap=True)
    together = engine.generate(texts(8), policy=policy)
    told = [[(answer.tokens, answer.crossing_layers) for answer in some] for some in (apart, together)]
    assert told[0] == told[1] and len({depth for _, depths in told[0] for depth in depths}) > 1


def test_certificates_tell_it_from_numbers() -> None:
    with_int8 = arithmetic("float32", RunnerName.graph, cross_kv=Weights.int8, kernels="triton")
    assert with_int8 == "float32/graph triton/int8 cross" and not independent_of_batch(with_int8)
    assert arithmetic("float32", RunnerName.graph, kernels="triton") == "float32"


def test_weights_stay_as_they_are() -> None:
    with pytest.raises(ConfigError, match="weights=int8 needs runner=native, and this engine's is graph"):
        engine_of(BatchRule.own, runner=RunnerName.graph, weights=Weights.int8)
    with pytest.raises(ConfigError, match="cross_kv=int8 needs runner=native or graph, and this engine's is eager"):
        engine_of(BatchRule.own, runner=RunnerName.eager, cross_kv=Weights.int8)
