"""The whole program is killed under load: its clients know what they have lost, and the next one can begin."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from eval.load_client import Client
from eval.load_samples import ErrorKind, Sample
from eval.load_stream import Completion
from serve.engine import Engine

from ..http.running import PATIENCE_S
from .conftest import LENGTH
from .serving import FULL, alone, body_of, program, prompts, same, until

ANSWERED, ASKED = 6, 60
SOON_S = 10.0  # for a new start


class Reader(Client):
    """Keeps the text of what it has counted as answered."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.texts: dict[int, str] = {}

    def _read(self, sample: Sample, reply: Completion) -> Sample:
        read = super()._read(sample, reply)
        if read.error is None:
            self.texts[sample.number] = reply.text
        return read


async def load(url: str, asked: list[str], pid: int) -> tuple[list[Sample], dict[int, str]]:
    """All of them at once, and one more afterwards; the process is killed as soon as ``ANSWERED`` are answered."""
    client, answered = Reader(url), 0

    async def one(number: int, prompt: str) -> Sample:
        nonlocal answered
        fields = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        sample = await client.complete(body_of(prompt, **fields), number)
        answered += sample.error is None
        if answered == ANSWERED and sample.error is None:
            os.kill(pid, signal.SIGKILL)
        return sample

    try:
        samples = await asyncio.gather(*(one(*each) for each in enumerate(asked)))
        samples.append(await client.complete(body_of(asked[0], stream=True), len(asked)))
        return samples, client.texts
    finally:
        client.close()


@pytest.mark.slow
def test_a_killed_server_takes_what_it_had_and_a_new_one_is_ready_soon(
    folder: Path, here: Engine, tmp_path: Path
) -> None:
    """Fault 35: each request is either answered in full or told to be lost; the engine ends too, and the port is free.

    The new start has ten seconds, or, where the machine is busy, twice what the first one took.
    """
    asked = prompts(ASKED, seed=61)
    with program(folder, tmp_path, "max_batch=2", "request_timeout_s=600") as server:
        first = server.wait_until_ready()
        processes = server.own.processes()
        assert server.engine in processes
        samples, texts = asyncio.run(load(server.site.url, asked, server.process.pid))
        assert server.process.wait(PATIENCE_S) == -signal.SIGKILL
        until(lambda: not any(alive(each) for each in processes))
    lost = [sample for sample in samples if sample.lost]
    assert ANSWERED <= len(texts) < ASKED and len(samples) == ASKED + 1
    assert {sample.number for sample in lost} == set(range(ASKED + 1)) - set(texts)
    assert {sample.error for sample in lost} == {ErrorKind.disconnected} and samples[-1].detail.startswith("cannot")
    for number, text in texts.items():
        answer = alone(here, asked[number], ignore_eos=True)
        assert text == answer.text and samples[number].tokens == len(answer.tokens) == LENGTH
    with program(folder, tmp_path, port=server.site.port) as again:
        assert again.wait_until_ready() < max(SOON_S, 2 * first)
        assert again.site == server.site and again.site.load() == (0, 0)
        same(again.site.ask(asked[0], early_exit={**FULL.early_exit, "layers": True}), alone(here, asked[0]))


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
