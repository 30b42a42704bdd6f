"""Texts that are odd or large, through HTTP to a tokenizer of whole words and letters, and back."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from calm import save
from calm.data.tokenizer import train_tokenizer
from calm.models.settings import EarlyExitSettings
from calm.models.t5 import EarlyExitT5
from serve.engine import Engine
from serve.options import EngineOptions
from tests.scripted import random_t5

from ..http.running import PATIENCE_S, read_all
from .serving import Joined, alone, body_of, connect, held, same, until

TEXTS = ["the quick brown fox", "a small http server", "parses dates and times", "graph drawing tool"] * 20
SENTINEL = "<extra_id_0>"
OPTIONS = EngineOptions(max_batch=2)
CONTROL = {0, 1, 60}  # pad, eos and the sentinel
LARGE = "the fox " * 125_000
MOST_BYTES, MOST_BODY = 2**20, 2**22  # of a prompt, of a body
SOURCE, TARGET = 64, 200


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose tokenizer has the control tokens of a published T5."""
    tokenizer = train_tokenizer(TEXTS, 80)
    tokenizer.add_special_tokens({"extra_special_tokens": [SENTINEL]})
    settings = EarlyExitSettings([1, 2, 3], max_source_tokens=SOURCE, max_target_tokens=TARGET)
    assert set(tokenizer.all_special_ids) == {*CONTROL, 2}
    model = EarlyExitT5(random_t5(vocabulary=len(tokenizer)), tokenizer, settings).eval()
    return save(model, tmp_path_factory.mktemp("words") / "model")


@pytest.fixture(scope="module")
def reader(words: Path) -> Engine:
    return Engine(words, OPTIONS)


@pytest.fixture(scope="module")
def server(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    limits = {"max_prompt_bytes": MOST_BYTES, "max_body_bytes": MOST_BODY}
    with held(words, OPTIONS, tmp_path_factory.mktemp("prompts"), **limits) as made:
        yield made


@pytest.mark.parametrize(
    "text",
    ["the\x00quick\x07 fox", "\x00", "\x1b[2J\x7f\x85", "tool\r\n\t\x0b\x0c\u2028tool", "e\u0301\u200d\U0001f9ea"],
)
def test_control_and_odd_characters_are_answered(text: str, server: Joined, reader: Engine) -> None:
    """Fault 26."""
    found = server.site.ask(text, max_tokens=12)
    same(found, alone(reader, text, max_tokens=12))
    assert found.body["usage"]["prompt_tokens"] == len(reader.model.to_ids(text))


@pytest.mark.parametrize("token", ["</s>", "<pad>", SENTINEL])
def test_spelt_control_tokens_are_text(token: str, server: Joined, reader: Engine) -> None:
    """Fault 26: as many tokens of the prompt as it takes to spell them, and never the one that they name."""
    text = f"the {token} fox"
    ids, around = reader.model.to_ids(text), reader.model.to_ids("the fox")
    assert not CONTROL & set(ids[:-1]) and len(ids) >= len(around) + 3
    found = server.site.ask(text, max_tokens=12)
    same(found, alone(reader, text, max_tokens=12))
    assert found.body["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("spelt", [rb"\ud800", rb"\udfff fox", rb"\udc00\ud800"])
def test_half_a_character_is_refused(spelt: bytes, server: Joined, reader: Engine) -> None:
    """Fault 26; the two halves of one are that character."""
    found = server.site.send(body_of("the PLACE").replace(b"PLACE", spelt))
    assert found.status == 400 and "surrogate" in found.error["message"]
    whole = server.site.send(body_of("the PLACE", max_tokens=12).replace(b"PLACE", rb"\ud83e\uddea"))
    same(whole, alone(reader, "the \U0001f9ea", max_tokens=12))


class Bystander(threading.Thread):
    """Streams one answer after another until it is told to stop, and keeps when each piece came."""

    def __init__(self, made: Joined) -> None:
        super().__init__()
        self.times: list[float] = []
        self.wrong: list[bytes] = []
        self._made, self._over = made, threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            with connect(self._made.site, body_of("the quick", stream=True, max_tokens=60)) as connection:
                found = b""
                while piece := connection.recv(65536):
                    self.times.append(time.monotonic())
                    found += piece
            if not found.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in found:
                self.wrong.append(found)

    def went_on(self, pieces: int) -> bool:
        return len(self.times) > pieces

    def end(self) -> None:
        self._over.set()
        self.join(PATIENCE_S)


@pytest.fixture(scope="module")
def cost(reader: Engine) -> float:
    """Seconds that a megabyte takes to become ids, on this machine as busy as it is: eight times an eighth's."""
    began = time.monotonic()
    reader.model.to_ids(LARGE[: len(LARGE) // 8])
    return 8 * (time.monotonic() - began)


def test_a_prompt_of_too_many_bytes_is_refused_before_it_is_read(server: Joined, cost: float) -> None:
    """Fault 27: in less time than its tokens would take, and nobody's stream stands still for so long."""
    site, spent = server.site, []
    bystander = Bystander(server)
    bystander.start()
    try:
        until(lambda: bystander.times)
        for _ in range(8):
            began, pieces = time.monotonic(), len(bystander.times)
            found = site.ask(LARGE + "x" * (MOST_BYTES + 1 - len(LARGE)))
            spent.append(time.monotonic() - began)
            assert (found.status, found.error["code"]) == (400, "prompt_too_long")
            assert str(MOST_BYTES) in found.error["message"] and str(MOST_BYTES + 1) in found.error["message"]
            until(partial(bystander.went_on, pieces))
        assert site.ask("x" * MOST_BODY).status == 413
    finally:
        bystander.end()
    assert min(spent) < cost, (spent, cost)
    gaps = [after - before for before, after in zip(bystander.times, bystander.times[1:], strict=False)]
    assert max(gaps) < cost and not bystander.wrong


@pytest.mark.parametrize("truncate", [False, True])
def test_a_megabyte_becomes_ids_beside_a_stream_that_overtakes_it(
    truncate: bool, server: Joined, reader: Engine
) -> None:
    """Fault 27: where so many bytes are allowed, a stream ends while the text is still read."""
    site, gate = server.site, server.gate
    gate.hold(2)
    with ThreadPoolExecutor(1) as pool:
        try:
            stream = connect(site, body_of("the quick", stream=True, max_tokens=60))
            assert stream.recv(12) == b"HTTP/1.1 200"
            large = pool.submit(site.ask, LARGE, truncate=truncate, max_tokens=12)
            until(lambda: site.load() == (1, 1))
        finally:
            gate.open()
        told = read_all(stream)
        assert not large.done() and told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        stream.close()
    found = large.result()
    if truncate:
        same(found, alone(reader, LARGE[: 8 * SOURCE], max_tokens=12))
        assert found.body["usage"]["prompt_tokens"] == SOURCE
    else:
        assert found.status == 400 and found.error["param"] == "prompt"
        assert re.search(rf"\b\d{{6}} tokens, the model takes {SOURCE}\b", found.error["message"])
