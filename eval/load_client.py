"""A client of ``/v1/completions``: one call, one Sample, whatever happens to it.

    client = Client("http://127.0.0.1:8000")
    sample = await client.complete(body_of("name", "a prompt", max_tokens=16))

Answers are streamed. What goes wrong is told by kind and never raises. Knows no schedule and no metric.
"""

import asyncio
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import h11

from calm.errors import ConfigError
from calm.load_config import endpoint

from .load_connection import Disconnected, Pool
from .load_samples import Counted, ErrorKind, Sample
from .load_stream import Completion, Malformed, Reply

Answer = TypeVar("Answer", bound=Reply)
KEY = "CALM_API_KEY"
REFUSALS = (429, 503)
SPARE_FILES = 64  # beside the sockets: the run's own


class Client:
    """Calls of one server, over one set of connections.

    Args:
        timeout: seconds that a call may take.
        count: tokens of a text, for servers that say none; without it, chunks are counted then.
        now: the clock of all times.

    Raises:
        ConfigError: the url, or the key in CALM_API_KEY, cannot be used.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 600.0,
        count: Callable[[str], int] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.server = endpoint(url)
        self.pool = Pool(self.server, now)
        self._timeout, self._count, self._now = timeout, count, now
        self._headers = [("Host", self.server.authority), ("User-Agent", "calm-serving")]
        key = os.environ.get(KEY, "")
        if key:
            if not key.isascii() or not key.isprintable() or key != key.strip():
                raise ConfigError(f"{KEY} holds blanks at its ends, or characters that no HTTP header can have")
            self._headers.append(("Authorization", f"Bearer {key}"))

    async def get(self, path: str, timeout: float) -> Reply:
        """Whatever is there.

        Raises:
            TimeoutError, Disconnected, Unreachable, Malformed
        """
        request = h11.Request(method="GET", target=self.server.base + path, headers=self._headers)
        replies: list[Reply] = []
        async with asyncio.timeout(timeout):
            await self.pool.exchange(request, b"", lambda: _another(replies, Reply()))
        return replies[-1]

    async def complete(self, body: bytes, number: int = 0, scheduled: float = 0.0, zero: float | None = None) -> Sample:
        """One completion.

        Args:
            body: JSON, of ``body_of``.
            scheduled: seconds after ``zero`` when it was due.
            zero: on the clock; default: now.
        """
        sent = self._now()
        zero = sent if zero is None else zero
        sample, replies = Sample(number, scheduled, sent - zero, 0.0), [Completion()]
        try:
            await self._exchange(body, lambda: _another(replies, Completion()))
            sample = self._read(sample, replies[-1])
        except TimeoutError:
            sample = replace(sample, error=ErrorKind.timeout, detail=f"no end within {self._timeout:g} s")
        except Disconnected as error:
            sample = replace(sample, error=ErrorKind.disconnected, detail=str(error))
        except Malformed as error:
            sample = replace(sample, error=ErrorKind.malformed, detail=str(error))
        reply = replies[-1]  # of the last sending: nothing came of an earlier one
        return replace(
            sample,
            ended=self._now() - zero,
            chunks=tuple(at - zero for at in reply.chunks),
            status=reply.status or None,
            retries=max(0, len(replies) - 2),
        )

    async def answer(self, body: bytes, kind: Callable[[], Answer]) -> Answer:
        """What comes back for a completion's body; ``kind`` makes what takes it.

        Raises:
            TimeoutError, Disconnected, Unreachable, Malformed
        """
        replies: list[Answer] = []
        await self._exchange(body, lambda: _another(replies, kind()))
        return replies[-1]

    async def _exchange(self, body: bytes, reply: Callable[[], Reply]) -> None:
        async with asyncio.timeout(self._timeout):
            await self.pool.exchange(self._request(len(body)), body, reply)

    def close(self) -> None:
        self.pool.close()

    def _request(self, length: int) -> h11.Request:
        headers = [
            *self._headers,
            ("Accept", "text/event-stream"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(length)),
        ]
        return h11.Request(method="POST", target=f"{self.server.base}/v1/completions", headers=headers)

    def _read(self, sample: Sample, reply: Completion) -> Sample:
        """What a whole reply says."""
        if reply.status != 200:
            kind = ErrorKind.refused if reply.status in REFUSALS else ErrorKind.status
            return replace(sample, error=kind, detail=reply.message)
        if reply.failure:
            return replace(sample, error=ErrorKind.failed, detail=reply.failure)
        reply.check()
        if reply.tokens is not None:
            tokens, counted = reply.tokens, Counted.usage
        elif self._count is not None:
            tokens, counted = self._count(reply.text), Counted.tokenizer
        else:
            tokens, counted = len(reply.chunks), Counted.chunks
        early = reply.early_exit
        return replace(
            sample,
            tokens=tokens,
            counted=counted,
            prompt_tokens=reply.prompt_tokens,
            exit_layer=_number(early.get("mean_exit_layer")),
            layers_skipped=_number(early.get("layers_skipped")),
            certified=early["certified"] if isinstance(early.get("certified"), bool) else None,
        )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _another(replies: list[Answer], reply: Answer) -> Answer:
    replies.append(reply)
    return reply


def body_of(model: str, prompt: str | list[int], stream: bool = True, **fields: Any) -> bytes:
    """The JSON of a completion; fields that are None are left out."""
    asked = {
        "model": model,
        "prompt": prompt,
        **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
        **{name: value for name, value in fields.items() if value is not None},
    }
    return json.dumps(asked, ensure_ascii=False, allow_nan=False).encode("utf-8")


def check_files(requests: int) -> None:
    """Make room for so many open sockets, as far as the system lets us.

    Raises:
        ConfigError: it does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = requests + SPARE_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"n={requests} requests may be in flight at once and need {needed} open files, but this process may have "
            f"{hard}; raise it (ulimit -Hn {needed}), or give a smaller n="
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
