"""Who is next: first come, first served, but for rows that are encoded together with the first; nobody is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm.config import BatchRule
from calm.policies import Static
from serve.engine import Engine
from serve.errors import QueueFull
from serve.requests import Answer, Status
from serve.scheduler import Waiting

from .models import engine_of, texts
from .stories import ONE, story_engine
from .test_endings import row as new_row

MULTIPLE = 4


def padded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


def waiting_rows(lengths: list[int], limit: int = 100) -> Waiting:
    queue = Waiting(limit)
    for number, length in enumerate(lengths):
        row = new_row()
        row.number, row.source, row.key = number, (1,) * length, str(number).encode()
        queue.add(row)
    return queue


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 4), st.sets(st.integers(0, 19)))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_nobody_is_passed_over_longer_than_it_takes_to_be_first(lengths: list[int], size: int, known: set[int]) -> None:
    queue = waiting_rows(lengths)
    seen = {str(number).encode() for number in known}
    served: list[int] = []
    while queue:
        first = queue.first
        group = queue.group(size, padded, seen)
        assert group[0] is first and 1 <= len(group) <= size
        assert len({padded(len(row.source)) for row in group}) == 1
        assert [row.number for row in group] == sorted(row.number for row in group)
        assert len(group) == 1 or not any(row.key in seen for row in group)
        served += [row.number for row in group]
    assert sorted(served) == list(range(len(lengths)))
    for place, number in enumerate(served):
        overtakers = sum(other > number for other in served[:place])
        assert overtakers <= number * (size - 1)  # each group before it has its own first


def test_a_full_queue_refuses_and_loses_nothing() -> None:
    engine = story_engine(max_waiting=3, max_batch=2, prefill_calls=1, prefill_rows=2)
    names = [engine.add_request("w3") for _ in range(3)]
    for _ in range(3):
        with pytest.raises(QueueFull, match="3 requests wait already"):
            engine.add_request("w4")
    assert engine.num_waiting == 3
    found: list[Answer] = engine.step().answers
    names.append(engine.add_request("w3"))  # two rows have left the queue
    while engine.has_work:
        found += engine.step().answers
    assert sorted(answer.id for answer in found) == sorted(names)
    assert {answer.tokens for answer in found} == {ONE}


def test_slots_are_reserved_whole_so_rows_wait_for_one() -> None:
    engine = engine_of(BatchRule.compact, max_batch=2, prefill_rows=4, prefill_calls=4, cross_cache_rows=0)
    for text in texts(7):
        engine.add_request(text, max_tokens=3)
    running = []
    while engine.has_work:
        engine.step()
        running.append(engine.num_running)
        assert engine.num_running == len(engine.slots.taken) <= 2
    assert max(running) == 2


def test_decoding_rows_do_not_starve_while_sources_are_encoded() -> None:
    """However many wait, a step encodes no more than it may, and every running row speaks in it."""
    engine = Engine(engine_of(BatchRule.own).model, max_batch=16, prefill_rows=1, prefill_calls=2, poison=True)
    for text in texts(12):
        engine.add_request(text, policy=Static(1), ignore_eos=True)
    for _ in range(6):
        before = engine.num_running
        step = engine.step()
        assert step.record is not None
        assert (step.record.encoder_calls, step.record.admitted) == (2, 2)
        assert len(step.tokens) == before + 2


def test_every_request_of_hundreds_gets_its_own_answer() -> None:
    engine = story_engine(max_batch=8, max_waiting=1000)
    wanted = {}
    for number in range(400):
        tag = number % 3 + 1
        name = engine.add_request("w3" if number % 2 else "w4", name=f"n{number}", max_tokens=tag)
        wanted[name] = (5, 6, 7)[:tag] if number % 2 else (10, 11, 1)[:tag]
    found = {}
    while engine.has_work:
        for answer in engine.step().answers:
            assert answer.id not in found and answer.status is Status.finished
            found[answer.id] = answer.tokens
    assert found == wanted
