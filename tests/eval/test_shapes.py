"""Random shapes: the same weights as a model to be served and as a folder, and nothing that is not finite."""

from pathlib import Path

import pytest
import torch

import calm
from calm.config import BatchRule, Measure, TraceKind
from calm.engine_config import SERVED_SHAPES
from calm.errors import ConfigError
from calm.traces import draw
from eval.shapes import SHAPES, random_model, random_sources, served_shape, shape_of, write_folder
from serve.engine import Engine
from serve.requests import Status

TOKENS = 12
SOURCES = random_sources(200, rows=5, tokens=9, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("tiny", tmp_path_factory.mktemp("shapes") / "tiny", seed=4, max_source=16, max_target=TOKENS)


def answers(dtype: torch.dtype = torch.float32, **options: object) -> list[tuple[int, ...]]:
    engine = Engine(served_shape("tiny", dtype, 16, TOKENS, seed=4), max_batch=4, **options)
    found = engine.generate(SOURCES, ignore_eos=True)
    assert {answer.status for answer in found} == {Status.finished}
    return [answer.tokens for answer in found]


def test_our_engine_and_hugging_faces_generate_say_the_same_from_the_folder(folder: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True)
    out = model.generate(torch.tensor(SOURCES), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    theirs = [tuple(row) for row in out[:, 1:].tolist()]
    assert answers() == theirs
    assert len({token for row in theirs for token in row}) > 8  # not one word over and over
    assert not {token for row in theirs for token in row} & {0, 1, 2}


def test_the_folder_opens_as_ours_with_the_same_weights(folder: Path) -> None:
    loaded, built = calm.load(folder), random_model("tiny", 16, TOKENS, seed=4)
    state = built.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.settings.exit_layers == list(range(1, 8)) and loaded.settings.has_classifier
    assert loaded.tokenizer("w7 w9").input_ids[:2] == [7, 9]
    assert not torch.equal(random_model("tiny", 16, TOKENS, seed=5).head_weight, built.head_weight)


def test_building_leaves_other_draws_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    random_model("tiny", 8, 4)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_measure_replays_a_trace_and_stays_finite(dtype: torch.dtype) -> None:
    served = served_shape("tiny", dtype, 16, TOKENS, seed=4)
    assert served.dtype is dtype and served.exit_layers == tuple(range(1, 8))
    engine = Engine(served, rule=BatchRule.compact, max_batch=4, record_confidences=True)
    traces = draw(TraceKind.wide, 8, 3.5, len(SOURCES), TOKENS, 0)
    names = [f"r{i}" for i in range(len(SOURCES))]
    for measure in (Measure.softmax, Measure.state, Measure.classifier):
        found = engine.generate(SOURCES, names=names, policy=traces.replay(names, measure), ignore_eos=True)
        assert [answer.emission_layers for answer in found] == list(traces.depths)
        seen = [value for answer in found for step in answer.confidences for value in step if value == value]
        assert seen and all(0.0 <= value <= 1.0 for value in seen)


def test_shapes_are_t5_v1_1s() -> None:
    assert tuple(SHAPES) == SERVED_SHAPES
    sizes = {
        name: (shape.d_model, shape.d_ff, shape.num_heads, shape.num_decoder_layers) for name, shape in SHAPES.items()
    }
    assert sizes["small"] == (512, 1024, 6, 8) and sizes["base"] == (768, 2048, 12, 12)
    assert {shape.vocab_size for name, shape in SHAPES.items() if name != "tiny"} == {32128}
    with pytest.raises(ConfigError, match="'huge' is none; choose from tiny, small, base"):
        shape_of("huge")


def test_sources_end_and_hold_no_other_control_word() -> None:
    assert SOURCES == random_sources(200, 5, 9, seed=3) != random_sources(200, 5, 9, seed=4)
    assert all(row[-1] == 1 and min(row[:-1]) >= 3 and len(row) == 9 for row in SOURCES)
