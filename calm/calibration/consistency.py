"""What an early exit costs on one row (CALM section 4.1): textual and risk consistency, both in [0, 1].

Textual: 1 - ROUGE-L(early, full). Risk: max(0, R(full) - R(early)) with R the ROUGE-L to the reference. A row whose
early tokens equal the full model's costs exactly 0 whatever ROUGE says of it: ROUGE gives two empty answers, or two
equal ones in a script it does not read, the score 0.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from ..config import Consistency
from ..errors import CalibrationError
from ..metrics import rouge_l_many
from ..records import DecodeTrace, Example

Score = Callable[[Sequence[str], Sequence[str]], Float[np.ndarray, " rows"]]
Clean = Callable[[str], str]


def check_losses(losses: Float[np.ndarray, " rows"], where: str) -> Float[np.ndarray, " rows"]:
    """The losses as float64; CalibrationError where one is NaN or outside [0, 1]: the bounds hold for neither."""
    values = np.asarray(losses, dtype=np.float64)
    bad = np.flatnonzero(~((values >= 0.0) & (values <= 1.0)))
    if bad.size:
        raise CalibrationError(
            f"{where}: loss of row {bad[0]} is {values[bad[0]]} ({bad.size} such rows); a loss must lie in [0, 1]"
        )
    return values


def check_rows(traces: Sequence[DecodeTrace], examples: Sequence[Example], where: str) -> None:
    """CalibrationError unless the traces belong to the examples, row by row."""
    if len(traces) != len(examples):
        raise CalibrationError(f"{where}: the decoder returned {len(traces)} traces for {len(examples)} rows")
    for row, (trace, example) in enumerate(zip(traces, examples, strict=True)):
        if trace.id != example.id:
            raise CalibrationError(f"{where}: trace {row} is of row {trace.id!r}, expected {example.id!r}")


class ConsistencyLoss:
    """The loss of early traces against one full decode of the same examples; scores of the full decode are kept.

    Args:
        clean: applied to predictions and references before they are scored.
        score: scores in [0, 1] of predictions against references; default ROUGE-L.

    Attributes:
        full_scores: R(full) per row; None for textual consistency, which reads no reference.
    """

    def __init__(
        self,
        kind: Consistency,
        examples: Sequence[Example],
        full: Sequence[DecodeTrace],
        *,
        clean: Clean | None = None,
        score: Score | None = None,
    ) -> None:
        check_rows(full, examples, "full decode")
        self.kind = kind
        self._examples = list(examples)
        self._full = list(full)
        self._clean = clean or (lambda text: text)
        self._score = score or rouge_l_many
        self._references = [self._clean(example.target) for example in examples]
        self.full_scores: Float[np.ndarray, " rows"] | None = None
        if kind is Consistency.risk:
            self.full_scores = check_losses(self._score(self._texts(self._full), self._references), "full scores")

    def _texts(self, traces: Sequence[DecodeTrace]) -> list[str]:
        return [self._clean(trace.text) for trace in traces]

    def __call__(self, early: Sequence[DecodeTrace]) -> Float[np.ndarray, " rows"]:
        """Loss per row, in the order of the examples."""
        check_rows(early, self._examples, "early-exit decode")
        same = np.array([a.tokens == b.tokens for a, b in zip(early, self._full, strict=True)], dtype=bool)
        if self.full_scores is None:
            losses = 1.0 - self._score(self._texts(early), self._texts(self._full))
        else:
            losses = np.maximum(0.0, self.full_scores - self._score(self._texts(early), self._references))
        return check_losses(np.where(same, 0.0, losses), f"{self.kind.value} consistency")
