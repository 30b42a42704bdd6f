"""rouge-score's ROUGE-L as a metric of Hugging Face ``evaluate``, without any hub: ``load()`` here, or by this path.

    from eval.rouge_module import load
    load().compute(predictions=["the cat sat"], references=["a cat sat down"])

Several processes: ``load(num_process=4, process_id=rank, experiment_id="x", cache_dir=shared)``, as usual.
The mean is arithmetic; ``evaluate``'s own rouge reports the median of an unseeded bootstrap.
"""

from typing import Any

import evaluate
import numpy as np
from evaluate.module import Features, Value

from calm.metrics import bootstrap_ci, metric_signature, rouge_l_many

DESCRIPTION = "ROUGE-L: F1, stemmed, 0..1, as rouge-score 0.1.2 defines it, with a seeded bootstrap interval."
INPUTS = "predictions, references: texts, one of each per row; seed: of the interval; per_row: return every score too."


class RougeL(evaluate.Metric):  # type: ignore[misc]
    """``compute(predictions=, references=, seed=0, per_row=False)``.

    Returns ``rougeL``, ``rougeL_low``, ``rougeL_high``, ``rows``, ``signature`` and, where asked for, ``scores``.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=Features({"predictions": text, "references": text}),
        )

    def _compute(
        self, predictions: list[str], references: list[str], seed: int = 0, per_row: bool = False
    ) -> dict[str, Any]:
        scores = rouge_l_many(predictions, references)
        low, high = bootstrap_ci(scores, seed)
        result: dict[str, Any] = {
            "rougeL": float(np.mean(scores)),
            "rougeL_low": low,
            "rougeL_high": high,
            "rows": len(scores),
            "signature": metric_signature(),
        }
        return {**result, "scores": scores.tolist()} if per_row else result


def load(**settings: Any) -> RougeL:
    """A new metric; ``settings`` as ``evaluate.load`` takes them: num_process, process_id, experiment_id, cache_dir."""
    return RougeL(**settings)
