"""Messages over a socket between two processes of ours, without ever waiting for the other side.

A message is its length and its pickle, as multiprocessing's own pipes send it. Those block until a message is whole;
here half a message waits in a buffer, and neither a slow reader nor a large request holds anybody up.
"""

import select
import socket
import struct
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

LENGTH = struct.Struct("!Q")
CHUNK = 1 << 18  # bytes of one read
READS = 4  # at a time: who has other work goes on with it after a MiB


def pack(message: object) -> bytes:
    """A message as it is sent."""
    body = ForkingPickler.dumps(message)
    return LENGTH.pack(len(body)) + bytes(body)


class Frames:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are whole now."""
        self._bytes += data
        messages, start = [], 0
        with memoryview(self._bytes) as view:
            while len(view) - start >= LENGTH.size:
                begin = start + LENGTH.size
                end = begin + LENGTH.unpack_from(view, start)[0]
                if end > len(view):
                    break
                with view[begin:end] as body:
                    messages.append(ForkingPickler.loads(body))
                start = end
        del self._bytes[:start]
        return messages


class Channel:
    """One end of a socket pair, for a process that looks at it when it has time."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._frames = Frames()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits until the other side reads."""
        return bool(self._unsent)

    def send(self, message: object) -> None:
        """Send it, as far as there is room now. That the other side is gone only ``receive`` says."""
        self._unsent += pack(message)
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> list[Any]:
        """What has come since the last call, or the first part of it where that is much.

        Raises:
            EOFError: nothing, and the other side is gone.
        """
        messages: list[Any] = []
        try:
            for _ in range(READS):
                data = self._socket.recv(CHUNK)
                if not data:
                    break
                messages += self._frames.feed(data)
            else:
                return messages
        except BlockingIOError:
            return messages
        except ConnectionResetError:
            pass
        if not messages:
            raise EOFError("the other side is gone")
        return messages

    def close(self) -> None:
        self._socket.close()


def wait(channels: Sequence[Channel], seconds: float | None) -> None:
    """Until one of them has something to read or the time is over; what is unsent goes out meanwhile."""
    _, writable, _ = select.select(channels, [channel for channel in channels if channel.unsent], [], seconds)
    for channel in writable:
        channel.flush()
