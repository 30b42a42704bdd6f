"""The client against a scripted server: times, connections, and every way in which a request can fail."""

import asyncio
import json
import resource
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import h11
import pytest

from calm.errors import ConfigError
from eval.load_arrivals import arrivals, open_loop
from eval.load_client import SPARE_FILES, Client, body_of, check_files
from eval.load_connection import Connection, Disconnected
from eval.load_metrics import measures
from eval.load_samples import Counted, ErrorKind, Sample
from eval.load_stream import Completion, Malformed

from .load_server import DONE, Call, Script, Server, event, served, usage, word, words

BODY = body_of("m", "a prompt")


def run(script: Script, work: Callable[[Client, Server], Awaitable[Any]], timeout: float = 60.0, **options: Any) -> Any:
    """``work`` with a client of a server that follows the script."""

    async def main() -> Any:
        async with served(script) as server:
            client = Client(server.url, timeout, **options)
            try:
                return await work(client, server)
            finally:
                client.close()

    return asyncio.run(main())


def one(script: Script, timeout: float = 60.0, **options: Any) -> Sample:
    async def work(client: Client, server: Server) -> Sample:
        return await client.complete(BODY)

    return run(script, work, timeout, **options)


# times


class Wire(asyncio.Transport):
    """Takes what is written; nothing comes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += data

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def request() -> h11.Request:
    return h11.Request(method="POST", target="/v1/completions", headers=[("Host", "x"), ("Content-Length", "2")])


def on_a_wire(
    feed: Callable[[Connection], None], clock: Callable[[], float] = lambda: 0.0
) -> tuple[Completion, Connection, Wire]:
    """A request whose answer is fed by hand."""

    async def main() -> tuple[Completion, Connection, Wire]:
        connection, wire, reply = Connection(clock, lambda each: None), Wire(), Completion()
        connection.connection_made(wire)
        asked = asyncio.ensure_future(connection.exchange(request(), b"{}", reply))
        await asyncio.sleep(0)
        feed(connection)
        await asked
        return reply, connection, wire

    return asyncio.run(main())


def test_a_chunks_time_is_when_its_bytes_came() -> None:
    time = 0.0

    def feed(connection: Connection) -> None:
        nonlocal time
        for at, data in (
            (1.0, HEAD),  # a head is no word
            (2.0, chunked(word())),
            (2.5, chunked(word())[:9]),  # cut in the middle of a word
            (4.0, chunked(word())[9:]),
            (4.25, chunked(word() + word())),  # two at once
            (5.0, chunked(usage(4))),
            (6.0, chunked(DONE) + b"0\r\n\r\n"),
        ):
            time = at
            connection.data_received(data)

    reply, connection, wire = on_a_wire(feed, lambda: time)
    assert reply.chunks == [2.0, 4.0, 4.25, 4.25]
    assert wire.written.startswith(b"POST /v1/completions HTTP/1.1\r\n") and wire.written.endswith(b"\r\n\r\n{}")
    assert connection.ready() and connection.ready()


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    reply, connection, wire = on_a_wire(
        lambda connection: connection.data_received(HEAD + chunked(word() + DONE) + b"0\r\n\r\n" + b"HTTP/1.1 408 Late")
    )
    assert len(reply.chunks) == 1 and not connection.ready()

    def feed(connection: Connection) -> None:
        connection.data_received(HEAD + chunked(word() + DONE) + b"0\r\n\r\n")
        connection.data_received(b"HTTP/1.1 408 Late\r\n\r\n")

    reply, connection, wire = on_a_wire(feed)
    assert len(reply.chunks) == 1 and wire.closed and not connection.ready()


def test_an_informational_answer_is_no_answer() -> None:
    reply, _, _ = on_a_wire(
        lambda connection: connection.data_received(
            b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + HEAD + chunked(word() + DONE) + b"0\r\n\r\n"
        )
    )
    assert reply.status == 200 and reply.done


def test_a_connection_lost_at_once_is_no_crash() -> None:
    async def main() -> None:
        connection = Connection(lambda: 0.0, lambda each: None)
        connection.connection_made(Wire())
        connection.connection_lost(None)
        with pytest.raises(Disconnected) as caught:
            await connection.exchange(request(), b"{}", Completion())
        assert caught.value.silent

    asyncio.run(main())


def test_what_is_no_http_is_malformed() -> None:
    with pytest.raises(Malformed, match="no HTTP"):
        on_a_wire(lambda connection: connection.data_received(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"))


def test_a_sample_holds_what_happened_and_its_gaps_add_up() -> None:
    async def script(call: Call) -> None:
        call.head()
        for _ in range(4):
            call.chunk(word())
            await asyncio.sleep(0.02)
        call.chunk(usage(5, prompt=11))
        call.chunk(DONE)
        call.end()

    sample = one(script)
    assert (sample.error, sample.tokens, sample.prompt_tokens, sample.counted) == (None, 5, 11, Counted.usage)
    assert len(sample.chunks) == 4 and sample.status == 200
    gaps = [b - a for a, b in zip(sample.chunks, sample.chunks[1:], strict=False)]
    assert all(gap >= 0.015 for gap in gaps)  # a busy machine makes them longer, nothing shorter
    assert 0.0 == sample.sent < sample.first < sample.last < sample.ended
    told = measures([sample], sample.ended, [50], {})
    assert told["from_sent"]["mean_e2el_ms"] - told["from_sent"]["mean_ttft_ms"] == pytest.approx(1000 * sum(gaps))


def test_tokens_are_the_servers_else_our_tokenizers_else_the_chunks() -> None:
    async def silent(call: Call) -> None:
        call.head()
        for _ in range(3):
            call.chunk(word("two words "))
        call.chunk(DONE)
        call.end()

    def of(sample: Sample) -> tuple[int, Counted | None]:
        return sample.tokens, sample.counted

    assert of(one(words)) == (3, Counted.usage)
    assert of(one(silent, count=lambda text: len(text.split()))) == (6, Counted.tokenizer)
    assert of(one(silent)) == (3, Counted.chunks)


def test_layers_are_kept_where_the_server_tells_them() -> None:
    def script(facts: Any) -> Script:
        async def speak(call: Call) -> None:
            call.head()
            call.chunk(word())
            call.chunk(event({"choices": [{"text": "", "finish_reason": "stop", "early_exit": facts}]}))
            call.chunk(usage(2) + DONE)
            call.end()

        return speak

    sample = one(script({"certified": True, "tokens": 2, "mean_exit_layer": 2, "layers_skipped": 0.75}))
    assert (sample.exit_layer, sample.layers_skipped, sample.certified) == (2.0, 0.75, True)
    for other in (None, {"certified": "yes", "mean_exit_layer": True, "layers_skipped": "1"}):
        sample = one(script(other))
        assert (sample.error, sample.exit_layer, sample.layers_skipped, sample.certified) == (None, None, None, None)


# what is sent


def test_bodies_hold_what_was_asked_for_and_nothing_that_was_not() -> None:
    plain = {"model": "m", "prompt": "é", "stream": True, "stream_options": {"include_usage": True}}
    assert json.loads(body_of("m", "é", max_tokens=None)) == plain
    asked = json.loads(body_of("m", [3, 1], max_tokens=5, early_exit={"tolerance": 0.05}, temperature=0.0))
    assert asked["prompt"] == [3, 1] and asked["early_exit"] == {"tolerance": 0.05} and asked["temperature"] == 0.0


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: Client, server: Server) -> dict[str, str]:
        assert (await client.complete(BODY)).error is None
        assert (await client.get("/v1/models", 60.0)).status == 200
        assert [call.headers.get("authorization") for call in server.calls] == [expected] * 2
        return server.calls[0].headers

    monkeypatch.delenv("CALM_API_KEY", raising=False)
    expected: str | None = None
    headers = run(words, work)
    assert headers["content-type"] == "application/json" and headers["host"].startswith("127.0.0.1:")
    monkeypatch.setenv("CALM_API_KEY", "s3cret")
    expected = "Bearer s3cret"
    run(words, work)
    monkeypatch.setenv("CALM_API_KEY", "s3cret\n")
    with pytest.raises(ConfigError, match="CALM_API_KEY") as caught:
        Client("http://x")
    assert "s3cret" not in str(caught.value)


# connections


def test_connections_are_used_again_and_as_many_are_open_as_requests() -> None:
    async def work(client: Client, server: Server) -> None:
        for _ in range(3):
            await client.complete(BODY)
        assert (server.connections, client.pool.opened) == (1, 1)
        await asyncio.gather(*[client.complete(BODY) for _ in range(5)])
        assert (server.connections, client.pool.opened) == (5, 5)
        await asyncio.gather(*[client.complete(BODY) for _ in range(5)])
        assert server.connections == 5

    run(words, work)


def test_a_server_that_closes_after_every_answer_is_no_failure() -> None:
    async def polite(call: Call) -> None:
        call.plain(429, {}, "connection: close\r\n")
        call.drop()

    async def work(client: Client, server: Server) -> list[Sample]:
        found = [await client.complete(BODY) for _ in range(3)]
        assert server.connections == 3
        return found

    assert [(each.error, each.retries) for each in run(polite, work)] == [(ErrorKind.refused, 0)] * 3


def test_an_idle_connection_that_was_closed_meanwhile_is_not_used() -> None:
    async def script(call: Call) -> None:
        call.words(1)
        call.drop()  # without a word of it

    async def work(client: Client, server: Server) -> list[Sample]:
        first = await client.complete(BODY)
        while client.pool._idle:  # until its end has been noticed
            await asyncio.sleep(0.001)
        return [first, await client.complete(BODY)]

    assert [(each.error, each.retries) for each in run(script, work)] == [(None, 0)] * 2


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_request_met_by_the_close_of_an_idle_connection_is_sent_once_more(how: str) -> None:
    """The server gives an idle connection up just when the next request comes: it is closed without a byte."""

    async def script(call: Call) -> None:
        if call.on_connection == 0:
            call.words(2)
        elif how == "reset":
            call.writer.transport.abort()
        else:
            call.drop()

    async def work(client: Client, server: Server) -> list[Sample]:
        found = [await client.complete(BODY) for _ in range(4)]
        assert len(server.completions) == 1 + 2 * 3 and server.connections == 4
        return found

    found = run(script, work)
    assert [each.error for each in found] == [None] * 4 and [each.retries for each in found] == [0, 1, 1, 1]
    assert measures(found, 1.0, [50], {})["retried"] == 3


def test_it_is_sent_once_more_and_not_for_ever() -> None:
    async def script(call: Call) -> None:
        if len(calls) == 0:
            call.words(1)
        else:
            call.drop()
        calls.append(call.connection)

    async def work(client: Client, server: Server) -> list[Sample]:
        return [await client.complete(BODY), await client.complete(BODY)]

    calls: list[int] = []
    _, second = run(script, work)
    assert second.error is ErrorKind.disconnected and second.retries == 1 and calls == [1, 1, 2]


def test_a_request_that_was_half_answered_is_never_sent_again() -> None:
    async def script(call: Call) -> None:
        if call.on_connection == 0:
            call.words(1)
            return
        call.head()
        call.chunk(word())
        call.drop()

    async def work(client: Client, server: Server) -> Sample:
        await client.complete(BODY)
        sample = await client.complete(BODY)
        assert len(server.completions) == 2
        return sample

    sample = run(script, work)
    assert (sample.error, sample.retries, len(sample.chunks)) == (ErrorKind.disconnected, 0, 1)
    assert sample.lost and sample.tokens == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_server_behind_tls_must_be_who_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    wanted = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1".split()
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *wanted, *named], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)

    async def main() -> list[Sample]:
        async with served(words, tls) as server:
            url = server.url.replace("http://", "https://")
            stranger = Client(url)
            monkeypatch.setenv("SSL_CERT_FILE", certificate)
            friend = Client(url)
            found = [await stranger.complete(BODY), await friend.complete(BODY), await friend.complete(BODY)]
            assert friend.pool.opened == 1
            for client in (stranger, friend):
                client.close()
            await asyncio.sleep(0.1)
            return found

    refused, first, second = asyncio.run(main())
    assert refused.error is ErrorKind.disconnected and "CERTIFICATE_VERIFY_FAILED" in refused.detail
    assert (first.error, first.tokens, second.error, second.retries) == (None, 3, None, 0)


# failures


async def _reset(call: Call) -> None:
    call.head()
    call.chunk(word())
    await call.writer.drain()
    call.writer.transport.abort()


async def _silence(call: Call) -> None:
    call.drop()


async def _no_done(call: Call) -> None:
    call.head()
    call.chunk(word())
    call.end()


async def _no_choices(call: Call) -> None:
    call.head()
    call.chunk(usage(3) + DONE)
    call.end()


async def _no_json(call: Call) -> None:
    call.head()
    call.chunk(b"data: {oops\n\n")
    call.end()


async def _no_stream(call: Call) -> None:
    call.plain(200, {"choices": [{"text": "all at once"}]})


async def _no_http(call: Call) -> None:
    call.send(b"220 mail.example ESMTP\r\n\r\n")
    call.drop()


async def _bad_chunk(call: Call) -> None:
    call.head()
    call.send(b"zz\r\nnot a length\r\n")
    call.drop()


async def _told_failure(call: Call) -> None:
    call.head()
    call.chunk(word())
    call.chunk(event({"error": {"message": "the engine went away", "code": 500}}))
    call.chunk(DONE)
    call.end()


async def _hang(call: Call) -> None:
    call.head()
    call.chunk(word())
    await call.writer.drain()
    await asyncio.sleep(30)


def refuses(status: int) -> Script:
    async def script(call: Call) -> None:
        call.refuse(status, f"status {status}")

    return script


@pytest.mark.parametrize(
    ("script", "kind", "status", "said"),
    [
        (refuses(429), "refused", 429, "status 429"),
        (refuses(503), "refused", 503, "status 503"),
        (refuses(400), "status", 400, "status 400"),
        (refuses(500), "status", 500, "status 500"),
        (_told_failure, "failed", 200, "the engine went away"),
        (_silence, "disconnected", None, "closed by the server"),
        (_reset, "disconnected", 200, ""),
        (_no_done, "malformed", 200, "[DONE]"),
        (_no_choices, "malformed", 200, "choices"),
        (_no_json, "malformed", 200, "no JSON"),
        (_no_stream, "malformed", 200, "application/json instead of a stream"),
        (_no_http, "malformed", None, "no HTTP"),
        (_bad_chunk, "malformed", 200, "no HTTP"),
    ],
)
def test_failures_are_told_by_kind(script: Script, kind: str, status: int | None, said: str) -> None:
    sample = one(script)
    assert sample.error is not None
    assert (sample.error.value, sample.status, sample.retries, sample.tokens) == (kind, status, 0, 0)
    assert said in sample.detail and "\n" not in sample.detail
    assert sample.lost is (kind in ("disconnected", "malformed"))


def test_a_client_goes_on_after_every_failure() -> None:
    turns = iter([refuses(500), _no_json, _reset, _no_http, words])

    async def script(call: Call) -> None:
        await next(turns)(call)

    async def work(client: Client, server: Server) -> list[Sample]:
        return [await client.complete(BODY) for _ in range(5)]

    assert [each.error and each.error.value for each in run(script, work)] == [
        "status", "malformed", "disconnected", "malformed", None
    ]  # fmt: skip


def test_an_answer_without_end_is_given_up_and_its_connection_closed() -> None:
    async def work(client: Client, server: Server) -> Sample:
        sample = await client.complete(BODY)
        assert not client.pool._idle
        return sample

    sample = run(_hang, work, timeout=0.3)
    assert sample.error is ErrorKind.timeout and sample.lost and sample.detail == "no end within 0.3 s"
    assert sample.ended >= 0.3 and len(sample.chunks) <= 1


def test_a_server_that_is_not_there_is_a_disconnection() -> None:
    async def main() -> Sample:
        async with served(words) as server:
            url = server.url
        client = Client(url)
        return await client.complete(BODY)

    sample = asyncio.run(main())
    assert sample.error is ErrorKind.disconnected and "cannot connect" in sample.detail and sample.lost


# many


def test_a_thousand_in_flight_each_get_their_own_answer() -> None:
    check_files(2 * 1000)  # both ends are in this process
    number = 1000

    async def main() -> tuple[list[Sample], float, int]:
        all_here, here = asyncio.Event(), 0

        async def script(call: Call) -> None:
            nonlocal here
            here += 1
            if here == number:
                all_here.set()
            await all_here.wait()
            call.words(2, tokens=int(call.json["prompt"]))

        async with served(script) as server:
            client = Client(server.url, timeout=200.0)
            bodies = [body_of("m", str(1 + i)) for i in range(number)]
            samples, duration = await open_loop(
                arrivals(number, float("inf")), lambda i, at, zero: client.complete(bodies[i], i, at, zero)
            )
            opened = client.pool.opened
            client.close()
            await asyncio.sleep(0)
            return samples, duration, opened

    samples, duration, opened = asyncio.run(main())
    assert [each.error for each in samples] == [None] * number
    assert [each.tokens for each in samples] == list(range(1, number + 1))
    assert opened == number
    told = measures(samples, duration, [50, 99], {})
    assert (told["completed"], told["failed"], told["max_concurrent_requests"]) == (number, 0, number)


def test_too_few_open_files_are_told_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, asked = (256, 4096), list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: asked.append(both))
    check_files(256 - SPARE_FILES)
    assert asked == []
    check_files(1000)
    assert asked == [(1000 + SPARE_FILES, 4096)]  # as far as the system allows without asking anybody
    with pytest.raises(ConfigError, match=r"n=5000 .* need 5064 open files, but this process may have 4096.*ulimit"):
        check_files(5000)
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    check_files(10**6)
    assert len(asked) == 1
