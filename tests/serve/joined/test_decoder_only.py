"""A folder of a decoder-only model is served like any other, from a cache that is too small for all its clients."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from calm import save
from calm.config import Measure, Preempt
from serve.engine import Engine
from serve.options import EngineOptions
from tests.causal import early_llama, random_llama

from ..test_certified import artifact
from .conftest import MEASURES
from .serving import VOCABULARY, Joined, held, questions, same, until

BLOCKS = 9 * 4  # of the four layers
OPTIONS = EngineOptions(
    max_batch=6, max_waiting=200, block_size=4, cache_blocks=BLOCKS, preempt=Preempt.replay, poison=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = early_llama(random_llama(vocabulary=VOCABULARY), length=24)
    made = save(model, tmp_path_factory.mktemp("llama") / "model")
    for measure in MEASURES:
        artifact(measure, picked=measure is Measure.softmax).save(made / "calibration")
    return made


@pytest.fixture(scope="module")
def here(folder: Path) -> Engine:
    """The same model in this process, with room for all."""
    return Engine(folder, max_batch=6)


@pytest.fixture(scope="module")
def llama(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    with held(folder, OPTIONS, tmp_path_factory.mktemp("served")) as made:
        yield made


def test_clients_get_what_they_get_alone(llama: Joined, here: Engine) -> None:
    asked = questions(here, 16, seed=5)
    llama.gate.hold()
    with ThreadPoolExecutor(len(asked)) as pool:
        coming = [pool.submit(llama.site.send, each.body) for each in asked]
        until(lambda: sum(llama.site.load()) == len(asked))
        llama.gate.open()
        for future, each in zip(coming, asked, strict=True):
            same(future.result(), each.answer)
    found = llama.site.metrics()
    assert found["calm_preemptions_total"] >= 1
    assert (found["calm_kv_blocks_used"], found["calm_kv_blocks_free"]) == (0, BLOCKS)


def test_what_the_cache_can_never_hold_is_refused(llama: Joined) -> None:
    prompt = [3] * 16
    assert llama.site.ask(prompt, max_tokens=21, ignore_eos=True).status == 200
    refused = llama.site.ask(prompt)
    assert refused.status == 400
    assert (
        "need 40 blocks of 4 positions of a layer, and the cache has 36; lower max_tokens" in refused.error["message"]
    )
