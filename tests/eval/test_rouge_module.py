"""ROUGE as an ``evaluate`` metric: offline, equal to rouge-score, whole across processes."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import evaluate
import pytest

from calm.metrics import metric_signature, rouge_l_many
from eval import rouge_module

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "rouge_golden.json").read_text(encoding="utf-8"))["rows"]


@pytest.fixture
def pairs() -> dict[str, list[str]]:
    return {"predictions": [p for p, _, _ in GOLDEN], "references": [r for _, r, _ in GOLDEN]}


def test_it_equals_the_golden_file_row_by_row(pairs: dict[str, list[str]], tmp_path: Path) -> None:
    result = rouge_module.load(cache_dir=str(tmp_path)).compute(**pairs, per_row=True)
    assert result["scores"] == pytest.approx([score for _, _, score in GOLDEN], abs=1e-12)
    assert result["rougeL"] == pytest.approx(sum(result["scores"]) / len(result["scores"]))
    assert result["rougeL_low"] <= result["rougeL"] <= result["rougeL_high"]
    assert (result["rows"], result["signature"]) == (len(pairs["predictions"]), metric_signature())


def test_evaluate_loads_it_by_its_path_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = str(Path(rouge_module.__file__))
    metric = evaluate.load(path, cache_dir=str(tmp_path), download_config=None)
    metric.add_batch(predictions=["the library parses dates", ""], references=["parses dates", "small http server"])
    metric.add(prediction="graph drawing tool", reference="graph drawing\ntool")
    assert metric.compute()["rougeL"] == pytest.approx((2 / 3 + 0 + 1) / 3)


def test_the_interval_is_seeded(tmp_path: Path) -> None:
    def compute(seed: int) -> dict[str, Any]:
        texts = {"predictions": ["a b", "c", "d e f", ""], "references": ["a b", "d", "d e", "x"]}
        result: dict[str, Any] = rouge_module.load(cache_dir=str(tmp_path)).compute(**texts, seed=seed)
        return result

    assert compute(3) == compute(3)
    assert compute(3)["rougeL_low"] < compute(3)["rougeL_high"]


def _share(rank: int, cache: str, rows: list[tuple[str, str]]) -> None:
    metric = rouge_module.load(num_process=2, process_id=rank, experiment_id="shared", cache_dir=cache)
    for prediction, reference in rows[rank::2]:
        metric.add(prediction=prediction, reference=reference)
    result = metric.compute()
    (Path(cache) / f"rank-{rank}.json").write_text(json.dumps(result))


@pytest.mark.slow
def test_two_processes_add_up_to_one(tmp_path: Path) -> None:
    rows = [(f"w{i} w{i + 1} x", f"w{i} y w{i + 1}") for i in range(7)] + [("", "z"), ("one\ntwo", "one two")]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_share, args=(rank, str(tmp_path), rows)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert second is None  # evaluate answers in its process 0 only
    assert first["rows"] == len(rows)
    assert first["rougeL"] == pytest.approx(float(rouge_l_many(*zip(*rows, strict=True)).mean()))
