"""Many clients of the whole program at once: each gets its own answer or a refusal, and nothing is left behind."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from eval.load_client import check_files
from eval.load_stream import Completion, Reply
from serve.engine import Engine

from .serving import Program, Question, crowd, program, questions, until

FEW, MANY = 60, 1000
KEPT_MIB = 8  # that a process may have more than after the same load before: of the thousand, 8 KiB each


def outcome(reply: Reply, question: Question) -> str:
    """``own`` for all of this question's answer and nothing else, or the code of a refusal that is documented."""
    if reply.status != 200:
        assert reply.status in (429, 503), reply.message
        assert int(reply.headers[b"retry-after"]) > 0
        return str(json.loads(bytes(reply.body))["error"]["code"])
    answer = question.answer
    if isinstance(reply, Completion):
        assert reply.done and not reply.failure
        assert reply.text == answer.text and reply.early_exit["tokens"] == len(answer.tokens)
        return "own"
    (choice,) = json.loads(bytes(reply.body))["choices"]
    assert (choice["text"], choice["early_exit"]["exit_layers"]) == (answer.text, list(answer.emission_layers))
    return "own"


def all_at_once(server: Program, asked: Sequence[Question]) -> Counter[str]:
    replies = asyncio.run(crowd(server.site.url, [each.body for each in asked]))
    assert len(replies) == len(asked)
    return Counter(outcome(*each) for each in zip(replies, asked, strict=True))


def files(server: Program) -> list[tuple[int, int]]:
    """Of each process, in the order of their starts: its id and how many files it has open."""
    return [(each.pid, each.num_fds()) for each in server.own.processes()]


def at_rest(server: Program) -> list[tuple[int, int]]:
    """Files that are open where no connection is left, that of who asked whether it is ready included."""
    found = files(server)
    while True:
        time.sleep(0.5)
        before, found = found, files(server)
        if found == before:
            return found


def memory(server: Program, idle: list[tuple[int, int]]) -> list[int]:
    """MiB of each process, as soon as nobody runs or waits and no connection is left: its files are those of then."""
    until(lambda: server.site.load() == (0, 0))
    until(lambda: files(server) == idle)
    return [each.memory_info().rss >> 20 for each in server.own.processes()]


def no_more(before: list[int], after: list[int]) -> None:
    assert all(is_now <= was + KEPT_MIB for was, is_now in zip(before, after, strict=True)), (before, after)


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Room for all of a few, and not for twice as many connections or requests."""
    argv = ("max_batch=4", f"max_waiting={FEW}", f"limits.connections={FEW + 20}", "request_timeout_s=600")
    with program(folder, tmp_path_factory.mktemp("small"), *argv) as server:
        server.wait_until_ready()
        yield server


def test_sixty_at_once_are_all_answered_and_leave_nothing_behind(small: Program, here: Engine) -> None:
    """Fault 32: of all ways, streamed and not."""
    asked, idle = questions(here, FEW, seed=51, stream_each=3), at_rest(small)
    assert all_at_once(small, asked) == {"own": FEW}
    before = memory(small, idle)
    assert all_at_once(small, asked) == {"own": FEW}
    no_more(before, memory(small, idle))


def test_what_is_too_much_is_refused_and_the_others_are_answered(small: Program, here: Engine) -> None:
    """Fault 32: connections above the limit, and requests above the queue's; then there is room again."""
    asked, idle = questions(here, 2 * FEW, seed=52, stream_each=3, ignore_eos=True), files(small)
    found = all_at_once(small, asked)
    assert set(found) <= {"own", "queue_full", "too_many_connections"} and found.total() == 2 * FEW
    assert found["too_many_connections"] == 2 * FEW - (FEW + 20) and found["own"] >= 4
    memory(small, idle)
    assert all_at_once(small, asked[:4]) == {"own": 4}


@pytest.fixture(scope="module")
def thousand(here: Engine) -> list[Question]:
    check_files(2 * MANY)
    return questions(here, MANY, seed=53, stream_each=3, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("room", [True, False], ids=["room for all", "room for some"])
def test_a_thousand_at_once(room: bool, folder: Path, thousand: list[Question], tmp_path: Path) -> None:
    """Fault 32: all are answered where there is room; else 400 are one connection too many, and the queue is full."""
    limits = (MANY, MANY) if room else (100, MANY - 400)
    argv = (f"max_waiting={limits[0]}", f"limits.connections={limits[1]}", "max_batch=8", "request_timeout_s=1200")
    with program(folder, tmp_path, *argv, "keep_alive_s=1200", "head_timeout_s=1200") as server:
        server.wait_until_ready()
        idle = at_rest(server)
        all_at_once(server, thousand)  # what is kept for good is there now
        before = memory(server, idle)
        found = all_at_once(server, thousand)
        if room:
            assert found == {"own": MANY}
        else:
            assert set(found) == {"own", "queue_full", "too_many_connections"} and found.total() == MANY
            assert found["too_many_connections"] == 400 and found["own"] >= 100
        no_more(before, memory(server, idle))
        assert server.site.ready() == 200
