"""What a completions stream says: server-sent events out of bytes, and of these when words came and how many.

Accepted: any line ends, comments, several data lines in one event, bytes cut anywhere. What a server may leave out
(usage, text) is optional; what makes an answer whole (a chunk with choices, ``[DONE]``) is not.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_EVENT_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 18  # of an answer that is no stream
MESSAGE_CHARS = 200
_LINE = re.compile(rb"\r\n|\n|\r")


class Malformed(Exception):
    """What came is not what was asked for; one line."""


class Events:
    """The data of server-sent events, as each becomes whole."""

    def __init__(self) -> None:
        self._rest, self._cut = b"", False  # an unfinished line; whether the bytes so far ended in \r
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[str]:
        """Raise Malformed for bytes that are no UTF-8, and for an event without end."""
        if not data:
            return []
        if self._cut:
            data = data.removeprefix(b"\n")
        self._cut = data.endswith(b"\r")
        *lines, self._rest = _LINE.split(self._rest + data)
        whole = [event for line in lines if (event := self._line(line)) is not None]
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise Malformed(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return whole

    def _line(self, line: bytes) -> str | None:
        """The event that an empty line ends."""
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._size += len(value)
            return None
        if not self._data:
            return None
        whole, self._data, self._size = b"\n".join(self._data), [], 0
        try:
            return whole.decode("utf-8")
        except UnicodeDecodeError:
            raise Malformed("an event that is no UTF-8") from None


class Reply:
    """A whole body, as it comes."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[bytes, bytes] = {}
        self.body = bytearray()

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Called once, before any data."""
        self.status, self.headers = status, headers

    def data(self, at: float, data: bytes) -> None:
        """Some bytes that came ``at`` this time. Raises Malformed."""
        if len(self.body) + len(data) > MAX_BODY_BYTES:
            raise Malformed(f"a body of more than {MAX_BODY_BYTES} bytes")
        self.body += data

    @property
    def message(self) -> str:
        """Of an error in OpenAI's form, or the body's start; one short line."""
        try:
            found = json.loads(bytes(self.body))
        except (ValueError, RecursionError):
            found = None
        error = found.get("error", found) if isinstance(found, dict) else None
        told = error.get("message", error) if isinstance(error, dict) else error
        return short(str(told)) if told else short(bytes(self.body).decode("utf-8", "replace"))


class Completion(Reply):
    """A completions stream.

    Attributes:
        chunks: when each chunk with choices came.
        text: of all of them.
        tokens, prompt_tokens: as the server's usage has them; None without.
        early_exit: what a server of ours tells of the answer's layers, with its last words; empty of others.
        failure: what the stream told of an error; empty without one.
        done: ``[DONE]`` has come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[float] = []
        self.tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.early_exit: Mapping[str, Any] = {}
        self.failure = ""
        self.done = False
        self._texts: list[str] = []
        self._events = Events()

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Raise Malformed for a success that is no stream."""
        super().head(status, headers)
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if status == 200 and kind != b"text/event-stream":
            raise Malformed(f"{kind.decode('latin-1') or 'a body without a type'} instead of a stream")

    def data(self, at: float, data: bytes) -> None:
        if self.status != 200:
            super().data(at, data)
            return
        for event in self._events.feed(data):
            if event == "[DONE]":
                self.done = True
            else:
                self._read(at, event)

    def check(self) -> None:
        """Raise Malformed for a stream that ended without being whole."""
        if not self.chunks:
            raise Malformed("a stream without any choices")
        if not self.done:
            raise Malformed("a stream that ends without [DONE]")

    def _read(self, at: float, event: str) -> None:
        try:
            chunk = json.loads(event)
        except (ValueError, RecursionError):
            raise Malformed("an event that is no JSON") from None
        if not isinstance(chunk, dict):
            raise Malformed("an event that is no JSON object")
        if chunk.get("error"):
            error = chunk["error"]
            self.failure = short(str(error.get("message", error) if isinstance(error, dict) else error))
        if chunk.get("choices"):
            choice = _first(chunk["choices"])
            text, early = choice.get("text"), choice.get("early_exit")
            self.chunks.append(at)
            self._texts.append(text if isinstance(text, str) else "")
            self.early_exit = early if isinstance(early, dict) else {}
        if chunk.get("usage"):
            usage = chunk["usage"]
            self.tokens, self.prompt_tokens = _count(usage, "completion_tokens"), _count(usage, "prompt_tokens")


def short(text: str) -> str:
    """One line of at most ``MESSAGE_CHARS``."""
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_CHARS else line[: MESSAGE_CHARS - 1] + "…"


def _first(choices: Any) -> dict[str, Any]:
    first = choices[0] if isinstance(choices, list) else None
    if not isinstance(first, dict):
        raise Malformed("choices that are no list of objects")
    return first


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    if value is not None and (type(value) is not int or value < 0):
        raise Malformed(f"a usage whose {name} is no count")
    return value
