"""Rows spread over processes: the same answers in the same order, and errors that read as one line."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

import calm
from calm.config import Backfill, DecoderName, Head, Measure
from calm.decode_spec import DecodeSpec, Failure, cut
from calm.environment import usable_cores
from calm.errors import CalmError, ConfigError
from calm.parallel_decode import ParallelDecoder, default_processes
from calm.policies import Confident, Full, Oracle, Policy, Replay, Static
from calm.records import Example
from calm.thresholds import ThresholdSchedule

from ..scripted import early_exit, examples, random_t5

POLICIES: list[Policy] = [
    Full(),
    Static(2),
    Confident(Measure.softmax, ThresholdSchedule(0.4)),
    Oracle(),
    Replay({"e0": (1, 2, 3), "e4": (4, 1)}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calm.save(early_exit(random_t5(vocabulary=40), length=6), tmp_path_factory.mktemp("spread") / "model")


@pytest.fixture(scope="module")
def rows() -> list[Example]:
    return examples(40, 23, longest=7)


def test_cut_deals_every_row_once_by_length_and_independent_of_processes(rows: list[Example]) -> None:
    batches = cut(rows, 4)
    assert sorted(row for batch in batches for row in batch) == list(range(23))
    lengths = [len(rows[row].source) for batch in batches for row in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 3]
    assert cut([], 4) == []


def test_two_processes_equal_one_keep_the_order_and_end_with_their_decoder(folder: Path, rows: list[Example]) -> None:
    spec = DecodeSpec(str(folder), batch_size=4, record_confidences=True)
    told: list[int] = []
    one = ParallelDecoder(spec, 1)
    with ParallelDecoder(spec, 2, told.append) as two:
        two.warm(len(rows))
        assert len(two._workers) == 2
        for policy in POLICIES:
            alone, spread = one(rows, policy), two(rows, policy)
            assert [trace.id for trace in spread] == [row.id for row in rows]
            assert repr(alone) == repr(spread)  # NaN equals NaN here
        assert sum(told) == len(rows) * len(POLICIES)
        assert two([], Full()) == []
        assert repr(two(rows[:3], Full())) == repr(one(rows[:3], Full()))  # one batch is decoded here
        process = next(iter(two._workers.values()))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with pytest.raises(CalmError, match=r"ended with exit code -9 .*try a smaller batch_size than 4"):
            two(rows, Full())
        assert not two._workers
    assert not [child for child in multiprocessing.active_children() if child.name == "calm-decode"]


def test_what_fails_in_a_process_is_raised_here_as_one_line(folder: Path, rows: list[Example]) -> None:
    with ParallelDecoder(DecodeSpec(str(folder), batch_size=12), 2) as decode:
        with pytest.raises(ConfigError, match="depth 9 lies outside 1..4") as caught:
            decode(rows, Static(9))
        assert "\n" not in str(caught.value)
        assert any("Traceback" in note for note in caught.value.__notes__)
        assert not decode._workers  # what the others were still doing is no answer to a later call


def test_an_unknown_error_travels_as_one_line_that_names_it() -> None:
    try:
        raise KeyError("a\nb")
    except KeyError as error:
        failure = Failure.of(error)
    assert str(failure.error()) == "a decoding process failed: KeyError: 'a\\nb'"
    assert type(failure.error()) is CalmError
    assert type(Failure.of(ConfigError("x")).error()) is ConfigError


def test_the_spec_decides_the_decoder(folder: Path, rows: list[Example]) -> None:
    batch = DecodeSpec(str(folder), batch_size=5)
    one = DecodeSpec(str(folder), decoder=DecoderName.one, backfill=Backfill.copy)
    model = batch.load()
    assert isinstance(batch.over(model), calm.BatchDecoder)
    decoder = one.over(model)
    assert isinstance(decoder, calm.OneDecoder) and decoder.backfill is Backfill.copy
    policy = Confident(Measure.state, ThresholdSchedule(0.7))
    for a, b in zip(batch.over(model)(rows, policy), calm.OneDecoder(model)(rows, policy), strict=True):
        assert a.tokens == b.tokens
    with pytest.raises(ConfigError, match="decoder=engine is for programs of eval"):
        DecodeSpec(str(folder), decoder=DecoderName.engine)
    with pytest.raises(ConfigError, match="head=screened with rule=own needs decoder=engine"):
        DecodeSpec(str(folder), head=Head.screened)
    assert DecodeSpec(str(folder), dtype="bfloat16").load().head_weight.dtype.itemsize == 2


def test_a_core_each_on_a_cpu_and_one_process_on_an_accelerator() -> None:
    assert default_processes("cpu") == usable_cores()
    assert default_processes("cuda:0") == 1
