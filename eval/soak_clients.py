"""Clients of a soak: those that wait for their answer, and those that break off, crash or send nonsense.

Every visit ends in a word for what came of it. ``EXPECTED`` has the words that are in order for each kind.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from calm.load_config import early_exit

from .load_client import Client, body_of
from .load_connection import Disconnected
from .load_prompts import Prompt
from .load_stream import Completion, Malformed, Reply

REFUSED = ("429", "503")
NEVER_READS_S = 3.0
FIRST_BYTES = 1 << 10


class Kind(str, Enum):
    """What a client does.

    streamed, whole: waits for all of its answer. leaves_at_once, leaves_midway: closes without a word before its first
    token, or after some. half_head, half_body: sends no more. never_reads: asks for a stream and does not read it.
    no_json, too_large, no_such_id: is to be refused.
    """

    streamed = "streamed"
    whole = "whole"
    leaves_at_once = "leaves_at_once"
    leaves_midway = "leaves_midway"
    half_head = "half_head"
    half_body = "half_body"
    never_reads = "never_reads"
    no_json = "no_json"
    too_large = "too_large"
    no_such_id = "no_such_id"


SHARES = {
    Kind.streamed: 40, Kind.whole: 15, Kind.leaves_at_once: 8, Kind.leaves_midway: 12, Kind.half_head: 4,
    Kind.half_body: 4, Kind.never_reads: 3, Kind.no_json: 5, Kind.too_large: 4, Kind.no_such_id: 5,
}  # fmt: skip
ANSWERED = (Kind.streamed, Kind.whole)
RIGHT, WRONG, GONE = "right", "wrong", "gone"
EXPECTED: dict[Kind, tuple[str, ...]] = {
    **dict.fromkeys(ANSWERED, (RIGHT, *REFUSED)),
    **dict.fromkeys(
        (Kind.leaves_at_once, Kind.leaves_midway, Kind.half_head, Kind.half_body, Kind.never_reads), (GONE,)
    ),
    Kind.no_json: ("400", *REFUSED),
    Kind.too_large: ("413", *REFUSED),
    Kind.no_such_id: ("400", *REFUSED),
}


@dataclass(frozen=True)
class Question:
    """A prompt, the way to decode it, and the answer that it gets when nobody else is there."""

    prompt: Prompt
    way: str
    answer: str = ""


@dataclass
class Visit:
    """One client's.

    Attributes:
        started, ended: seconds on the loop's clock.
        outcome: ``right``, ``wrong``, ``gone`` (as it meant to), a status, or an exception's name and words.
    """

    kind: Kind
    started: float
    ended: float = 0.0
    outcome: str = ""

    @property
    def in_order(self) -> bool:
        return self.outcome in EXPECTED[self.kind]


def draw(generator: random.Random) -> Kind:
    """A client, by ``SHARES``."""
    return generator.choices(list(SHARES), weights=list(SHARES.values()))[0]


@dataclass
class Visitors:
    """All clients of one server.

    Args:
        max_body: bytes that the server takes at most.
        vocabulary: ids from here on are none.
    """

    client: Client
    model: str
    questions: Sequence[Question]
    generator: random.Random
    max_body: int = 2**20
    vocabulary: int = 2**31 - 1
    visits: list[Visit] = field(default_factory=list)

    async def visit(self, kind: Kind) -> Visit:
        """Whatever happens ends up in the visit."""
        clock = asyncio.get_running_loop().time
        visit = Visit(kind, clock())
        try:
            visit.outcome = await self._come(kind, self.generator.choice(self.questions))
        except (Disconnected, Malformed, TimeoutError, OSError) as error:
            visit.outcome = f"{type(error).__name__}: {error}"
        visit.ended = clock()
        self.visits.append(visit)
        return visit

    async def ask(self, question: Question, stream: bool = True) -> tuple[int, str]:
        """Status and text, which is an error's words where the status is not 200."""
        reply: Reply = await self.client.answer(self._body(question, stream), Completion if stream else Reply)
        if reply.status != 200:
            return reply.status, reply.message
        if not isinstance(reply, Completion):
            return 200, str(json.loads(bytes(reply.body))["choices"][0]["text"])
        if reply.failure:
            raise Malformed(reply.failure)
        reply.check()
        return 200, reply.text

    async def _come(self, kind: Kind, question: Question) -> str:
        if kind in ANSWERED:
            status, text = await self.ask(question, stream=kind is Kind.streamed)
            return str(status) if status != 200 else RIGHT if text == question.answer else WRONG
        if kind is Kind.no_json:
            return await self._post(b'{"model": "' + self.model.encode() + b'", "prompt": [')
        if kind is Kind.too_large:
            return await self._post(b" " * (self.max_body + 1))
        if kind is Kind.no_such_id:
            return await self._post(body_of(self.model, [self.vocabulary]))
        await self._break_off(kind, self._body(question, stream=kind is not Kind.leaves_at_once))
        return GONE

    def _body(self, question: Question, stream: bool) -> bytes:
        fields = {"early_exit": early_exit(question.way), "truncate": True}
        return body_of(self.model, question.prompt, stream, **fields)

    async def _post(self, body: bytes) -> str:
        """Status of an answer; a body that is too large may be refused before it is through."""
        reader, writer = await self._connect()
        try:
            with suppress(ConnectionError):
                writer.write(self._head(len(body)) + body)
                await writer.drain()
            return (await reader.readline()).split()[1].decode()
        except IndexError:
            return "closed without an answer"
        finally:
            writer.transport.abort()

    async def _break_off(self, kind: Kind, body: bytes) -> None:
        reader, writer = await self._connect()
        try:
            head = self._head(len(body))
            cut = {Kind.half_head: len(head) // 2, Kind.half_body: len(head) + len(body) // 2}
            writer.write((head + body)[: cut.get(kind)])
            await writer.drain()
            if kind is Kind.leaves_midway:
                await reader.read(FIRST_BYTES)
            elif kind is Kind.never_reads:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(NEVER_READS_S)
            else:
                await asyncio.sleep(0.02 * self.generator.random())
        finally:
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.client.server.host, self.client.server.port)

    def _head(self, length: int) -> bytes:
        lines = [
            "POST /v1/completions HTTP/1.1", f"Host: {self.client.server.authority}", "Content-Type: application/json",
            f"Content-Length: {length}", "Connection: close",
        ]  # fmt: skip
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def counted(visits: Sequence[Visit]) -> dict[str, Any]:
    """Outcomes by kind of client, most frequent first."""
    found: dict[str, dict[str, int]] = {}
    for visit in visits:
        of_kind = found.setdefault(visit.kind.value, {})
        of_kind[visit.outcome] = of_kind.get(visit.outcome, 0) + 1
    return {kind: dict(sorted(found[kind].items(), key=lambda each: -each[1])) for kind in sorted(found)}
