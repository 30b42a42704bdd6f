"""Rows of every depth in one batch: full depth is Hugging Face's own answer, and each other its own."""

from pathlib import Path

import pytest
import torch
from transformers import T5ForConditionalGeneration

from serve.engine import Engine

from .conftest import LENGTH, WIDE
from .serving import FULL, LAYERS, WAYS, Joined, alone, body_of, prompts, same, together


@pytest.fixture(scope="module")
def plain(folder: Path) -> T5ForConditionalGeneration:
    """The folder as transformers opens it, which knows nothing of early exit."""
    return T5ForConditionalGeneration.from_pretrained(folder).eval()


def greedy(plain: T5ForConditionalGeneration, ids: list[int]) -> list[int]:
    out = plain.generate(
        torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False, num_beams=1, use_cache=False
    )  # fmt: skip
    return [int(token) for token in out[0, 1:]]


def test_full_depth_is_hugging_faces_answer_and_other_depths_are_those_of_rows_alone(
    wide: Joined, here: Engine, plain: T5ForConditionalGeneration
) -> None:
    """Fault 37: eight rows of five ways begin together, and twelve more take the slots that become free.

    What is free is filled with NaN, so a row that read what the one before had left there would not be answered.
    """
    asked = [(prompt, WAYS[number % len(WAYS)]) for number, prompt in enumerate(prompts(20, seed=31))]
    bodies = [body_of(prompt, early_exit={**way.early_exit, **LAYERS}) for prompt, way in asked]
    found = together(wide, bodies, WIDE.max_batch)
    layers, early, changed = here.model.spec.num_layers, 0, 0
    for (prompt, way), answered in zip(asked, found, strict=True):
        same(answered, alone(here, prompt, **way.options))
        (choice,) = answered.body["choices"]
        if way is FULL:
            best = greedy(plain, here.model.to_ids(prompt))
            assert choice["text"] == here.model.to_text(best)
            assert choice["early_exit"]["exit_layers"] == [layers] * len(best)
        else:
            early += min(choice["early_exit"]["exit_layers"]) < layers
            changed += choice["text"] != alone(here, prompt).text
    assert early >= 8 and changed >= 4  # or the depths would have decided nothing


def test_a_threshold_of_one_is_full_depth(wide: Joined, here: Engine, plain: T5ForConditionalGeneration) -> None:
    """Fault 37: beside rows that leave at every layer."""
    off = {"threshold": 1.0, "measure": "softmax", **LAYERS}
    asked = prompts(4, seed=32)
    mates = [
        body_of(prompt, early_exit={**way.early_exit, **LAYERS}) for prompt, way in zip(asked, WAYS[1:], strict=True)
    ]
    found = together(wide, [*mates, *(body_of(prompt, early_exit=off) for prompt in asked)], WIDE.max_batch)
    for prompt, answered in zip(asked, found[len(mates) :], strict=True):
        best = greedy(plain, here.model.to_ids(prompt))
        (choice,) = answered.body["choices"]
        assert choice["text"] == here.model.to_text(best)
        assert choice["early_exit"]["exit_layers"] == [here.model.spec.num_layers] * len(best)
        assert choice["early_exit"]["certified"]
