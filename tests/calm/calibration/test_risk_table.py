"""The cache of traces: lossless, keyed, resumable, and wary of damage."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from calm.calibration.risk_table import RiskTable, TraceCache, pack_traces, unpack_traces, walk_grid
from calm.config import Measure
from calm.errors import CalibrationError
from calm.policies import Confident, Full
from calm.records import DecodeTrace, Example
from calm.thresholds import ThresholdSchedule

from .fake_decoder import IDENTITY, LAYERS, FakeDecoder, make_examples

EXITS = (IDENTITY.exit_layers, LAYERS)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, and a busy disk takes its time."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def policy(threshold: float) -> Confident:
    return Confident(Measure.softmax, ThresholdSchedule(threshold))


def test_packing_loses_nothing() -> None:
    traces = FakeDecoder()(make_examples(5, "pack"), policy(0.5))
    traces.insert(2, DecodeTrace("empty", (), "", (), (), (), (), ()))
    traces.append(DecodeTrace("日本", (3,), "text\n\ud800", (1,), (2,), (3,), (4,), ((0.5, float("nan")) * 3,), False))
    assert repr(unpack_traces(pack_traces(traces))) == repr(traces)
    bare = [replace(trace, confidences=()) for trace in FakeDecoder()(make_examples(2, "bare"), Full())]
    assert unpack_traces(pack_traces(bare)) == bare
    assert unpack_traces(pack_traces([])) == []


def test_a_second_run_decodes_nothing(tmp_path: Path) -> None:
    examples = make_examples(10, "cache")
    first, second = FakeDecoder(), FakeDecoder()
    one = TraceCache(tmp_path / "c", {"model": "a"}, chunk_rows=4).decode(first, examples, policy(0.5), "t")
    two = TraceCache(tmp_path / "c", {"model": "a"}, chunk_rows=4).decode(second, examples, policy(0.5), "t")
    assert [len(ids) for ids, _ in first.calls] == [4, 4, 2]
    assert second.calls == []
    assert repr(one) == repr(two)
    assert [trace.id for trace in one] == [example.id for example in examples]


@pytest.mark.parametrize("name", ["model", "tokenizer", "dtype", "rows", "grid"])
def test_another_key_rejects_the_cache_and_says_what_changed(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = {"model": "a", "tokenizer": "b", "dtype": "float32", "rows": "r", "grid": "g"}
    examples = make_examples(3, "key")
    TraceCache(tmp_path / "c", key, 8).decode(FakeDecoder(), examples, policy(0.5), "t")
    again = FakeDecoder()
    TraceCache(tmp_path / "c", {**key, name: "other"}, 8).decode(again, examples, policy(0.5), "t")
    assert again.rows == 3
    assert f"decoded with another {name}: rejected" in caplog.text
    assert json.loads((tmp_path / "c" / "key.json").read_text())[name] == "other"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "other rows"])
def test_a_damaged_chunk_is_decoded_anew(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    examples = make_examples(3, "damage")
    cache = TraceCache(tmp_path / "c", {}, 8)
    expected = cache.decode(FakeDecoder(), examples, policy(0.5), "t")
    path = next((tmp_path / "c").glob("*.traces"))
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 3] ^= 0xFF
    kept = {"truncated": data[: len(data) // 2], "flipped": data, "empty": b"", "other rows": pack_traces(expected[:2])}
    path.write_bytes(kept[damage])
    again = FakeDecoder()
    assert repr(cache.decode(again, examples, policy(0.5), "t")) == repr(expected)
    assert again.rows == 3
    assert "anew" in caplog.text


def test_a_damaged_key_rejects_the_cache(tmp_path: Path) -> None:
    examples = make_examples(3, "key")
    TraceCache(tmp_path / "c", {"model": "a"}, 8).decode(FakeDecoder(), examples, policy(0.5), "t")
    (tmp_path / "c" / "key.json").write_text("{")
    again = FakeDecoder()
    TraceCache(tmp_path / "c", {"model": "a"}, 8).decode(again, examples, policy(0.5), "t")
    assert again.rows == 3


def test_a_decoder_that_mixes_up_rows_is_refused(tmp_path: Path) -> None:
    def mixed(examples: list[Example], policy: object) -> list[DecodeTrace]:
        return FakeDecoder()(examples, Full())[::-1]

    with pytest.raises(CalibrationError, match="trace 0 is of row"):
        TraceCache(tmp_path / "c", {}, 8).decode(mixed, make_examples(2, "mixed"), Full(), "t")


def test_walking_a_grid_equals_decoding_every_threshold_and_decodes_less(tmp_path: Path) -> None:
    examples = make_examples(40, "walk")
    grid = [1.0, 0.999, 0.98, 0.95, 0.6, 0.2]
    decoder = FakeDecoder()
    full = decoder(examples, policy(1.0))
    walk = list(walk_grid(TraceCache(tmp_path / "c", {}, 16), decoder, examples, policy, grid, full, EXITS))
    assert [index for index, _ in walk] == [1, 2, 3, 4, 5]
    for index, traces in walk:
        fresh = FakeDecoder()(examples, policy(grid[index]))
        assert [t.tokens for t in traces] == [t.tokens for t in fresh]
        assert [t.emission_layers for t in traces] == [t.emission_layers for t in fresh]
    assert decoder.rows < 40 * len(grid)


def test_a_walk_decodes_only_as_far_as_it_is_followed(tmp_path: Path) -> None:
    examples = make_examples(4, "lazy")
    decoder = FakeDecoder()
    walk = walk_grid(TraceCache(tmp_path / "c", {}, 16), decoder, examples, policy, [1.0, 0.5, 0.4], [], EXITS)
    assert decoder.calls == []
    walk.close()
    full = FakeDecoder()(examples, Full())
    walk = walk_grid(TraceCache(tmp_path / "c", {}, 16), decoder, examples, policy, [1.0, 0.5, 0.4], full, EXITS)
    next(walk)
    assert {call[1] for call in decoder.calls} == {policy(0.5)}


def test_progress_counts_rows_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    cache = TraceCache(tmp_path / "c", {}, 4)
    cache.decode(FakeDecoder(), make_examples(6, "p"), Full(), "what", lambda *state: seen.append(state))
    assert seen == [("what", 0, 6), ("what", 4, 6), ("what", 6, 6)]


def test_the_table_keeps_articles_by_thresholds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    examples = make_examples(3, "table")
    table = RiskTable([e.id for e in examples], [1.0, 0.5, 0.1], LAYERS)
    full, early = FakeDecoder()(examples, Full()), FakeDecoder()(examples, policy(0.5))
    table.add(np.zeros(3), full)
    table.add(np.array([0.25, 0.5, 0.0]), early)
    assert table.mean_losses == [0.0, 0.25]
    layers = [layer for trace in early for layer in trace.emission_layers]
    assert table.layers_skipped == [0.0, pytest.approx(1 - sum(layers) / len(layers) / LAYERS)]
    skips = [1 - sum(trace.emission_layers) / len(trace.tokens) / LAYERS for trace in early]
    assert table.article_skips[0] == (0.0, 0.0)
    assert table.article_skips[1] == (pytest.approx(np.mean(skips)), pytest.approx(np.std(skips)))
    assert table.exit_shares[0][-1] == 1.0 and len(table.exit_shares[0]) == LAYERS
    assert table.exit_shares[1] == tuple(pytest.approx(layers.count(n) / len(layers)) for n in range(1, LAYERS + 1))
    table.save(tmp_path / "risk.parquet")
    frame = pq.read_table(tmp_path / "risk.parquet").to_pylist()
    assert len(frame) == 6
    assert frame[4] == {
        "id": "table-1",
        "index": 1,
        "threshold": "0.5",
        "loss": 0.5,
        "emission_layers": sum(early[1].emission_layers),
        "tokens": len(early[1].tokens),
    }
