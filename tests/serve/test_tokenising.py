"""Texts become ids without holding the engine up: short ones a few at a time, long ones elsewhere, each fails alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from calm.errors import DataError
from serve.frames import wait
from serve.tokenising import Ids, Tokeniser, encoded

ROOT = Path(__file__).parents[2]
SHORT = 10


class Panic(BaseException):
    """Not an Exception, as what a compiled tokenizer raises."""


def to_ids(text: str, cut: bool = True) -> list[int]:
    if "bad" in text:
        raise DataError("the text is bad")
    if "panic" in text:
        raise Panic("at some line of the prompt")
    if "die" in text:
        os.kill(os.getpid(), signal.SIGKILL)
    return [os.getpid(), len(text)] if cut else [0]


@pytest.fixture
def tokeniser() -> Iterator[Tokeniser]:
    made = Tokeniser(to_ids, SHORT)
    yield made
    made.close()


def all_found(tokeniser: Tokeniser, count: int) -> list[tuple[str, Ids]]:
    found: list[tuple[str, Ids]] = []
    while len(found) < count:
        if not tokeniser.has_short:
            wait([tokeniser.channel], 60)
        found += tokeniser.found(SHORT)
    return found


def test_short_texts_are_done_here_a_few_at_a_time(tokeniser: Tokeniser) -> None:
    for number, length in enumerate((10, 4, 6, 1, 0)):
        tokeniser.put(f"r{number}", "x" * length)
    assert len(tokeniser) == 5 and tokeniser.has_short
    here = os.getpid()
    assert tokeniser.found(10) == [("r0", (here, 10))]
    assert tokeniser.found(10) == [("r1", (here, 4)), ("r2", (here, 6))]
    assert tokeniser.found(0) == [("r3", (here, 1))]  # one in any case
    assert tokeniser.found(0) == [("r4", (here, 0))]
    assert tokeniser.found(10) == [] and len(tokeniser) == 0 and not tokeniser.has_short


def test_long_texts_are_done_elsewhere_in_their_order_and_short_ones_do_not_wait(tokeniser: Tokeniser) -> None:
    for number in range(3):
        tokeniser.put(f"long{number}", "x" * (2**20 + number))
    tokeniser.put("short", "x")
    assert tokeniser.found(SHORT)[-1] == ("short", (os.getpid(), 1))
    found = all_found(tokeniser, 3)
    assert [name for name, _ in found] == ["long0", "long1", "long2"]
    ids = [each for _, each in found]
    assert all(isinstance(each, tuple) and each[0] != os.getpid() for each in ids)
    assert [each[1] for each in ids if isinstance(each, tuple)] == [2**20, 2**20 + 1, 2**20 + 2]


def test_whether_a_text_may_be_cut_goes_with_it(tokeniser: Tokeniser) -> None:
    tokeniser.put("short", "x", False)
    tokeniser.put("long", "x" * 100, False)
    assert dict(all_found(tokeniser, 2)) == {"short": (0,), "long": (0,)}


def test_handing_over_a_long_text_takes_no_time(tokeniser: Tokeniser) -> None:
    began = time.thread_time()
    tokeniser.put("long", "x" * 2**20)
    assert time.thread_time() - began < 0.02
    all_found(tokeniser, 1)


@pytest.mark.parametrize("length", [0, SHORT])
def test_a_text_that_cannot_be_read_fails_alone(tokeniser: Tokeniser, length: int) -> None:
    texts = {"a": "x", "bad": "bad", "panic": "panic", "b": "x"}
    for name, text in texts.items():
        tokeniser.put(name, text + "y" * length)
    found = dict(all_found(tokeniser, 4))
    assert isinstance(found["a"], tuple) and isinstance(found["b"], tuple)
    assert isinstance(found["bad"], DataError) and str(found["bad"]) == "the text is bad"
    assert isinstance(found["panic"], DataError) and "line" not in str(found["panic"])


def test_a_text_that_ends_the_process_fails_alone(tokeniser: Tokeniser) -> None:
    for name, text in {"a": "xxxxxxxxxxxx", "b": "die die die", "c": "xxxxxxxxxxxxx"}.items():
        tokeniser.put(name, text)
    found = dict(all_found(tokeniser, 3))
    assert isinstance(found["a"], tuple) and isinstance(found["c"], tuple) and found["a"][0] != found["c"][0]
    assert isinstance(found["b"], DataError) and "ended the process" in str(found["b"])


def test_dropped_texts_are_not_found(tokeniser: Tokeniser) -> None:
    for name in ("at work", "waits", "also waits"):
        tokeniser.put(name, "x" * 100)
    tokeniser.put("short", "x")
    for name in ("at work", "waits", "short", "nobody"):
        tokeniser.drop(name)
    assert len(tokeniser) == 1
    tokeniser.put("at work", "y" * 50)  # another request of that name
    assert [(name, ids[1]) for name, ids in all_found(tokeniser, 2) if isinstance(ids, tuple)] == [
        ("also waits", 100),
        ("at work", 50),
    ]


def test_an_interrupt_is_nobodys_error() -> None:
    def interrupted(text: str, cut: bool) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encoded(interrupted, "x", True)


def test_the_process_ends_with_its_owner_however_that_ends() -> None:
    owner = """
import os
from serve.tokenising import Tokeniser
print(Tokeniser(lambda text, cut: [1])._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    ran = subprocess.run([sys.executable, "-c", owner], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    state = Path(f"/proc/{int(ran.stdout)}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":
        os.sched_yield()
