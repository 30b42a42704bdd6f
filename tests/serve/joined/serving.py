"""The HTTP server with an engine's process behind it, in this process or as the program; and its clients."""

import asyncio
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h11
import psutil
from prometheus_client.parser import text_string_to_metric_families

from calm.load_config import endpoint
from calm.policies import Full, Static
from eval.load_connection import Pool
from eval.load_stream import Completion, Reply
from eval.own_server import OwnServer, listening
from serve.engine import Engine
from serve.http.answers import FINISH_REASONS
from serve.link import Target
from serve.options import EngineOptions, RequestOptions
from serve.remote import RemoteEngine
from serve.requests import Answer
from serve.worker import work
from tests.scripted import examples

from ..faulty import POISON, RAISE, SLOW
from ..http.fakes import NAME
from ..http.running import PATIENCE_S, Running, request_bytes, running
from .gate import BREAK, Gate, gated

VOCABULARY = 60
Prompt = str | list[str] | list[int]
START_S = 240.0  # for an engine's process to be ready; the machine may be busy
PATIENT_S = 120.0  # a slow machine is no hang
LAYERS = {"layers": True}  # exit layers tell an answer from another even where its text does not
POLL_S = 0.01


def until(what: Callable[[], object], seconds: float = PATIENCE_S) -> float:
    """Wait until it holds; how long that took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, "it never came to that"
        time.sleep(POLL_S)
    return time.monotonic() - began


@dataclass(frozen=True)
class Answered:
    """A response."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["error"]
        return found

    @property
    def refused(self) -> str:
        """The code of a refusal that says when to come again."""
        assert self.status in (429, 503), (self.status, self.body)
        assert int(self.headers["retry-after"]) > 0
        return str(self.error["code"])


@dataclass(frozen=True)
class Site:
    """A server at a port of this machine, as its clients see it."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, bytes]:
        found = self._call("GET", path)
        return found[0], found[2]

    def ask(self, prompt: Prompt, **fields: Any) -> Answered:
        """One prompt, answered whole."""
        return self.send(body_of(prompt, **fields))

    def send(self, body: bytes) -> Answered:
        status, headers, content = self._call("POST", "/v1/completions", body)
        return Answered(status, headers, json.loads(content))

    def ready(self) -> int:
        """Status of /readyz."""
        return self.get("/readyz")[0]

    def metrics(self) -> dict[str, float]:
        """All of them by name, each summed over its labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")[1].decode()):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def metric(self, name: str) -> float:
        return self.metrics()[name]

    def load(self) -> tuple[float, float]:
        """Requests that run and that wait."""
        found = self.metrics()
        return found["calm_num_requests_running"], found["calm_num_requests_waiting"]

    def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            headers = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()


def body_of(prompt: Prompt, **fields: Any) -> bytes:
    asked = {"model": NAME, "prompt": prompt, "early_exit": LAYERS, **fields}
    return json.dumps(asked).encode()


def same(found: Answered, answer: Answer) -> None:
    """A whole response is this answer of the engine's."""
    assert found.status == 200, found.body
    (choice,) = found.body["choices"]
    assert (choice["text"], choice["early_exit"]["tokens"]) == (answer.text, len(answer.tokens))
    assert choice["early_exit"]["exit_layers"] == list(answer.emission_layers)
    assert choice["finish_reason"] == FINISH_REASONS[answer.reason]
    assert found.body["usage"]["completion_tokens"] == len(answer.tokens)


def alone(engine: Engine, prompt: str, **options: Any) -> Answer:
    """What the prompt is answered with when nobody else is there."""
    return engine.generate([prompt], RequestOptions(**options))[0]


def engine_of(
    folder: Path,
    options: EngineOptions,
    target: Target = work,
    restarts: int = 0,
) -> RemoteEngine:
    return RemoteEngine(folder, options, name=NAME, hung_after=PATIENT_S, restarts=restarts, target=target)


@dataclass(frozen=True)
class Joined:
    """A server of this process, the engine's process, and the gate in it."""

    server: Running
    engine: RemoteEngine
    gate: Gate

    @property
    def site(self) -> Site:
        return Site(self.server.port)

    def pid(self) -> int:
        """Of the engine."""
        link = self.engine._link
        assert link is not None and link.pid is not None
        return link.pid


@contextmanager
def joined(engine: RemoteEngine, gate: Gate, **settings: Any) -> Iterator[Joined]:
    """Until it is drained and gone. Requests may take long on a busy machine, unless ``settings`` say otherwise."""
    with running(engine, wait=False, **{"request_timeout_s": 600.0, **settings}) as server:
        try:
            until(lambda: engine.state == "ready" or server.error, START_S)
            assert not server.error, server.error
            yield Joined(server, engine, gate)
        finally:
            gate.open()


@contextmanager
def held(folder: Path, options: EngineOptions, place: Path, target: Target = work, **settings: Any) -> Iterator[Joined]:
    """``joined``, with a gate whose file is in ``place``."""
    gate = Gate(place / "gate")
    with joined(engine_of(folder, options, partial(gated, str(gate.path), target)), gate, **settings) as made:
        yield made


# the program


@dataclass(frozen=True)
class Program:
    """``python -m serve`` in a process of its own."""

    own: OwnServer

    @property
    def process(self) -> "subprocess.Popen[str]":
        return self.own.process

    @property
    def site(self) -> Site:
        return Site(self.own.port)

    @property
    def engine(self) -> psutil.Process:
        """The one that is busy: the server's child that has a child for long texts."""
        (found,) = [each for each in psutil.Process(self.process.pid).children() if each.children()]
        return found

    def wait_until_ready(self) -> float:
        """Seconds since it was started."""
        return self.own.wait_until_ready(START_S)


@contextmanager
def program(folder: Path, place: Path, *argv: str, port: int = 0) -> Iterator[Program]:
    """Listening, and perhaps not ready yet; killed in the end. A slow machine is no hang."""
    settings = [f"name={NAME}", f"port={port}", f"hung_after_s={PATIENT_S}", *argv]
    with listening(folder, place / "server.log", settings) as own:
        yield Program(own)


# many clients


async def crowd(url: str, bodies: Sequence[bytes]) -> list[Reply]:
    """A client for each body: all of them are connected before the first asks, and none leaves before the last."""
    where = endpoint(url)
    pools = [Pool(where) for _ in bodies]

    async def connected(pool: Pool) -> None:
        request = h11.Request(method="GET", target="/healthz", headers=[("Host", where.authority)])
        await pool.exchange(request, b"", Reply)

    async def answered(pool: Pool, body: bytes) -> Reply:
        head = [("Host", where.authority), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        request = h11.Request(method="POST", target="/v1/completions", headers=head)
        replies: list[Reply] = []

        def new() -> Reply:
            replies.append(Completion() if json.loads(body).get("stream") else Reply())
            return replies[-1]

        await pool.exchange(request, body, new)
        (reply,) = replies  # it was sent once
        return reply

    try:
        for pool in pools:
            await connected(pool)
        return await asyncio.gather(*(answered(*each) for each in zip(pools, bodies, strict=True)))
    finally:
        for pool in pools:
            pool.close()


def connect(site: Site, body: bytes) -> socket.socket:
    """A client's bare connection, on which this was sent."""
    connection = socket.create_connection(("127.0.0.1", site.port), PATIENCE_S)
    connection.sendall(request_bytes(body, "connection: close"))
    return connection


@contextmanager
def waiting(made: Joined, bodies: Sequence[bytes], slots: int) -> Iterator[list["Future[Answered]"]]:
    """Whole answers that are asked for one after another while the gate is shut: who runs and who waits is certain.

    It is opened in the end, or before by whoever wants to.
    """
    made.gate.hold()
    with ThreadPoolExecutor(len(bodies)) as pool:
        try:
            futures = []
            for count, body in enumerate(bodies, start=1):
                futures.append(pool.submit(made.site.send, body))
                due = (min(slots, count), max(0, count - slots))
                until(partial(_stands_at, made.site, due))
            yield futures
        finally:
            made.gate.open()


def _stands_at(site: Site, load: tuple[float, float]) -> bool:
    return site.load() == load


def together(made: Joined, bodies: Sequence[bytes], slots: int) -> list[Answered]:
    """Their answers, the first ``slots`` of them in one batch from their first token on."""
    with waiting(made, bodies, slots) as futures:
        pass
    return [future.result() for future in futures]


# prompts and ways


@dataclass(frozen=True)
class Way:
    """How deep an answer goes: as a client says it, and as the engine is told."""

    early_exit: dict[str, Any]
    options: dict[str, Any]


FULL = Way({"policy": "full"}, {"policy": Full()})
WAYS = (
    FULL,
    Way({"threshold": 0.3, "measure": "softmax"}, {"threshold": 0.3, "measure": "softmax"}),
    Way({"policy": "static", "layer": 2}, {"policy": Static(2)}),
    Way({"threshold": 0.9, "measure": "state"}, {"threshold": 0.9, "measure": "state"}),
    Way({"threshold": 0.5, "measure": "classifier"}, {"threshold": 0.5, "measure": "classifier"}),
)


def prompts(count: int, seed: int = 3, longest: int = 9) -> list[str]:
    """Different ones, none of which means trouble."""
    trouble = {f"w{word}" for word in (SLOW, RAISE, POISON, BREAK)}
    rows = examples(VOCABULARY, 3 * count, seed=seed, longest=longest)
    found = dict.fromkeys(row.source for row in rows if row.source.split()[0] not in trouble)
    assert len(found) >= count
    return list(found)[:count]


@dataclass(frozen=True)
class Question:
    """A request, and the answer that it has alone."""

    body: bytes
    answer: Answer


def questions(engine: Engine, count: int, seed: int = 3, stream_each: int = 0, **fields: Any) -> list[Question]:
    """Requests of all ways, no two of which have the same answer, each asked by itself.

    Args:
        stream_each: every so manyth is streamed; 0: none.
        fields: of the request, by the same name in the engine's options.
    """
    found: dict[tuple[str, tuple[int, ...]], Question] = {}
    for number, prompt in enumerate(prompts(2 * count, seed)):
        way = WAYS[number % len(WAYS)]
        answer = alone(engine, prompt, **way.options, **fields)
        stream = bool(stream_each) and number % stream_each == 0
        body = body_of(prompt, stream=stream, early_exit={**way.early_exit, **LAYERS}, **fields)
        found.setdefault((answer.text, answer.emission_layers), Question(body, answer))
        if len(found) == count:
            return list(found.values())
    raise AssertionError("too many of the answers are the same")
