"""The papers' numbers (``conf/papers/tables.yaml``), found by the corpus, the model and the row of our table."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from .config import CONF_DIR, Consistency

_SMALL = ("cnn_dailymail", "t5-v1_1-small")


@dataclass(frozen=True)
class PaperRow:
    """What a paper reports for a row; None where it says nothing. Shares and ROUGE-L in 0..1."""

    source: str
    rouge_l: float | None = None
    rouge_l_to_full: float | None = None
    layers_skipped: float | None = None
    mean_layers: float | None = None


@cache
def _tables() -> dict[str, Any]:
    import yaml

    tables: dict[str, Any] = yaml.safe_load((CONF_DIR / "papers" / "tables.yaml").read_text(encoding="utf-8"))
    return tables


def sources() -> dict[str, str]:
    """Short name of a paper -> where its numbers stand and how they were measured."""
    return dict(_tables()["sources"])


def model_name(name: str, config: Mapping[str, Any]) -> str:
    """``t5-v1_1-small`` or ``t5-v1_1-base`` where a folder is one, by its own name or by its shape; else ``name``.

    Args:
        name: as early_exit.json says, or empty.
        config: the values of config.json.
    """
    short = name.removeprefix("google/")
    if short:
        return short
    for known, shape in _tables()["shapes"].items():
        if all(config.get(key) == value for key, value in shape.items()):
            return str(known)
    return name


def paper_row(
    corpus: str,
    model: str,
    row: str,
    *,
    threshold: float | None = None,
    certified: tuple[Consistency, float] | None = None,
) -> PaperRow | None:
    """What the papers say of a row of our table; None where they ran nothing like it.

    Args:
        row: lead-1, full, static-half, oracle, or a measure.
        threshold: for MEASURE@threshold: the paper's must be the same.
        certified: for a measure's certified row: consistency and tolerance.
    """
    if certified is not None:
        consistency, tolerance = certified
        table = _at(_tables()["calm"], corpus, model, consistency.value) or {}
        layers = (table.get(tolerance) or {}).get(row)
        return None if layers is None else PaperRow("calm", mean_layers=layers)
    found = _at(_tables()["framework"], corpus, model, row)
    if found is not None and found.get("threshold") == threshold:
        return PaperRow("framework", **{key: value for key, value in found.items() if key != "threshold"})
    found = _at(_tables()["calm"], corpus, model, row) if row == "oracle" else None
    return None if found is None else PaperRow("calm", **found)


def given_thresholds(corpus: str, model: str) -> dict[str, float]:
    """The thresholds of the rows MEASURE@threshold, by measure: the paper's; those of T5-small where it ran neither."""
    rows = _at(_tables()["framework"], corpus, model) or _at(_tables()["framework"], *_SMALL)
    return {name: row["threshold"] for name, row in rows.items() if "threshold" in row}


def _at(table: Any, *keys: str) -> Any:
    for key in keys:
        table = (table or {}).get(key)
    return table


@dataclass(frozen=True)
class PaperBar:
    """A bar of the framework paper's Figures 1 and 2.

    Attributes:
        tokens_per_s: None where the paper says no number.
        inner_token_latency_s: time between tokens as the paper defines it.
        printed: what stands there for tokens_per_s, where that is a misprint.
    """

    tokens_per_s: float | None
    inner_token_latency_s: float
    printed: float | None = None

    @property
    def concurrency(self) -> float | None:
        """Sequences that decoded at once, by Little's law."""
        return None if self.tokens_per_s is None else self.tokens_per_s * self.inner_token_latency_s


def figure_bars(model: str) -> dict[str, PaperBar]:
    """Figures 1 and 2 of arXiv 2407.20272 by row (full, softmax, state, classifier); empty for another model."""
    return {row: PaperBar(**values) for row, values in (_at(_tables()["figures"], model) or {}).items()}
