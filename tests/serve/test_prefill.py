"""Cross K/V: the same bits whoever is encoded beside, no encoder for what was seen before, and few kept."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from calm.config import BatchRule
from calm.models.t5_adapter import T5Adapter
from serve.engine import Engine
from serve.measure import setting_of
from serve.model import ServedModel
from serve.prefill import CrossCache, cross_bytes, source_key

from .models import engine_of, texts, tiny, tiny_served


@contextmanager
def counted() -> Iterator[tuple[ServedModel, list[tuple[int, ...]]]]:
    """The tiny model, and the shapes of its encoder calls."""
    calls: list[tuple[int, ...]] = []
    model = tiny_served()

    def encode(ids: Tensor, mask: Tensor) -> Tensor:
        calls.append(tuple(ids.shape))
        return model.encode(ids, mask)

    yield replace(model, encode=encode, encoder=None), calls


def test_a_repeated_source_costs_no_encoder() -> None:
    with counted() as (model, calls):
        engine = engine_of(BatchRule.own, model, max_batch=4)
        first = engine.generate(texts(6))
        spent = len(calls)
        assert spent >= 2
        again = engine.generate(texts(6)[::-1])[::-1]
        assert len(calls) == spent and engine.cross_cache.hits == 6
        assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
        ids = engine.generate([engine.model.to_ids(texts()[0])])
        assert len(calls) == spent and ids[0].tokens == first[0].tokens


def test_the_cache_keeps_the_last_used() -> None:
    cache = CrossCache(2)
    kv = (torch.zeros(1), torch.zeros(1))
    for key in (b"a", b"b"):
        cache.put(key, kv)
    assert cache.get(b"a") is kv
    cache.put(b"c", kv)
    assert b"a" in cache and b"b" not in cache and len(cache) == 2
    assert cache.get(b"b") is None
    assert (cache.hits, cache.misses) == (1, 1)
    none = CrossCache(0)
    none.put(b"a", kv)
    assert len(none) == 0


def test_the_cache_is_bounded_by_bytes_too() -> None:
    engine = engine_of(BatchRule.own, max_batch=4)
    ids = {name: [5 + number] * (3 + number) for number, name in enumerate((b"a", b"b", b"c"))}
    kv = {name: engine.prefill([source])[0] for name, source in ids.items()}
    token = cross_bytes(engine.model.spec)
    assert [sum(tensor.nbytes for tensor in kv[name]) for name in kv] == [3 * token, 4 * token, 5 * token]
    cache = CrossCache(64, 8 * token)
    for name, (keys, values) in kv.items():
        cache.put(name, (keys, values))
    assert b"a" not in cache and b"b" not in cache and cache.held_bytes == 5 * token  # 4 and 5 are too many together
    cache.put(b"a", kv[b"a"])
    assert (len(cache), cache.held_bytes) == (2, 8 * token)
    cache.put(b"huge", tuple(tensor.repeat(1, 1, 3, 1) for tensor in kv[b"a"]))  # type: ignore[arg-type]
    assert b"huge" not in cache and len(cache) == 2
    assert CrossCache(64).max_bytes is None


def test_an_engine_whose_cache_is_bounded_by_bytes_is_foretold() -> None:
    engine = engine_of(BatchRule.own, max_batch=4)
    engine.cross_cache = CrossCache(64, 9 * cross_bytes(engine.model.spec) + 1)
    assert setting_of(engine).cross_cache_tokens == 9
    first = engine.generate([[5] * 6, [6] * 7, [5] * 6])
    assert engine.cross_cache.held_bytes <= 9 * cross_bytes(engine.model.spec)
    assert [answer.tokens for answer in engine.generate([[5] * 6])] == [first[0].tokens]


def test_without_a_cache_every_source_is_encoded() -> None:
    with counted() as (model, calls):
        engine = engine_of(BatchRule.own, model, max_batch=4, cross_cache_rows=0, prefill_rows=1)
        engine.generate([texts()[0]] * 5)
        assert len(calls) == 5


def test_encoder_calls_have_few_shapes_and_a_bound_per_step() -> None:
    with counted() as (model, calls):
        engine = engine_of(BatchRule.own, model, max_batch=8, prefill_rows=3, prefill_calls=2, source_multiple=4)
        for text in texts(12):
            engine.add_request(text)
        while engine.has_work:
            before = len(calls)
            step = engine.step()
            assert step.record is not None and len(calls) - before == step.record.encoder_calls <= 2
    assert {rows for rows, _ in calls} == {3}
    assert {length for _, length in calls} <= {4, 8, 12, 16} and len({length for _, length in calls}) >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cross_kv_does_not_depend_on_mates(dtype: torch.dtype) -> None:
    engine = Engine(tiny_served(dtype=dtype), prefill_rows=4, source_multiple=4, max_batch=2)
    mine = [5, 6, 7, 1]
    alone = engine.prefill([mine])[0]
    crowds: list[Sequence[Sequence[int]]] = [
        ([8, 9, 10, 1], mine),
        ([90] * 3, [91, 1], [92, 93, 1], mine),
        (mine, [3], mine),
    ]
    for crowd in crowds:
        for source, (keys, values) in zip(crowd, engine.prefill(crowd), strict=True):
            if source is mine:
                assert torch.equal(keys, alone[0]) and torch.equal(values, alone[1])


def test_cross_kv_is_that_of_the_model() -> None:
    """Also where the source is shorter than what it is padded to: padding is not attended to."""
    model, adapter = tiny(), T5Adapter(tiny())
    source = [5, 17, 23, 1, 9]
    hidden = adapter.prefill(source).encoder_hidden
    keys, values = Engine(tiny_served(), max_batch=2).prefill([source])[0]
    for number, block in enumerate(model.hf.decoder.block):
        attention = block.layer[1].EncDecAttention
        for mine, own in ((keys, attention.k(hidden)), (values, attention.v(hidden))):
            theirs = own[0].view(len(source), 2, 16).transpose(0, 1)
            torch.testing.assert_close(mine[number], theirs, atol=1e-5, rtol=1e-5)


def test_sources_have_keys_of_their_own() -> None:
    sources: list[tuple[Any, ...]] = [(), (1,), (1, 1), (11,), (1, 11), (111,), (11, 1)]
    assert len({source_key(source) for source in sources}) == len(sources)
    assert source_key([1, 2]) == source_key((1, 2))
