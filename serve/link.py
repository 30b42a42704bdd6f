"""The engine's process as an event loop sees it: started, spoken to without ever waiting, and ended for certain."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from calm.child import starting

from .frames import Frames, pack
from .worker import Settings

Target = Callable[[socket.socket, Settings], None]
POLL_S = 0.01
KILLED_S = 10.0  # a process that the kernel cannot end by then is left behind


class Link(asyncio.Protocol):
    """One process. Its messages are handed to ``on_message`` in order; ``lost`` is set when no more can come.

    It ends with the thread that started it. ``await Link.start(...)`` makes one.
    """

    def __init__(self, process: BaseProcess, on_message: Callable[[Any], None]) -> None:
        self.lost = asyncio.Event()
        self.pid = process.pid
        self._process = process
        self._ended = False
        self._on_message = on_message
        self._frames = Frames()

    @classmethod
    async def start(cls, target: Target, settings: Settings, on_message: Callable[[Any], None]) -> Link:
        """Raises OSError where the system has no process or socket to give."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _started(target, (theirs, settings))
            except BaseException:
                ours.close()
                raise
        link = cls(process, on_message)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        except BaseException:
            process.kill()
            raise
        return link

    def send(self, message: object) -> None:
        """Hand a message over; it goes when the process reads. To one that is gone nothing is sent."""
        if not self.lost.is_set():
            self._transport.write(pack(message))

    def kill(self) -> None:
        if not self._ended:
            self._process.kill()

    async def end(self, within: float) -> int | None:
        """Wait until the process has ended, and kill it after so many seconds. Returns its exit code.

        None: the kernel cannot end it.
        """
        loop = asyncio.get_running_loop()
        begun, killed = loop.time(), False
        while (code := self._process.exitcode) is None and loop.time() - begun < within + KILLED_S:
            if loop.time() - begun >= within and not killed:
                self.kill()
                killed = True
            await asyncio.sleep(POLL_S)
        self._transport.abort()
        await self.lost.wait()
        if code is not None:
            self._ended = True
            atexit.unregister(self._process.kill)
            self._process.close()
        return code

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()


def _started(target: Target, args: tuple[socket.socket, Settings]) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, name="calm-engine")
    with starting():
        process.start()
    # it leaves SIGTERM to this process, so multiprocessing would wait for it in vain when this one exits
    atexit.register(process.kill)
    return process
