"""The server's life: it listens while the model loads, serves, and after SIGTERM finishes what it has.

Exit status: 0 when every request in flight was finished; 128 + the signal's number when some were cut off, because
``drain_s`` passed or a second signal came; 4 when the engine died and no other follows; 1 when nothing could be served.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from calm.errors import CalmError, ConfigError
from calm.serve_config import ServeConfig

from .app import create_app
from .backend import ServedEngine
from .call import CUT_OFF
from .connection import ConnectionLimits, connection_class
from .guards import LOOPBACK, MAX_HEAD_BYTES
from .logs import LOGGER

ENGINE_GONE = 4
SAME_WITHIN_S = 0.5  # a terminal and a launcher may both pass on one Ctrl-C
WATCH_S, POLL_S = 0.25, 0.05
FLUSH_S = 2.0  # for the last words to clients that read slowly


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror}; choose another port=") from None
    # Connections inherit it. asyncio would set it itself, but overlooks sockets that do not name their protocol, and
    # then the second part of an answer, or of a stream, waits for the client's delayed acknowledgement: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    name = f"[{host.strip('[]')}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


def serve(engine: ServedEngine, config: ServeConfig, name: str, key: str | None) -> int:
    """Serve until a signal comes; the exit status. Raises CalmError where that cannot be begun."""
    if key is None and config.host not in LOOPBACK:
        LOGGER.warning("without an API key everybody who reaches this address is served")
    listener = listen(config.host, config.port)
    print(f"{name} at {url_of(config.host, listener)}", flush=True)

    async def life() -> int:
        service = Service(engine, config, name, key, listener)
        service.signals.install()
        return await service.run()

    return asyncio.run(life())


class InFlight:
    """Counts the requests that are in the application, and those whose answer the engine did not finish."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.count = self.cut_off = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.count += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.count -= 1
            self.cut_off += scope.get("state", {}).get("facts", {}).get("error") in CUT_OFF


class WebServer(uvicorn.Server):
    """uvicorn's, which leaves signals to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def web_server(app: ASGIApp, config: ServeConfig) -> WebServer:
    limits = ConnectionLimits(config.limits.connections, config.head_timeout_s, config.request_timeout_s)
    return WebServer(
        uvicorn.Config(
            app, http=connection_class(limits), ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=config.keep_alive_s, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip


class Signals:
    """SIGTERM and SIGINT as events: the first asks to drain, one that comes later to leave at once."""

    def __init__(self) -> None:
        self.drain, self.leave = asyncio.Event(), asyncio.Event()
        self.number = 0
        self._first = 0.0

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self.came, each)

    def came(self, number: int) -> None:
        if not self.drain.is_set():
            self.number, self._first = number, time.monotonic()
            self.drain.set()
        elif time.monotonic() - self._first >= SAME_WITHIN_S:
            self.leave.set()


class Service:
    """One server and its engine.

    Args:
        name: of the model, for clients.
        key: that clients have to send, or None.
        listener: a socket that listens.
    """

    def __init__(
        self, engine: ServedEngine, config: ServeConfig, name: str, key: str | None, listener: socket.socket
    ) -> None:
        self.signals = Signals()
        self._engine, self._config, self._listener = engine, config, listener
        self._app = InFlight(create_app(engine, config, name, key))
        self._web = web_server(self._app, config)

    async def run(self) -> int:
        """Until a signal, or until the engine is gone; the exit status.

        Raises:
            CalmError: the model cannot be served.
        """
        serving = asyncio.create_task(self._web.serve([self._listener]))
        try:
            await self._engine.start()
            status = await self._until_over(serving)
        finally:
            self._web.should_exit = True
            await self._engine.stop(0)
            await serving
        return status

    async def _until_over(self, serving: "asyncio.Task[None]") -> int:
        life = asyncio.create_task(self._live())
        asked = asyncio.create_task(self.signals.drain.wait())
        try:
            await asyncio.wait((life, asked, serving), return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
            if asked.done():
                life.cancel()
                return await self._drained()
            return ENGINE_GONE
        finally:
            for task in (life, asked):
                task.cancel()
            await asyncio.gather(life, asked, return_exceptions=True)

    async def _live(self) -> None:
        """From loading to where no engine follows one that died. Raises CalmError where the model cannot be served."""
        await self._load()
        while True:
            while self._engine.state == "ready":
                await asyncio.sleep(WATCH_S)
            LOGGER.error("the engine does not answer", extra={"facts": {"state": self._engine.state}})
            try:
                await self._engine.ready()
            except CalmError as error:
                return LOGGER.error("the engine is gone", extra={"facts": {"why": str(error)}})
            LOGGER.info("ready again")

    async def _load(self) -> None:
        await self._engine.ready()
        info, asked = self._engine.info, self._config.default_tolerance
        assert info is not None
        there = info.tolerances.get(self._config.default_consistency.value, ())
        if asked is not None and asked not in there:
            known = ", ".join(f"{value:g}" for value in there) or "none"
            raise ConfigError(
                f"default_tolerance={asked:g} is not certified for consistency "
                f"{self._config.default_consistency.value} as the model is served; certified: {known}"
            )
        if (draft := self._config.default_draft.draft()) is not None:
            if not info.max_drafted:
                raise ConfigError("default_draft: this engine's runner makes no drafts; choose runner=native or eager")
            if info.schedule is not None:
                raise ConfigError("default_draft: the model was trained by a schedule of layers, which decodes by that")
            draft.check_depth(info.num_layers)
            draft.check_classifier(info.has_classifier)
            if draft.length > info.max_drafted:
                raise ConfigError(f"default_draft.length={draft.length} is above the {info.max_drafted} of one round")
        LOGGER.info("ready", extra={"facts": {"max_batch": info.max_batch, "num_layers": info.num_layers}})

    async def _drained(self) -> int:
        """Finish what is in flight; new requests are refused, with the reason, as long as that takes."""
        signals, cut_off = self.signals, 128 + self.signals.number
        LOGGER.info("draining", extra={"facts": {"signal": signals.number, "in_flight": self._app.count}})
        finishing = asyncio.create_task(self._finish())
        leaving = asyncio.create_task(signals.leave.wait())
        try:
            await asyncio.wait((finishing, leaving), return_when=asyncio.FIRST_COMPLETED)
            return 0 if finishing.done() and finishing.result() else cut_off
        finally:
            for task in (finishing, leaving):
                task.cancel()
            await asyncio.gather(finishing, leaving, return_exceptions=True)

    async def _finish(self) -> bool:
        """Whether everything in flight was answered in full."""
        before = self._app.cut_off
        await self._engine.stop(self._config.drain_s)
        until = time.monotonic() + FLUSH_S
        while self._app.count and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
        return not self._app.count and self._app.cut_off == before
