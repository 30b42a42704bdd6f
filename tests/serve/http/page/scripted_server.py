"""A server that shows the page and speaks its protocol by script: each test says what is answered, and when.

It knows nothing of models. A script is a list of steps; ``Wait`` holds an answer until the test opens a gate.
"""

import base64
import json
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

PAGE = Path(__file__).parents[4] / "serve" / "http" / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
PATIENCE_S = 60.0  # of a gate that a failed test never opens
NUM_LAYERS = 8
FOLDER = "/under/a/folder"  # the page works there as it does at the root

Json = dict[str, Any]


@dataclass(frozen=True)
class Send:
    """Bytes of the stream, as they are."""

    data: bytes


@dataclass(frozen=True)
class Wait:
    """Go on when the test opens this gate."""

    gate: str


@dataclass(frozen=True)
class Watch:
    """Wait until the client has gone, and open this gate."""

    gate: str


@dataclass(frozen=True)
class Cut:
    """Break the connection off."""


@dataclass(frozen=True)
class Refusal:
    """An answer that is no stream: the API's errors, or another body."""

    status: int
    message: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None


Step = Send | Wait | Watch | Cut
Script = Sequence[Step] | Refusal


def event(value: Json) -> Send:
    return Send(f"data: {json.dumps(value)}\n\n".encode())


DONE = Send(b"data: [DONE]\n\n")


def said(text: str, *layers: int) -> Send:
    """What one step brought: text that became final, and the layers of its tokens."""
    return event(chunk(text, layers))


def chunk(text: str, layers: Sequence[int], finish: str | None = None, **more: Any) -> Json:
    choice = {"index": 0, "text": text, "finish_reason": finish, "early_exit": {"exit_layers": list(layers), **more}}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


def ending(layers: Sequence[int], certified: bool = True, reason: str = "stop", text: str = "") -> list[Step]:
    """The last chunks of an answer whose tokens left at these layers, all of them told before."""
    mean = sum(layers) / len(layers)
    counts = {"tokens": len(layers), "mean_exit_layer": mean, "layers_skipped": 1 - mean / NUM_LAYERS}
    usage = {"prompt_tokens": 3, "completion_tokens": len(layers), "total_tokens": 3 + len(layers)}
    last = chunk(text, [], reason, certified=certified, **counts)
    return [event(last), event({"id": "cmpl-1", "choices": [], "usage": usage}), DONE]


def spoken(pieces: Sequence[tuple[str, int]], certified: bool = True) -> list[Step]:
    """A whole answer, one token a chunk; an empty piece is a token without text."""
    steps: list[Step] = [said(text, layer) for text, layer in pieces]
    return steps + ending([layer for _, layer in pieces], certified)


def model(name: str = "tiny", **changes: Any) -> Json:
    early_exit = {
        "num_layers": NUM_LAYERS,
        "exit_layers": list(range(1, NUM_LAYERS)),
        "tolerances": {"risk": [0.02, 0.05, 0.1], "textual": [0.05, 0.2]},
        "measure": "softmax",
        **changes,
    }
    return {"id": name, "object": "model", "early_exit": early_exit}


class ScriptedServer:
    """Serves on a free port of loopback while it is entered.

    Attributes:
        models: entries of /v1/models, or what it refuses with.
        key: that a browser must send as its password; None: none.
        answer: the script of a request's answer.
        requests: bodies of all calls of /v1/completions that were let in.
        asked: paths of all requests.
    """

    def __init__(self) -> None:
        self.models: list[Json] | Refusal = [model()]
        self.key: str | None = None
        self.answer: Callable[[Json], Script] = lambda request: spoken([("one", 3), (" two", 1), ("", 2)])
        self.requests: list[Json] = []
        self.asked: list[str] = []
        self._gates: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            for gate in self._gates.values():
                gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def open(self, gate: str) -> None:
        self.gate(gate).set()

    def gate(self, name: str) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(name, threading.Event())

    def steps(self, script: Sequence[Step], handler: BaseHTTPRequestHandler) -> Iterator[bytes]:
        """The bytes that a script sends; it ends early where the script breaks off."""
        for step in script:
            match step:
                case Send(data):
                    yield data
                case Wait(gate):
                    self.gate(gate).wait(PATIENCE_S)
                case Watch(gate):
                    readable, _, _ = select.select([handler.connection], [], [], PATIENCE_S)
                    if readable:  # nothing more is due from the client: only its end can be read
                        self.open(gate)
                case Cut():
                    raise ConnectionAbortedError

    def _handler(scripted) -> type[BaseHTTPRequestHandler]:  # noqa: N805  # `self` is the handler below
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                scripted.asked.append(self.path)
                if not self.let_in():
                    return
                path = self.path.removeprefix(FOLDER)
                name = "index.html" if path == "/" else path.removeprefix("/page/")
                if path == "/v1/models":
                    self.tell_models()
                elif name in {path.name for path in PAGE.iterdir()}:
                    headers = {"content-type": TYPES[Path(name).suffix], "content-security-policy": POLICY}
                    self.reply(200, (PAGE / name).read_bytes(), headers)
                else:
                    self.refuse(Refusal(404, "there is no such route"))

            def do_POST(self) -> None:
                scripted.asked.append(self.path)
                body = self.rfile.read(int(self.headers["content-length"]))
                if not self.let_in():
                    return
                request = json.loads(body)
                scripted.requests.append(request)
                script = scripted.answer(request)
                if isinstance(script, Refusal):
                    self.refuse(script)
                else:
                    self.stream(script)

            def tell_models(self) -> None:
                if isinstance(scripted.models, Refusal):
                    self.refuse(scripted.models)
                else:
                    body = json.dumps({"object": "list", "data": scripted.models}).encode()
                    self.reply(200, body, {"content-type": "application/json"})

            def let_in(self) -> bool:
                scheme, _, given = self.headers.get("authorization", "").partition(" ")
                if scripted.key is None or (
                    scheme == "Basic" and base64.b64decode(given).decode().endswith(f":{scripted.key}")
                ):
                    return True
                challenge = "Bearer" if "/v1/" in self.path else 'Basic realm="calm"'
                message = "the API key is missing or wrong"
                self.refuse(Refusal(401, message, headers={"www-authenticate": challenge}))
                return False

            def refuse(self, refusal: Refusal) -> None:
                body = refusal.body or json.dumps({"error": {"message": refusal.message}}).encode()
                self.reply(refusal.status, body, {"content-type": "application/json", **refusal.headers})

            def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def stream(self, script: Sequence[Step]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream; charset=utf-8")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.close_connection = True
                try:
                    for data in scripted.steps(script, self):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    self.wfile.write(b"0\r\n\r\n")
                except ConnectionError:
                    pass  # the script broke off, or the client left

            def log_message(self, *_: Any) -> None:
                """Nothing: a test's output is for its failure."""

        return Handler
