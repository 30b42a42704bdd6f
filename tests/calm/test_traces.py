"""Traces have the distribution, mean and range that they say, and come back from a file as they were."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calm.config import Measure, TraceKind
from calm.errors import ConfigError, DataError
from calm.policies import fixed_depth
from calm.traces import Traces, draw, geometric_ratio, measured, static, table1_depth

DRAWN = [TraceKind.tight, TraceKind.wide]


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize(("layers", "mean"), [(8, 3.69), (8, 2.68), (12, 5.13), (12, 11.5), (3, 2.5)])
def test_the_mean_is_the_one_asked_for(kind: TraceKind, layers: int, mean: float) -> None:
    traces = draw(kind, layers, mean, 200, 100, seed=3)
    values = np.array(traces.depths)
    assert values.shape == (200, 100) and values.min() >= 2 and values.max() <= layers
    assert traces.mean() == pytest.approx(mean, abs=5 * values.std() / 100 / 2**0.5)


def test_tight_is_binomial_and_wide_geometric() -> None:
    tight = np.array(draw(TraceKind.tight, 8, 3.5, 400, 100, 0).depths)
    wide = np.array(draw(TraceKind.wide, 8, 3.5, 400, 100, 0).depths)
    assert tight.var() == pytest.approx(6 * 0.25 * 0.75, rel=0.05) and wide.var() > 1.5 * tight.var()
    shares = np.bincount(wide.ravel())[2:] / wide.size
    expected = geometric_ratio(8, 3.5) ** np.arange(7)
    expected /= expected.sum()
    assert (abs(shares - expected) < 4 * np.sqrt(expected / wide.size)).all()
    assert geometric_ratio(8, 5.0) == pytest.approx(1.0)  # the middle of 2..8: uniform


@pytest.mark.parametrize("kind", DRAWN)
def test_tokens_are_independent_over_rows_and_steps(kind: TraceKind) -> None:
    values = np.array(draw(kind, 8, 3.5, 300, 60, 1).depths, dtype=float)
    values -= values.mean()
    for shifted in (values[1:] * values[:-1], values[:, 1:] * values[:, :-1]):
        assert abs(shifted.mean() / values.var()) < 0.04


def test_a_seed_gives_the_same_depths_again_and_a_longer_trace_is_none_of_another_seed() -> None:
    first, again = (draw(TraceKind.wide, 8, 3.0, 4, 20, 7) for _ in range(2))
    assert first == again and first.depths != draw(TraceKind.wide, 8, 3.0, 4, 20, 8).depths
    assert first.depths[0] != first.depths[1]


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("mean", [2.0, 8.0, 1.5, 9.0, float("nan")])
def test_a_mean_outside_is_refused(kind: TraceKind, mean: float) -> None:
    with pytest.raises(ConfigError, match="must lie between 2 and 8"):
        draw(kind, 8, mean, 1, 1, 0)


def test_static_is_one_whole_depth() -> None:
    assert draw(TraceKind.static, 8, 4, 2, 3, 0).depths == ((4, 4, 4), (4, 4, 4))
    for wrong in (0, 9, 3.5):
        with pytest.raises(ConfigError, match="one of 1..8"):
            static(8, wrong, 1, 1)


def test_traces_survive_a_file_and_damage_is_told() -> None:
    traces = draw(TraceKind.tight, 8, 3.3, 3, 5, 11)
    assert Traces.from_json(traces.to_json()) == traces
    assert json.loads(traces.to_json())["seed"] == 11
    for text in ("[]", "{}", "nonsense", traces.to_json().replace("tight", "tigth")):
        with pytest.raises(DataError, match="no traces"):
            Traces.from_json(text)
    with pytest.raises(ConfigError, match="outside 1..8"):
        Traces(TraceKind.tight, 8, 3.0, 0.1, 0, ((9,),))


def test_a_replay_says_each_requests_depths_and_names_its_measure() -> None:
    traces = draw(TraceKind.tight, 8, 3.3, 2, 4, 0)
    policy = traces.replay(["a", "b"], Measure.state)
    assert policy.measure is Measure.state
    assert [fixed_depth(policy, "b", step, 8) for step in range(5)] == [*traces.depths[1], 8]
    assert traces.mean(1, 3, rows=1) == sum(traces.depths[0][1:3]) / 2
    with pytest.raises(ConfigError, match="draw more rows"):
        traces.replay(["a", "b", "c"], None)
    with pytest.raises(ConfigError, match="no token"):
        traces.mean(4)


def records(path: Path, layers: int = 4) -> Path:
    crossing = [[1, 2, 3], [4, 4], [2]]
    rows = [("state", each) for each in crossing] + [("full", [layers] * 3), ("lead-1", None)]
    table = {
        "row": [name for name, _ in rows],
        "crossing_layers": [each for _, each in rows],
        "emission_layers": [each for _, each in rows],
        "backfilled_layers": [each and [layers - depth for depth in each] for _, each in rows],
    }
    pq.write_table(pa.table(table), path)
    return path


def test_measured_traces_string_recorded_answers_together(tmp_path: Path) -> None:
    path = records(tmp_path / "records.parquet")
    traces = measured(path, "state", 4, rows=5, steps=30, seed=2)
    assert traces.wanted == pytest.approx(16 / 6) and traces.source == "records.parquet:state"
    assert [len(row) for row in traces.depths] == [30] * 5 and len(set(traces.depths)) > 1
    for row in traces.depths:
        rest = row
        while len(rest) >= 3:
            answer = next(each for each in ((1, 2, 3), (4, 4), (2,)) if rest[: len(each)] == each)
            rest = rest[len(answer) :]


def test_records_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = records(tmp_path / "records.parquet")
    with pytest.raises(DataError, match="no layers of a row 'softmax'; it has full, lead-1, state"):
        measured(path, "softmax", 4, 1, 1, 0)
    with pytest.raises(DataError, match="no layers of a row 'lead-1'"):
        measured(path, "lead-1", 4, 1, 1, 0)
    with pytest.raises(DataError, match="model of 4 decoder layers.*one of 8"):
        measured(path, "state", 8, 1, 1, 0)
    with pytest.raises(DataError, match="cannot be read"):
        measured(tmp_path / "nothing.parquet", "state", 4, 1, 1, 0)


def test_the_papers_mean_depths() -> None:
    assert table1_depth("t5-v1_1-small", Measure.state, 8) == pytest.approx(8 * (1 - 0.5653))
    assert table1_depth("t5-v1_1-base", Measure.classifier, 12) == pytest.approx(12 * (1 - 0.5906))
    assert table1_depth("tiny", Measure.softmax, 8) == pytest.approx(8 * (1 - 0.5382))
    with pytest.raises(ConfigError, match="no row of entropy"):
        table1_depth("t5-v1_1-base", Measure.entropy, 12)
