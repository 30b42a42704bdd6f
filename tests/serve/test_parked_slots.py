"""Rows that wait for company keep their K and V, whatever goes on in the slots beside theirs."""

from typing import Any

import pytest

from calm.config import BatchRule
from calm.policies import Replay
from serve.engine import Engine
from tests.serve.models import LENGTH, texts, tiny_served

SHALLOW, DEEP, MIXED = (1,) * LENGTH, (4,) * LENGTH, (1, 1, 1, 1, 4, 1, 4, 4, 1, 4)


def served_with(depths: list[tuple[int, ...]], late: int = 0, **options: Any) -> tuple[dict[str, tuple[int, ...]], int]:
    """Tokens by name, and the most rows that waited; the last ``late`` requests come after the first step."""
    engine = Engine(tiny_served(seed=3), poison=True, **options)
    tokens, parked = {}, 0
    coming = list(zip(depths, texts(len(depths), seed=3), strict=True))
    for number, (row, text) in enumerate(coming):
        if number == len(coming) - late:
            engine.step()
        name = f"r{number}"
        engine.add_request(text, name=name, policy=Replay({name: row}), ignore_eos=True)
    while engine.has_work:
        step = engine.step()
        tokens |= {answer.id: answer.tokens for answer in step.answers}
        parked = max(parked, step.record.parked if step.record else 0)
    return tokens, parked


@pytest.mark.parametrize(
    ("depths", "late"),
    [
        ([SHALLOW, SHALLOW, SHALLOW, DEEP, *[SHALLOW] * 12], 0),  # padding of three would lie in the fourth's slot
        ([DEEP, DEEP, DEEP, MIXED], 1),  # three wait in a bucket of four when the fourth slot gets an owner
    ],
    ids=["beside the fresh", "beside the parked"],
)
def test_padding_writes_into_nobodys_slot(depths: list[tuple[int, ...]], late: int) -> None:
    together, parked = served_with(depths, late, rule=BatchRule.rebatch, company=4, max_age=3, max_batch=4)
    alone, _ = served_with(depths, max_batch=1)
    assert parked > 0 and len(together) == len(depths)
    assert together == alone
