"""Requests that break numbers, waves or steps of an engine that serves others at the same time."""

import pytest

from serve.engine import Engine

from ..faulty import POISON, RAISE
from .conftest import WIDE
from .gate import BREAK
from .serving import Answered, Joined, alone, body_of, prompts, questions, same, together


def failed(found: Answered) -> None:
    """An error of the server's that says which prompt it was, and nothing of what is in it or went wrong inside."""
    assert found.status == 500 and found.error["code"] == "engine_failed" and found.error["param"] == "prompt"
    assert "secret" not in found.error["message"] and "w3" not in found.error["message"]


def bad(word: int, number: int = 0) -> bytes:
    return body_of(f"w{word} w{3 + number}", ignore_eos=True)


@pytest.mark.parametrize("word", [POISON, BREAK], ids=["no numbers", "raises in a wave"])
def test_a_bad_request_fails_alone_and_three_of_them_do_no_more(word: int, wide: Joined, here: Engine) -> None:
    """Fault 34: in one batch with five others, all three at once and again one after another."""
    site, pid = wide.site, wide.pid()
    mates = questions(here, 8, seed=21)
    before = site.metric("calm_requests_failed_total")
    bodies = [each.body for each in mates]
    mixed = [bad(word), *bodies[:2], bad(word, 1), *bodies[2:5], bad(word, 2), *bodies[5:]]
    found = together(wide, mixed, WIDE.max_batch)
    for place in (0, 3, 7):
        failed(found[place])
    for answered, mate in zip([each for each in found if each.status != 500], mates, strict=True):
        same(answered, mate.answer)
    for number in range(3):
        failed(site.send(bad(word, number)))
        assert site.ready() == 200
    assert site.metric("calm_requests_failed_total") == before + 6
    same(site.send(bodies[0]), mates[0].answer)
    assert site.load() == (0, 0) and wide.pid() == pid


def test_a_step_that_raises_costs_who_ran_in_it_and_nobody_else(wide: Joined, here: Engine) -> None:
    """Fault 34, outside of any wave, where nobody can tell whose fault it was: those in the queue are not touched."""
    site, pid = wide.site, wide.pid()
    running = prompts(WIDE.max_batch - 1, seed=22)
    queued = questions(here, 4, seed=23)
    bodies = [bad(RAISE), *(body_of(prompt, ignore_eos=True) for prompt in running), *(each.body for each in queued)]
    found = together(wide, bodies, WIDE.max_batch)
    for answered in found[: WIDE.max_batch]:
        failed(answered)
    for answered, each in zip(found[WIDE.max_batch :], queued, strict=True):
        same(answered, each.answer)
    for number in range(3):
        failed(site.send(bad(RAISE, number)))
        assert site.ready() == 200
    same(site.ask(running[0]), alone(here, running[0]))
    assert site.load() == (0, 0) and wide.pid() == pid
