"""What the peers say: token parity with the reference, and ROUGE-L of answers to EOS."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .peer_plan import REFERENCE

Answers = Mapping[str, Sequence[Sequence[int]]]


def until(row: Sequence[int], eos: int) -> list[int]:
    """The row up to its EOS, without it: some peers return it, some pad behind it, some leave it out."""
    return list(row[: row.index(eos)]) if eos in row else list(row)


def first_difference(row: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two answers differ, one ending counted; None where they are equal."""
    for step, (a, b) in enumerate(zip(row, other, strict=False)):
        if a != b:
            return step
    return None if len(row) == len(other) else min(len(row), len(other))


def parity(answers: Answers, eos: int, reference: str = REFERENCE) -> dict[str, dict[str, Any]]:
    """By worker: rows, how many are equal to the reference's, and where the earliest difference is.

    Empty where the reference has no answers.
    """
    if reference not in answers:
        return {}
    wanted = [until(row, eos) for row in answers[reference]]
    found = {}
    for name, rows in answers.items():
        steps = [first_difference(until(row, eos), other) for row, other in zip(rows, wanted, strict=True)]
        apart = [(step, row) for row, step in enumerate(steps) if step is not None]
        step, row = min(apart, default=(None, None))
        first = None if row is None else {"row": row, "step": step}
        found[name] = {"rows": len(steps), "equal": len(steps) - len(apart), "first_difference": first}
    return found


def scores(
    answers: Answers, targets: Sequence[str], eos: int, to_text: Callable[[Sequence[int]], str]
) -> dict[str, dict[str, Any]]:
    """By worker: mean ROUGE-L of its answers, tokens a row, and parity."""
    from calm.metrics import mean, rouge_l_many

    same = parity(answers, eos)
    found: dict[str, dict[str, Any]] = {}
    for name, rows in answers.items():
        cut = [until(row, eos) for row in rows]
        found[name] = {
            "rouge_l": mean(rouge_l_many([to_text(row) for row in cut], targets)),
            "tokens": mean([len(row) for row in cut]),
            "parity": same.get(name),
        }
    return found
