"""The compiled encoder: the cross K/V of the model at any length; each source by itself, to the bit."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from calm.config import RunnerName, Weights
from calm.layer_math import cross_kv
from calm.models.t5 import EarlyExitT5
from serve.engine import Engine
from serve.model import ServedModel, served
from serve.native import encoder
from serve.native.encoder import NativePrefill, PackedEncoder
from serve.native.views import BF16, FP32, INT8
from serve.prefill import CrossKV, Prefill
from tests.scripted import early_exit, random_t5

from .conftest import need_native
from .models import SHAPES, VOCABULARY, tiny_served

KINDS = {"fp32": FP32, "bf16": BF16, "int8": INT8}
LONGEST = 400
LENGTHS = (1, 2, 3, 15, 16, 17, 100, 129, 300, LONGEST)


@pytest.fixture(autouse=True)
def native() -> None:
    need_native()


@cache
def model(shape: str = "v1.1", d_model: int = 36, heads: int = 3) -> EarlyExitT5:
    """Wide distances, and numbers of heads and widths that fill no vector."""
    return early_exit(random_t5(seed=5, vocabulary=VOCABULARY, d_model=d_model, heads=heads, **SHAPES[shape]))


def prefill(shape: str = "v1.1", kind: int = FP32, **sizes: int) -> NativePrefill:
    whole = served(model(shape, **sizes))
    packed = whole.packed_encoder(kind)
    assert packed is not None
    return NativePrefill(packed, rows=4, multiple=16, max_source=LONGEST)


def source(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(2, VOCABULARY) for _ in range(length - 1)] + [1]


@torch.inference_mode()
def torchs(own: EarlyExitT5, ids: list[int]) -> CrossKV:
    tokens = torch.tensor([ids])
    keys, values = cross_kv(served(own).spec, own.encode(tokens, torch.ones_like(tokens, dtype=torch.bool)))
    return keys[:, 0], values[:, 0]


def error(found: Tensor, right: Tensor) -> float:
    """Relative, root mean square."""
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", [{"d_model": 36, "heads": 3}, {"d_model": 128, "heads": 2}], ids=["odd", "even"])
def test_cross_kv_is_the_models_at_any_length(shape: str, sizes: dict[str, int]) -> None:
    encode = prefill(shape, **sizes)
    sources = [source(length) for length in LENGTHS]
    for ids, found in zip(sources, encode(sources), strict=True):
        for mine, theirs in zip(found, torchs(model(shape, **sizes), ids), strict=True):
            assert mine.shape == theirs.shape
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_source_does_not_depend_on_its_mates_to_the_bit(kind: int) -> None:
    encode, mine = prefill(kind=kind), source(37)
    alone = encode([mine])[0]
    crowds = [
        [source(5), mine],
        [mine, source(LONGEST)],
        [source(LONGEST), mine, source(300)],  # more than goes through the layers at once
        [*(source(20, seed) for seed in range(13)), mine, source(1)],
    ]
    for crowd in crowds:
        found = encode(crowd)
        for ids, kv in zip(crowd, found, strict=True):
            if ids is mine:
                assert torch.equal(kv[0], alone[0]) and torch.equal(kv[1], alone[1])


@pytest.mark.parametrize(("kind", "most"), [(BF16, 0.02), (INT8, 0.04)], ids=["bf16", "int8"])
def test_coarser_numbers_stay_close(kind: int, most: float) -> None:
    rough, exact = prefill(kind=kind), prefill()
    sources = [source(length) for length in LENGTHS]
    for found, right in zip(rough(sources), exact(sources), strict=True):
        assert 0 < error(found[0], right[0]) < most and 0 < error(found[1], right[1]) < most


def test_a_source_of_the_wrong_length_is_not_encoded() -> None:
    encode = prefill()
    for bad in ([], [0] * (LONGEST + 1)):
        with pytest.raises(AssertionError):
            encode([source(3), bad])


def test_no_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = prefill()
    monkeypatch.setattr(encode, "_encode", lambda *arguments: encoder.NO_MEMORY)
    with pytest.raises(MemoryError, match="no memory left to encode"):
        encode([source(3)])


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, Weights.model), (torch.bfloat16, Weights.model), (torch.bfloat16, Weights.int8)],
)
def test_an_engine_keeps_cross_kv_in_the_models_dtype(dtype: torch.dtype, weights: Weights) -> None:
    engine = Engine(tiny_served(dtype=dtype), runner=RunnerName.native, weights=weights, max_batch=2)
    assert isinstance(engine.prefill, NativePrefill)
    assert {kv.dtype for kv in engine.prefill([[5, 6, 1]])[0]} == {dtype}


def test_weights_are_packed_once_for_all_engines() -> None:
    whole = served(model())
    assert whole.packed_encoder(BF16) is whole.packed_encoder(BF16)
    assert whole.packed_encoder(BF16) is not whole.packed_encoder(FP32)


def test_a_model_that_brings_only_a_function_is_encoded_by_it() -> None:
    whole: ServedModel = replace(tiny_served(), encoder=None)
    right = Engine(tiny_served(), runner=RunnerName.native, max_batch=2)
    engine = Engine(whole, runner=RunnerName.native, max_batch=2)
    assert isinstance(engine.prefill, Prefill) and isinstance(right.prefill, NativePrefill)
    sources = [source(4), source(7), source(9)]
    for mine, theirs in zip(engine.generate(sources), right.generate(sources), strict=True):
        assert mine.tokens == theirs.tokens


def test_sources_of_any_lengths_go_in_one_call() -> None:
    engine = Engine(tiny_served(), runner=RunnerName.native, max_batch=4, prefill_rows=4, prefill_calls=1)
    for length in (2, 5, 3, 7):
        engine.add_request(source(length))
    step = engine.step()
    assert step.record is not None and (step.record.admitted, step.record.encoder_calls) == (4, 1)


def test_packed_weights_outlive_the_model_that_they_came_from() -> None:
    whole = served(early_exit(random_t5(seed=9, vocabulary=VOCABULARY)))
    assert whole.encoder is not None
    packed = PackedEncoder.of(whole.encoder, whole.spec, FP32)
    encode = NativePrefill(packed, rows=1, multiple=16, max_source=20)
    first = encode([source(9)])[0]
    del whole, packed
    torch.empty(1 << 20).fill_(3.0)
    assert torch.equal(first[0], encode([source(9)])[0][0])
