"""Texts to ids while the engine decodes: short ones between two of its steps, long ones in a process beside it.

A tokenizer holds the interpreter's lock while it works, so in a thread it would stop the engine as well. Measured on
one core, 4096 characters take 2 to 5 ms; 1 MiB takes 0.7 s, and 3 s where it spells control tokens again and again.
"""

import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from calm.child import die_with_parent
from calm.errors import CalmError, DataError

from .frames import Channel, wait

logger = logging.getLogger(__name__)

ToIds = Callable[[str, bool], Sequence[int]]  # a text, and whether it may be cut
Ids = tuple[int, ...] | CalmError
SHORT_CHARS = 4096
POLITE = 10  # niceness of the process: a core that it shares is the engine's first


def encoded(to_ids: ToIds, text: str, cut: bool) -> Ids:
    """The ids of a text, or why it has none: in any case one text fails alone."""
    try:
        return tuple(to_ids(text, cut))
    except CalmError as error:
        return error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in a tokenizer's compiled code is no Exception
        logger.error("a text of %d characters cannot be tokenised: %s", len(text), type(error).__name__)
        return DataError("the text cannot be tokenised; send it in another form, or send ids")


class Tokeniser:
    """Texts wait here by the name of their request until they have become ids.

    Args:
        to_ids: of the model.
        short: characters up to which a text is tokenised by whoever calls ``found``.
    """

    def __init__(self, to_ids: ToIds, short: int = SHORT_CHARS) -> None:
        self._to_ids, self.short_chars = to_ids, short
        self._short: dict[str, tuple[str, bool]] = {}
        self._long: dict[str, tuple[str, bool]] = {}
        self._working = False  # the process has a text
        self._at_work: str | None = None  # whose; None when nobody wants it any more
        self._start()

    def __len__(self) -> int:
        return len(self._short) + len(self._long) + (self._at_work is not None)

    @property
    def has_short(self) -> bool:
        """Whether ``found`` has something to do here."""
        return bool(self._short)

    def put(self, name: str, text: str, cut: bool = True) -> None:
        """Take a text; ``cut``: a longer one than the model takes is cut, not refused."""
        if len(text) <= self.short_chars:
            self._short[name] = text, cut
        else:
            self._long[name] = text, cut
            self._feed()

    def drop(self, name: str) -> None:
        """Forget a text, if it is here."""
        self._short.pop(name, None)
        self._long.pop(name, None)
        if self._at_work == name:
            self._at_work = None

    def found(self, chars: int) -> list[tuple[str, Ids]]:
        """Whose ids there are now: of texts that the process is done with, and of short ones, which are done here.

        Args:
            chars: that the short ones have together, at most; the first is taken in any case.
        """
        done = self._from_process()
        spent = 0
        while self._short:
            name, (text, cut) = next(iter(self._short.items()))
            if spent and spent + len(text) > chars:
                break
            spent += len(text)
            del self._short[name]
            done.append((name, encoded(self._to_ids, text, cut)))
        return done

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.channel.close()

    def _start(self) -> None:
        """A fork: it has the tokenizer at once, and touches nothing else of what it inherits."""
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("fork")
        self._process: BaseProcess = context.Process(
            target=_work, args=(theirs, self._to_ids), name="calm-tokenise", daemon=True
        )
        self._process.start()
        theirs.close()
        self.channel = Channel(ours)

    def _feed(self) -> None:
        if self._working or not self._long:
            return
        name = next(iter(self._long))
        self._working, self._at_work = True, name
        self.channel.send(self._long.pop(name))

    def _from_process(self) -> list[tuple[str, Ids]]:
        if not self._working:
            return []
        self.channel.flush()
        try:
            answers: list[Ids] = self.channel.receive()
        except EOFError:
            logger.error("the process for long texts has ended; there is a new one")
            self.close()
            self._start()
            answers = [DataError("the text cannot be tokenised: it ended the process that tried; send a shorter one")]
        done = []
        for ids in answers:
            if self._at_work is not None:
                done.append((self._at_work, ids))
            self._working, self._at_work = False, None
        self._feed()
        return done


def _work(end: socket.socket, to_ids: ToIds) -> None:
    """Life of the process: one text at a time, until the other side is gone."""
    die_with_parent(signal.SIGKILL)
    kept = end.fileno()
    os.closerange(3, kept)  # the engine's own ends, or nobody would see that they are closed
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    os.nice(POLITE)
    logging.disable()  # nobody reads it here
    channel = Channel(end)
    try:
        while True:
            wait([channel], None)
            for text, cut in channel.receive():
                channel.send(encoded(to_ids, text, cut))
    except EOFError:
        return
