"""Clients that leave an engine that is really there: the slot is free before anybody gets another token."""

import pytest

from serve.engine import Engine

from ..http.running import read_all
from ..http.test_disconnects import leave
from .serving import Joined, alone, body_of, connect, same, until, waiting

LEAVES, STAYS, COMES = "w3 w4 w5", "w6 w7", "w8 w9 w10"


@pytest.mark.parametrize("politely", [True, False], ids=["closed", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("where", ["before the first token", "in the middle", "in the queue"])
def test_a_client_that_leaves_frees_its_slot_and_changes_nobodys_answer(
    where: str, stream: bool, politely: bool, narrow: Joined, here: Engine
) -> None:
    """Fault 30: no step is needed to free it, the gate is still shut; who gets the slot next is answered right too."""
    site, gate, pid = narrow.site, narrow.gate, narrow.pid()
    others = [STAYS, COMES] if where == "in the queue" else [STAYS]
    before = site.metrics()
    with waiting(narrow, [body_of(prompt, ignore_eos=True) for prompt in others], 2) as stay:
        leaver = connect(site, body_of(LEAVES, stream=stream, ignore_eos=True))
        until(lambda: site.load() == (2, 1 if where == "in the queue" else 0))
        if where == "in the middle":
            gate.hold(2)
            until(lambda: told(narrow) == before["calm_generation_tokens_total"] + 4)
            if stream:
                assert leaver.recv(12) == b"HTTP/1.1 200"
        leave(leaver, politely)
        until(lambda: site.load() == (len(others), 0))
        assert site.metric("calm_requests_cancelled_total") == before["calm_requests_cancelled_total"] + 1
        assert not any(each.done() for each in stay)
    for prompt, each in zip(others, stay, strict=True):
        same(each.result(), alone(here, prompt, ignore_eos=True))
    same(site.ask(COMES), alone(here, COMES))
    assert site.load() == (0, 0) and narrow.pid() == pid
    assert site.metric("calm_requests_cancelled_total") == before["calm_requests_cancelled_total"] + 1


def told(made: Joined) -> float:
    """Tokens that the engine has given so far."""
    return made.site.metric("calm_generation_tokens_total")


def test_a_call_that_is_given_up_gives_up_all_of_its_prompts(narrow: Joined, here: Engine) -> None:
    """Fault 30: two that run and one that waits are one client's."""
    site, before = narrow.site, narrow.site.metric("calm_requests_cancelled_total")
    narrow.gate.hold()
    try:
        leaver = connect(site, body_of([LEAVES, STAYS, COMES], stream=True))
        until(lambda: site.load() == (2, 1))
        leave(leaver, True)
        until(lambda: site.load() == (0, 0))
        assert site.metric("calm_requests_cancelled_total") == before + 3
    finally:
        narrow.gate.open()
    with connect(site, body_of(STAYS, stream=True)) as stays:
        assert b"data: [DONE]" in read_all(stays)
    same(site.ask(LEAVES), alone(here, LEAVES))
