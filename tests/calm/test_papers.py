"""The papers' numbers are found for the same model and corpus only."""

import pytest
import yaml

from calm.config import CONF_DIR, Consistency
from calm.papers import PaperRow, figure_bars, model_name, paper_row, sources

CNN, SMALL, BASE = "cnn_dailymail", "t5-v1_1-small", "t5-v1_1-base"


def test_table_1_of_the_framework_paper() -> None:
    assert paper_row(CNN, SMALL, "full") == PaperRow("framework", rouge_l=0.3524)
    assert paper_row(CNN, BASE, "static-half") == PaperRow("framework", rouge_l=0.3551, layers_skipped=0.5)
    assert paper_row(CNN, SMALL, "softmax", threshold=0.85) == PaperRow(
        "framework", rouge_l=0.35, rouge_l_to_full=0.767, layers_skipped=0.5382
    )
    classifier = paper_row(CNN, BASE, "classifier", threshold=0.92)
    assert classifier is not None and classifier.layers_skipped == 0.5906


def test_a_certified_row_is_compared_with_calms_certified_layers() -> None:
    assert paper_row(CNN, SMALL, "softmax", certified=(Consistency.risk, 0.05)) == PaperRow("calm", mean_layers=1.73)
    assert paper_row(CNN, SMALL, "state", certified=(Consistency.textual, 0.1)) == PaperRow("calm", mean_layers=8.0)
    assert paper_row(CNN, SMALL, "oracle") == PaperRow("calm", rouge_l=0.3824, mean_layers=1.53)


@pytest.mark.parametrize(
    ("corpus", "model", "row", "threshold", "certified"),
    [
        ("debian", SMALL, "full", None, None),
        (CNN, "tiny", "full", None, None),
        (CNN, SMALL, "lead-1", None, None),
        (CNN, SMALL, "softmax", 0.8, None),
        (CNN, SMALL, "softmax", None, None),
        (CNN, BASE, "oracle", None, None),
        (CNN, SMALL, "softmax", None, (Consistency.risk, 0.1)),
        (CNN, BASE, "softmax", None, (Consistency.risk, 0.05)),
    ],
)
def test_what_no_paper_ran_has_no_number(
    corpus: str, model: str, row: str, threshold: float | None, certified: tuple[Consistency, float] | None
) -> None:
    assert paper_row(corpus, model, row, threshold=threshold, certified=certified) is None


def test_every_number_of_the_table_is_found() -> None:
    """So that no entry stands there without a row that shows it."""
    tables = yaml.safe_load((CONF_DIR / "papers" / "tables.yaml").read_text(encoding="utf-8"))
    for corpus, models in tables["framework"].items():
        for model, rows in models.items():
            for row, values in rows.items():
                found = paper_row(corpus, model, row, threshold=values.get("threshold"))
                assert found is not None and found.source == "framework"
    for corpus, models in tables["calm"].items():
        for model, rows in models.items():
            for row, values in rows.items():
                if row not in {each.value for each in Consistency}:
                    assert paper_row(corpus, model, row) == PaperRow("calm", **values)
                    continue
                for tolerance, layers in values.items():
                    for measure, mean in layers.items():
                        found = paper_row(corpus, model, measure, certified=(Consistency(row), tolerance))
                        assert found == PaperRow("calm", mean_layers=mean)


def test_a_model_is_known_by_name_or_by_shape() -> None:
    shape = {"d_model": 512, "d_ff": 1024, "num_heads": 6, "num_decoder_layers": 8}
    assert model_name("google/t5-v1_1-base", {}) == BASE
    assert model_name("", shape) == SMALL
    assert model_name("", {**shape, "d_ff": 2048}) == ""
    assert model_name("tiny", shape) == "tiny"


def test_every_number_names_its_paper() -> None:
    assert set(sources()) == {"framework", "calm"}
    assert all("arXiv" in text for text in sources().values())


def test_figures_1_and_2_of_the_framework_paper() -> None:
    small, base = figure_bars(SMALL), figure_bars(BASE)
    assert list(small) == list(base) == ["full", "softmax", "state", "classifier"]
    assert (small["full"].concurrency, small["state"].concurrency) == (
        pytest.approx(244.9, abs=0.1),
        pytest.approx(80.4, abs=0.1),
    )
    assert base["softmax"].printed == 1777.96 and base["softmax"].tokens_per_s == 1177.96
    assert figure_bars("tiny") == {}
