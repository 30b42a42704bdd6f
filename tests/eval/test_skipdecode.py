"""eval.skipdecode: each way decodes as it says, thresholds reach their layers, the paper's numbers stand beside."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import calm
from calm.checkpoint import write_json
from calm.config import CONF_DIR, DataConfig, Measure
from calm.data import load_corpus
from calm.decode import OneDecoder
from calm.errors import ConfigError, DataError
from calm.experiment_config import SkipDecodeConfig
from calm.layer_schedule import Decay, LayerSchedule, Side
from calm.metrics import rouge_l
from calm.models.cut import keep_first_layers
from calm.policies import SkipSchedule
from calm.records import mean_layers
from calm.report_plots import draw_panels, panels_of
from eval import bleu, skipdecode
from eval.common import articles_of
from eval.said.skipdecode import said
from eval.skipdecode import searches
from eval.skipdecode_slots import slot_row
from eval.skipdecode_tables import Paper, table4, table5
from eval.skipdecode_ways import SKIP, scheduled_ways, sought

from .folders import LENGTH, random_folder

RESULTS = Path(__file__).parents[2] / "results/skipdecode"
QUICK: dict[str, Any] = {
    "n": 16, "dev_rows": 12, "search": 6, "speedups": [2], "measure": Measure.softmax, "batches": [2], "batch_size": 8,
    "few": 2, "many": 6, "repeats": 1, "warmups": 0, "attempts": 1, "allow_noisy": True, "bootstrap": 20,
}  # fmt: skip
SCHEDULES = {
    "skip": LayerSchedule(3, 1, LENGTH), "bottom": LayerSchedule(2, 2, LENGTH, side=Side.bottom),
    "cold": LayerSchedule(3, 1, LENGTH, 0), "power": LayerSchedule(4, 1, LENGTH, decay=Decay.power, power=0.5),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """``base`` of four layers, and the same weights twice as if they had been trained by a schedule."""
    parent = tmp_path_factory.mktemp("skipdecode")
    found = {"base": str(random_folder(parent))}
    for name, schedule in SCHEDULES.items():
        model = calm.load(found["base"])
        model.settings.skip_schedule = schedule.to_json()
        found[name] = str(calm.save(model, parent / name))
    return found


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which every way's turn takes as long as it has tokens, whoever else uses the machine."""

    def ticked(contenders: Any, *_: Any) -> list[dict[str, Any]]:
        for each in contenders:
            assert all(len(trace.tokens) == 6 for trace in each.run(6)), "EOS is ignored"
        ratio = {f"decode_tokens_ratio{end}": 2.0 for end in ("", "_low", "_high")}
        return [{"way": each.name, "noisy": False, "call_over_full": 1.5, **ratio} for each in contenders]

    monkeypatch.setattr(skipdecode, "clock_rows", ticked)


def config_of(folders: dict[str, str], **changes: Any) -> SkipDecodeConfig:
    scheduled = [folders["bottom"], folders["skip"]]
    settings: dict[str, Any] = {"scheduled": scheduled, "exits": folders["base"]}
    return SkipDecodeConfig(folders["base"], **{**settings, **QUICK, **changes})


def test_the_program(folders: dict[str, str], tmp_path: Path, steady: None, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(folders)
    assert skipdecode.run(config, tmp_path) == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = {row["way"]: row for row in summary["rows"]}
    assert list(rows) == ["base-1x", "skipdecode-2x", "multi_layer_exit-2x", "calm_dec-1x", "calm_dec-2x"]
    model = calm.load(folders["base"])
    _, articles = articles_of(None, model, 16)
    for way, name in (("skipdecode-2x", "skip"), ("multi_layer_exit-2x", "bottom")):
        traces = OneDecoder(model)(articles, SkipSchedule(SCHEDULES[name]))
        scores = [rouge_l(trace.text, each.target) for trace, each in zip(traces, articles, strict=True)]
        assert rows[way]["rouge_l"] == pytest.approx(np.mean(scores))
        ran = [layers for trace in traces for layers in trace.executed_layers]
        assert rows[way]["layers"] == rows[way]["executed"] == pytest.approx(np.mean(ran))
        assert rows[way]["layers_skipped"] == pytest.approx(1 - np.mean(ran) / 4) and rows[way]["backfilled"] == 0.0
    assert rows["base-1x"]["layers"] == rows["calm_dec-1x"]["layers"] == 4.0
    assert rows["base-1x"]["rouge_l"] == rows["calm_dec-1x"]["rouge_l"] == 1.0, "references are its own answers"
    assert rows["calm_dec-2x"]["threshold"] is not None and 1.0 <= rows["calm_dec-2x"]["layers"] < 4.0
    assert rows["skipdecode-2x"]["paper_rouge_l"] == 0.679 and rows["multi_layer_exit-2x"]["paper_rouge_l"] == 0.657
    assert {pair["against"] for pair in summary["pairs"]} == {"multi_layer_exit", "calm_dec"}
    counted = {(row["way"], row["slots"]): row for row in summary["slots"]}
    assert set(counted) == {(way, slots) for way in ("skipdecode-2x", "multi_layer_exit-2x") for slots in (8, 32)}
    assert counted["skipdecode-2x", 8]["row_layers"] == pytest.approx(rows["skipdecode-2x"]["layers"])
    scores = pd.read_parquet(tmp_path / "rows.parquet").set_index("way")["scores"]
    gained = np.array(scores["skipdecode-2x"]) - np.array(scores["multi_layer_exit-2x"])
    assert summary["pairs"][0]["rouge_l_gained"] == pytest.approx(gained.mean())
    clocks = {clock["way"]: clock for clock in summary["clocks"]}
    counted = [SCHEDULES["skip"].count(step - 1) for step in range(2, 6)]
    assert clocks["skipdecode-2x"]["layers"] == pytest.approx(np.mean(counted)) and clocks["base-1x"]["layers"] == 4.0
    assert "SkipDecode" in printed and "ROUGE-L (paper)" in printed and (summary["bleu"] or bleu.MISSING in printed)
    assert summary["figures"] == ["skipdecode.png", "skipdecode.pdf"] and not summary["failed"]
    assert all(text.endswith(".") and "nan" not in text for text in said(summary))
    (record,) = tmp_path.glob("trials/*/quality-skipdecode-2x-*.json")
    write_json(record, {"state": "running"})
    assert skipdecode.run(config, tmp_path) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] == summary["rows"]
    capsys.readouterr()


def test_variants_stand_beside_one_speedup_and_have_no_clock(
    folders: dict[str, str], tmp_path: Path, steady: None, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = [folders["cold"], folders["power"]]
    plain = config_of(folders, exits=None, batches=[], variants=variants, variants_of=2)
    assert skipdecode.run(plain, tmp_path) == 0
    first = json.loads((tmp_path / "summary.json").read_text())
    names = ["skipdecode-2x", "variant-linear-3-1-warmup-0", "variant-power-0.5-4-1-warmup-1"]
    rows = {row["way"]: row for row in first["ablation"]}
    assert list(rows) == names and [row["way"] for row in first["rows"]] == [
        "base-1x", "skipdecode-2x", "multi_layer_exit-2x",
    ]  # fmt: skip
    assert {pair["against"] for pair in first["pairs"]} == {"multi_layer_exit"}
    scores = pd.read_parquet(tmp_path / "rows.parquet").set_index("way")["scores"]
    for name in names:
        gained = np.array(scores[name]) - np.array(scores[names[0]])
        assert rows[name]["rouge_l_gained"] == pytest.approx(gained.mean())
        assert rows[name]["rouge_l"] == pytest.approx(np.mean(scores[name]))
    assert (rows[names[1]]["warmup_layers"], rows[names[2]]["power"]) == (0, 0.5)
    assert "linear decay from 3 to 1 layers, 0 warm-up layers" in said(first)[2]
    table = (tmp_path / "tables.md").read_text()
    assert "| decay | layers from |" in table and "| power 0.5 | 4 | 1 | 1 |" in table
    records = {path: path.stat().st_mtime_ns for path in tmp_path.glob("trials/*/quality-*.json")}
    assert skipdecode.run(config_of(folders, exits=None, variants=variants, variants_of=2), tmp_path) == 0
    again = json.loads((tmp_path / "summary.json").read_text())
    assert {clock["way"] for clock in again["clocks"]} == {row["way"] for row in first["rows"]}
    assert (again["rows"], again["ablation"]) == (first["rows"], first["ablation"])
    assert records == {path: path.stat().st_mtime_ns for path in tmp_path.glob("trials/*/quality-*.json")}
    capsys.readouterr()


def test_calls_of_layers_are_counted_by_hand() -> None:
    """Layers 4, 3 and 2 at steps 1, 2 and 3, of 4: answers of 2, 4 and 3 tokens, two places, the prompt first."""
    schedule = LayerSchedule(4, 1, 3, 0)
    assert [schedule.count(position) for position in range(3)] == [4, 3, 2]
    found = slot_row(schedule, 4, [2, 4, 3], 2, 1)
    assert found["tokens"] == 6 and found["row_layers"] == pytest.approx((4 + 4 + 3 + 2 + 4 + 3) / 6)
    assert found["together"] == pytest.approx((4 + 3 + 2 + 4 + 3) / 6)
    # steps of the places: (1, 1), then (2, 1) as the third answer joins, then (3, 2)
    assert found["continuous"] == pytest.approx((4 + 4 + 3) / 6)
    assert found["banded"] == pytest.approx((4 + (3 + 4) + (2 + 3)) / 6)
    assert found["full_depth"] == pytest.approx(3 * 4 / 6)
    alone = slot_row(schedule, 4, [2, 4, 3], 1, 1)
    assert alone["together"] == alone["continuous"] == alone["banded"] == alone["row_layers"]
    assert slot_row(schedule, 4, [1, 1], 2, 1)["tokens"] == 0
    assert slot_row(schedule, 4, [1], 2, 0)["row_layers"] == 4.0


def test_two_corpora_are_one_record(folders: dict[str, str], tmp_path: Path) -> None:
    config = config_of(folders, exits=None, batches=[])
    (tmp_path / "a").mkdir()
    assert skipdecode.run(config, tmp_path / "a") == 0
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    (tmp_path / "b").mkdir()
    write_json(tmp_path / "b/summary.json", {**summary, "corpus": "another"})
    files = [str(tmp_path / name / "summary.json") for name in "ab"]
    assert skipdecode.run(SkipDecodeConfig(merge=files), tmp_path) == 0
    both = json.loads((tmp_path / "summary.json").read_text())
    assert list(both["corpora"]) == [summary["corpus"], "another"]
    assert both["corpora"]["another"]["rows"] == summary["rows"] and both["corpora"]["another"]["record"] == files[1]
    with pytest.raises(ConfigError, match="are both of jsonl"):
        skipdecode.run(SkipDecodeConfig(merge=[files[0], files[0]]), tmp_path)
    with pytest.raises(DataError, match="no summary.json of eval.skipdecode on a corpus"):
        skipdecode.run(SkipDecodeConfig(merge=[str(tmp_path / "summary.json")]), tmp_path)


def test_without_exits_and_clock(folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(folders, exits=None, batches=[], scheduled=[folders["skip"]])
    assert skipdecode.run(config, tmp_path) == 0
    assert "CALM-DEC is left out" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["way"] for row in summary["rows"]] == ["base-1x", "skipdecode-2x"] and summary["clocks"] == []
    assert len(panels_of("skipdecode", summary)) == 1 and len(said(summary)) == 3


def test_what_cannot_be_compared_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    def refused(why: str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=why):
            skipdecode.run(config_of(folders, **changes), tmp_path)

    refused("was not trained with finetune.skip_schedule", scheduled=[folders["base"]])
    refused("are both skipdecode-2x; give one of them", scheduled=[folders["skip"], folders["skip"]])
    refused("the paper has e2e .opt_1_3b, opt_6_7b., reddit_tldr", paper="xsum")
    refused("no folder of scheduled= is skipdecode-3x", variants=[folders["cold"]])
    refused("was trained with side=bottom, and top is compared", variants=[folders["bottom"]], variants_of=2)
    with pytest.raises(ConfigError, match="was trained by a schedule, and 1x needs a model of full depth"):
        skipdecode.run(SkipDecodeConfig(folders["skip"], **QUICK), tmp_path)
    model = keep_first_layers(calm.load(folders["base"]), 3)
    refused("has 3 decoder layers and .* 4", exits=str(calm.save(model, tmp_path / "cut")))
    for wrong in ({"speedups": []}, {"speedups": [1]}, {"n": 0}, {"search": 0}, {"few": 6, "many": 6}):
        with pytest.raises(ConfigError):
            SkipDecodeConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", [1.5, 3.0, 7.9])
def test_a_threshold_is_sought_where_the_layers_are(wanted: float) -> None:
    found = sought(lambda threshold: 1 + 7 * threshold**2, wanted, 12)
    assert found["dev_layers"] == pytest.approx(wanted, abs=0.01)
    stairs: Callable[[float], float] = lambda threshold: 2.0 if threshold < 0.7 else 6.0  # noqa: E731
    assert sought(stairs, 3.5, 10)["dev_layers"] == 2.0 and sought(stairs, 4.5, 10)["dev_layers"] == 6.0


def test_a_found_threshold_has_the_layers_it_says(folders: dict[str, str], tmp_path: Path, steady: None) -> None:
    assert skipdecode.run(config_of(folders, scheduled=[]), tmp_path) == 0
    (file,) = tmp_path.glob("trials/*/threshold-2-2.000000.json")
    (row,) = json.loads(file.read_text())["rows"]
    from eval.skipdecode_ways import exit_way

    model = calm.load(folders["base"])
    dev = load_corpus(DataConfig.from_values(model.settings.data), splits=("dev",)).splits["dev"]
    way = exit_way(Path(folders["base"]), 2, Measure.softmax, row["threshold"])
    assert mean_layers(OneDecoder(model)(dev[:12], way.policy)) == pytest.approx(row["dev_layers"])
    assert row["wanted_layers"] == 2.0


def test_exits_are_sought_at_the_layers_of_the_schedule_beside(folders: dict[str, str], tmp_path: Path) -> None:
    config = config_of(folders)
    scheduled = scheduled_ways([Path(folder) for folder in config.scheduled])
    model = calm.load(folders["base"])
    dev = load_corpus(DataConfig.from_values(model.settings.data), splits=("dev",)).splits["dev"][:12]
    (way,) = [each for each in scheduled if each.method == SKIP]
    (search,) = searches(config, Path(folders["base"]), dev, 4, scheduled)
    expected = mean_layers(OneDecoder(calm.load(way.folder))(dev, way.policy))
    assert search.measure()[0]["wanted_layers"] == pytest.approx(expected) and expected != 2.0


def test_every_number_of_the_paper_is_found() -> None:
    numbers = yaml.safe_load((CONF_DIR / "papers" / "skipdecode.yaml").read_text("utf-8"))
    for what in ("rouge_l", "bleu", "layers"):
        for corpus, models in numbers[what].items():
            for model, methods in models.items():
                for method, values in methods.items():
                    assert [Paper(corpus, model).at(what, method, s) for s in numbers["speedups"]] == values
    e2e = Paper("e2e", "opt_1_3b")
    assert e2e.at("rouge_l", "base", 1) == 0.676 and e2e.at("layers", "calm_dec", 2) is None
    assert e2e.at("rouge_l", "skipdecode", 6) is None


def made(gained: float, width: float = 0.004) -> dict[str, Any]:
    """A summary of SkipDecode at 2x that gains so much over the multi-layer exit."""
    quality = {"base": 0.0, "skipdecode": -0.005, "multi_layer_exit": -0.005 - gained}
    times = {"base": 1, "skipdecode": 2, "multi_layer_exit": 2}
    rows = [
        {
            "way": f"{method}-{times[method]}x", "method": method, "speedup": times[method],
            "layers": 8.0 if method == "base" else 4.5, "layers_nominal": 4.0, "rouge_l": 0.5 + less,
            "rouge_l_low": 0.45, "rouge_l_high": 0.55, "rouge_l_minus_full": less,
            "rouge_l_minus_full_low": less - 0.001, "bleu": None, "paper_rouge_l": 0.6,
            "paper_bleu": None, "paper_layers": None,
        }
        for method, less in quality.items()
    ]  # fmt: skip
    pair = {"speedup": 2, "against": "multi_layer_exit", "layers": 4.5, "other_layers": 4.5}
    ends = {"": gained, "_low": gained - width, "_high": gained + width}
    pair |= {f"rouge_l_gained{end}": value for end, value in ends.items()}
    clocks = [
        {"way": row["way"], "batch": 8, "layers": row["layers"], "decode_tokens_ratio": 1.4,
         "decode_tokens_ratio_low": 1.3, "decode_tokens_ratio_high": 1.5}
        for row in rows
    ]  # fmt: skip
    return {"num_layers": 8, "rows": rows, "pairs": [pair], "clocks": clocks, "ablation": [], "slots": []}


def test_what_is_said_follows_the_winner() -> None:
    held, order, clock = said(made(0.02))
    assert held == (
        "Within 0.01 ROUGE-L of full depth's 8 layers, whole interval over articles, stays SkipDecode down to 4.50 "
        "layers a token (1.78 times fewer); multi-layer exit at none of its speed-ups. Each is one training."
    )
    assert "better at 2x (0.0200 [0.0160, 0.0240], 4.50 layers against 4.50)" in order
    assert "SkipDecode 1.40 [1.30, 1.50] with 1.78 times fewer layers" in clock
    assert "worse at 2x" in said(made(-0.02))[1] and "not told apart at 2x" in said(made(0.001))[1]


def test_tables_in_shape() -> None:
    summary = made(0.02)
    head, *body = table4(summary["rows"], summary["clocks"])
    assert [line[:2] for line in body] == [["full depth", "1x"], ["SkipDecode", "2x"], ["multi-layer exit", "2x"]]
    assert body[1][head.index("BLEU")] == "" and body[1][head.index("steps by time, batch 8")] == "1.40"
    assert {len(line) for line in body} == {len(head)}
    found = table5(summary["rows"], Paper("e2e", "opt_1_3b"))
    assert found[0] == ["ROUGE-L (paper)", "1x", "2x"]
    assert found[1] == ["SkipDecode", "0.5000 (0.676)", "0.4950 (0.679)"]
    assert found[2] == ["multi-layer exit", "0.5000 (0.687)", "0.4750 (0.657)"] and len(found) == 3


def test_the_figure_has_layers_and_the_clock() -> None:
    layers, clock = draw_panels(panels_of("skipdecode", made(0.02)))
    for ax in (layers, clock):
        assert {text.get_text() for text in ax.get_legend().get_texts()} == {"SkipDecode", "multi-layer exit"}
        assert "95 % interval" in ax.get_ylabel()
    assert "layers" in layers.get_xlabel() and "over full depth's" in clock.get_xlabel()


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("*/summary.json")), ids=lambda path: path.parent.name)
def test_the_records_say_a_few_sentences(folder: Path) -> None:
    summary = json.loads(folder.read_text())
    assert summary["program"] == "eval.skipdecode" and summary["environment"]["git"]["dirty"] is False
    found = said(summary)
    assert 3 <= len(found) <= 8 and all(text.endswith(".") and "nan" not in text for text in found)
    assert panels_of("skipdecode", summary)


def test_bleu_says_how_it_comes_about() -> None:
    signature = bleu.bleu_signature()
    assert (signature is None) is not bleu.has_bleu() and "nrefs:1" in (signature or "nrefs:1")
    assert bleu.corpus_bleu(["the cat sat on the mat"], ["the cat sat on the mat"]) in (None, pytest.approx(1.0))


def test_bleu_is_sacrebleus_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bleu, "has_bleu", lambda: False)
    assert bleu.corpus_bleu(["a"], ["a"]) is None and bleu.bleu_signature() is None
    with pytest.raises(ValueError, match="1 predictions for 2 references"):
        bleu.corpus_bleu(["a"], ["a", "b"])
    asked: list[Any] = []

    def score(*given: Any) -> SimpleNamespace:
        asked.append(given)
        return SimpleNamespace(score=25.0)

    monkeypatch.setattr(bleu, "has_bleu", lambda: True)
    monkeypatch.setitem(sys.modules, "sacrebleu", SimpleNamespace(corpus_bleu=score))
    assert bleu.corpus_bleu(["a", "b"], ["c", "d"]) == 0.25 and asked == [(["a", "b"], [["c", "d"]])]
