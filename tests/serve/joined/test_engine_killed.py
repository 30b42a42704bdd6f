"""The engine's process is killed under load: everybody is told at once, and the server goes on or leaves."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from serve.engine import Engine
from serve.http.server import ENGINE_GONE
from serve.worker import work

from ..http.running import PATIENCE_S, read_all
from .conftest import LENGTH, NARROW
from .gate import Gate, gated
from .serving import START_S, alone, body_of, connect, engine_of, joined, program, prompts, same, until, waiting

NOTICED_S = 2.0


def test_a_killed_engine_is_told_at_once_and_replaced_as_often_as_allowed(
    folder: Path, here: Engine, tmp_path: Path
) -> None:
    """Fault 35: two requests run and six wait, streamed and not; the second death is the last."""
    gate = Gate(tmp_path / "gate")
    target = partial(gated, str(gate.path), work)
    with joined(engine_of(folder, NARROW, target, restarts=1), gate) as made:
        site, first = made.site, made.pid()
        bodies = [body_of(prompt, ignore_eos=True) for prompt in prompts(4, seed=41)]
        with waiting(made, bodies[:1], 2) as whole:
            stream = connect(site, body_of("w3 w4", stream=True, ignore_eos=True))
            until(lambda: site.load() == (2, 0))
            streams = [connect(site, body_of("w5", stream=True)) for _ in range(3)]
            until(lambda: site.load() == (2, 3))
            gate.hold(2)
            until(lambda: site.metric("calm_generation_tokens_total") == 4)
            assert stream.recv(12) == b"HTTP/1.1 200"
            with ThreadPoolExecutor(3) as pool:
                late = [pool.submit(site.send, body) for body in bodies[1:]]
                until(lambda: site.load() == (2, 6))
                assert site.ready() == 200
                os.kill(first, signal.SIGKILL)
                until(lambda: site.ready() == 503, NOTICED_S)
                gate.open()
                assert [each.result().refused for each in (*whole, *late)] == ["engine_gone"] * 4
        text = read_all(stream)
        assert b"event: error" in text and b"engine_gone" in text and b"[DONE]" not in text
        for each in streams:  # of which nothing was said yet, so that the status can tell
            told = read_all(each)
            assert told.startswith(b"HTTP/1.1 503") and b"engine_gone" in told and b"retry-after" in told.lower()
        assert site.load() == (0, 0)
        until(lambda: site.ready() == 200, START_S)
        assert made.pid() != first
        same(site.ask("w3 w4"), alone(here, "w3 w4"))
        for connection in (stream, *streams):
            connection.close()

        with waiting(made, bodies, 2) as pending:
            os.kill(made.pid(), signal.SIGKILL)
            assert [each.result().refused for each in pending] == ["engine_gone"] * 4
        made.server.join()
        assert made.server.status == [ENGINE_GONE] and not made.server.error


@pytest.mark.slow
def test_a_program_without_restarts_ends_with_its_engine(folder: Path, tmp_path: Path) -> None:
    """Fault 35: whoever runs it sees it by the exit status, and no request is left without an answer."""
    with program(folder, tmp_path, "restarts=0", "max_batch=1") as server:
        server.wait_until_ready()
        engine = server.engine
        with ThreadPoolExecutor(60) as pool:
            asked = [pool.submit(server.site.ask, prompt, ignore_eos=True) for prompt in prompts(60, seed=42)]
            until(lambda: any(each.done() for each in asked))
            assert engine.is_running()
            engine.kill()
            began = time.monotonic()
            found = [each.result() for each in asked]
        assert server.process.wait(PATIENCE_S) == ENGINE_GONE and time.monotonic() - began < PATIENCE_S
        lost = [each for each in found if each.status != 200]
        assert 0 < len(lost) < len(found) and {each.refused for each in lost} <= {"engine_gone", "not_ready"}
        assert all(each.body["usage"]["completion_tokens"] == LENGTH for each in found if each.status == 200)
        assert not engine.is_running()
