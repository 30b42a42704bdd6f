"""BLEU of a corpus by sacrebleu, where it is installed; nobody else's tokenisation is a substitute for it."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

MISSING = "BLEU is left empty: sacrebleu is not installed (pip install sacrebleu)"


def has_bleu() -> bool:
    return find_spec("sacrebleu") is not None


def corpus_bleu(predictions: Sequence[str], references: Sequence[str]) -> float | None:
    """In 0..1, one reference each, with sacrebleu's defaults; None where it is not installed.

    Raises:
        ValueError: the two differ in length.
    """
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references; give one of each per row")
    if not has_bleu():
        return None
    return float(import_module("sacrebleu").corpus_bleu(list(predictions), [list(references)]).score) / 100.0


def bleu_signature() -> str | None:
    """How the numbers come about, in sacrebleu's own words; None where it is not installed."""
    if not has_bleu():
        return None
    metric = import_module("sacrebleu.metrics").BLEU()
    metric.corpus_score(["a"], [["a"]])  # only then it knows how many references there are
    return str(metric.get_signature())
