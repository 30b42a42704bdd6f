"""Depths inside batches, from recorded answers: against the rule written out row by row."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calm.errors import CalmError, ConfigError, DataError
from calm.experiment_config import SlowestRowConfig
from calm.report_plots import draw_panels, panels_of
from eval import slowest_row
from eval.recorded import padded, read_answers, read_records
from eval.slowest_row import drawn, stopping

LAYERS = 6


def run_folder(folder: Path, answers: list[list[int]], certified: bool = True) -> Path:
    """What a run of eval.table1 leaves, as far as it is read here."""
    rows = [("full", [LAYERS] * len(layers)) for layers in answers] + [("softmax", layers) for layers in answers]
    rows += [("lead-1", None)] * len(answers)  # type: ignore[list-item]
    lists = pa.array([layers for _, layers in rows], type=pa.list_(pa.int32()))
    ids = [str(i % len(answers)) for i in range(len(rows))]
    table = pa.table({"id": ids, "row": [r for r, _ in rows], "crossing_layers": lists, "emission_layers": lists})
    pq.write_table(table, folder / "records.parquet")
    entries = [{"row": "full", "tolerance": None}, {"row": "softmax", "tolerance": 0.05 if certified else None}]
    (folder / "summary.json").write_text(json.dumps({"started": "then", "table1": entries}))
    return folder


def by_hand(batch: list[list[int]], share: float | None) -> dict[str, float]:
    """Position by position: who is live, where the step stops, whom it takes along."""
    layers, early, involuntary, tokens = 0, 0, 0, 0
    for step in range(max(map(len, batch))):
        live = [row[step] for row in batch if step < len(row)]
        for depth in live:
            crossed_by = [sum(other <= layer for other in live) for layer in range(1, LAYERS + 1)]
            stop = depth
            if share is not None:
                stop = next(layer for layer, n in enumerate(crossed_by, 1) if n >= share * len(live) - 1e-9)
            layers, early, tokens = layers + stop, early + (stop < LAYERS), tokens + 1
            involuntary += depth > stop
    return {"layers": layers / tokens, "stops_early": early / tokens, "involuntary": involuntary / tokens}


@pytest.mark.parametrize("share", [None, 1.0, 0.9, 0.5])
def test_a_batch_stops_where_the_rule_says(share: float | None) -> None:
    generator = np.random.default_rng(4)
    for _ in range(20):
        batch = [list(generator.integers(1, LAYERS + 1, generator.integers(1, 7))) for _ in range(5)]
        found = stopping(padded(batch)[None], share, LAYERS)
        for name, value in by_hand(batch, share).items():
            assert math.isclose(found[name], value), (name, batch)
    assert share is not None or found["involuntary"] == 0


def test_batches_are_drawn_without_an_article_twice_and_mixed_as_asked() -> None:
    crossing = padded([[1 + number // 2] * 3 for number in range(10)])  # later articles are harder
    generator = np.random.default_rng(0)
    for share, hard in ((None, None), (0.0, 0), (0.5, 2), (1.0, 4)):
        groups = drawn(crossing, 4, share, 50, generator)
        assert groups.shape == (50, 4) and all(len(set(group)) == 4 for group in groups.tolist())
        if hard is not None:
            assert {sum(each >= 5 for each in group) for group in groups.tolist()} == {hard}
    with pytest.raises(CalmError, match="a batch of 6 needs 6 articles of 5"):
        drawn(crossing, 6, 1.0, 1, generator)


def test_the_program_on_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(1)
    answers = [list(map(int, generator.integers(1, LAYERS + 1, 5))) for _ in range(40)]
    folder = run_folder(tmp_path, answers)
    config = SlowestRowConfig(str(folder), batches=[1, 8, 64], mixed_batches=[8], hard_shares=[0.0, 1.0], draws=20)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert slowest_row.run(config, run_dir) == slowest_row.UNFINISHED  # 64 rows of 40 articles
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["failed"] == {"softmax-64-None": "a batch of 64 needs 64 articles of 40"}
    rows = pd.DataFrame(summary["rows"])
    plain = rows[rows["hard_share"].isna()].set_index(["batch", "rule"])["layers"]
    assert plain[1, "own"] == plain[1, "sync"] == plain[1, "quantile 0.5"]
    assert plain[8, "sync"] > plain[8, "quantile 0.9"] - 1e-9 > plain[8, "own"] > plain[8, "quantile 0.5"]
    mixed = rows[rows["hard_share"].notna() & (rows["rule"] == "sync")].set_index("hard_share")["layers"]
    assert mixed[1.0] > mixed[0.0]
    assert (rows["layers_low"] <= rows["layers"]).all() and (rows["layers"] <= rows["layers_high"]).all()
    assert summary["figures"] == ["slowest_row.png", "slowest_row.pdf"]
    assert pd.read_parquet(run_dir / "rows.parquet").shape[0] == len(rows)
    again = slowest_row.run(config, run_dir)
    assert again == slowest_row.UNFINISHED
    assert json.loads((run_dir / "summary.json").read_text())["rows"] == summary["rows"]
    capsys.readouterr()


def test_batches_are_decoded_as_their_rule_says(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"records": str(certified / "table_run"), "rows": ["state"], "batches": [1, 4], "mixed_batches": [4]}
    config = SlowestRowConfig(**asked, hard_shares=[0.5], draws=20, decoded=[1, 4], n=24, bootstrap=20)  # type: ignore[arg-type]
    assert slowest_row.run(config, tmp_path) == 0
    rows = pd.DataFrame(json.loads((tmp_path / "summary.json").read_text())["rows"])
    decoded = rows[rows["decoded"]].set_index(["rule", "batch"])
    recorded = read_records(str(certified / "table_run"))
    first = read_answers(recorded, "state").emission[:24]
    alone = first.sum() / (first > 0).sum()
    assert decoded.loc[("sync", 1), "layers"] == pytest.approx(alone)  # a row alone waits for nobody
    assert decoded.loc[("lockstep", 1), "layers"] == pytest.approx(alone)
    assert decoded.loc[("lockstep", 4), "layers"] >= decoded.loc[("sync", 4), "layers"] - 0.3 > alone - 0.3
    assert (decoded["articles"] == 24).all() and (decoded["layers_low"] <= decoded["layers"]).all()
    capsys.readouterr()


def test_what_cannot_be_read_or_asked_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run python -m eval.table1"):
        read_records(None)
    with pytest.raises(DataError, match="holds no summary.json and records.parquet"):
        read_records(str(tmp_path))
    recorded = read_records(str(run_folder(tmp_path, [[1, 2], [6]], certified=False)))
    assert recorded.num_layers == LAYERS
    with pytest.raises(ConfigError, match="is certified; name some with rows="):
        list(slowest_row.trials(SlowestRowConfig(), recorded))
    with pytest.raises(ConfigError, match="'nobody' is none of full, softmax"):
        list(slowest_row.trials(SlowestRowConfig(rows=["nobody"]), recorded))


def test_the_figure_has_full_depth_units_and_every_rule() -> None:
    values: dict[str, Any] = {"layers": 3.0, "layers_low": 2.9, "layers_high": 3.1, "decoded": False}
    values |= {f"stops_early{end}": 0.5 for end in ("", "_low", "_high")}
    rows = [
        {"row": "softmax", "batch": batch, "hard_share": share, "rule": rule, **values}
        for batch in (1, 8)
        for share in (None, 0.5)
        for rule in ("own", "sync", "quantile 0.7")
    ]
    rows += [{**rows[0], "batch": 8, "rule": rule, "decoded": True} for rule in ("sync", "lockstep")]
    axes = draw_panels(panels_of("slowest_row", {"rows": rows, "num_layers": 8}))
    assert [ax.get_title() for ax in axes] == [
        "softmax: random batches", "sync: steps that end below the last layer", "sync: mixtures"
    ]  # fmt: skip
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == [
        "own", "sync", "quantile 0.7", "sync, decoded", "lockstep, decoded"
    ]  # fmt: skip
    assert "95 % interval" in axes[0].get_ylabel() and axes[2].get_xlabel() == "hard rows in a batch (%)"
    assert any(text.get_text() == "full depth" for text in axes[0].texts)
