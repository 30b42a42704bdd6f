"""A Llama from scratch: what its shape must be, where its loss starts, and that its folder is a plain one."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import calm
from calm.config import Architecture, ShapeConfig
from calm.data.tokenizer import train_tokenizer
from calm.decode import OneDecoder
from calm.decode_batch import BatchDecoder
from calm.errors import ConfigError
from calm.models.build import build_from_scratch
from calm.models.llama import EarlyExitLlama
from calm.models.settings import EarlyExitSettings, default_exit_layers
from calm.policies import Full
from calm.records import Example

WORDS = ["a b c d e ab bc cd de abc bcd"] * 60


def shape(**changes: Any) -> ShapeConfig:
    own = dict(vocab_size=60, d_model=64, d_kv=16, num_heads=4, num_kv_heads=2, d_ff=128, num_layers=0)
    return ShapeConfig(architecture=Architecture.llama, **{**own, **changes})


def model_of(asked: ShapeConfig) -> EarlyExitLlama:
    settings = EarlyExitSettings(default_exit_layers(8), max_source_tokens=16, max_target_tokens=8)
    torch.manual_seed(0)
    model = build_from_scratch(asked, train_tokenizer(WORDS, 60), settings)
    assert isinstance(model, EarlyExitLlama)
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
def test_its_loss_starts_near_ln_v(tied: bool) -> None:
    model = model_of(shape(tied=tied))
    assert model.tied is tied and model.num_layers == 8 and model.dtype is torch.float32
    vocabulary = model.vocab_size
    ids = torch.randint(3, vocabulary, (32, 12))
    with torch.inference_mode():
        hiddens = model.answer_hiddens(
            ids, torch.ones_like(ids, dtype=torch.bool), torch.randint(3, vocabulary, (32, 8))
        )
        for hidden in hiddens:
            loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), torch.randint(3, vocabulary, (32 * 8,)))
            assert abs(float(loss) - math.log(vocabulary)) < 0.8
        assert 0.5 < float(model.logits(hiddens[-1]).std()) < 2.0


def test_its_prompts_end_where_the_answer_begins() -> None:
    model = model_of(shape())
    assert model.settings.source_start == [] and model.settings.source_end == [model.eos_token_id] == [1]


def test_its_folder_is_a_plain_one_and_gives_it_back(tmp_path: Path) -> None:
    model = model_of(shape())
    again = calm.load(calm.save(model, tmp_path / "model"))
    assert isinstance(again, EarlyExitLlama) and again.settings == model.settings
    assert (again.hf.config.num_key_value_heads, again.hf.config.head_dim) == (2, 16)
    rows = [Example(str(i), str(i), text, "") for i, text in enumerate(["a b", "c", "de abc bcd a"])]
    answers = [trace.tokens for trace in OneDecoder(model)(rows, Full())]
    assert [trace.tokens for trace in BatchDecoder(again)(rows, Full())] == answers
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for row, answer in zip(rows, answers, strict=True):
        prompt = torch.tensor([again.tokenizer(row.source)["input_ids"]])  # its own tokenizer puts the EOS behind
        said = plain.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        assert tuple(said.tolist()) == answer


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_layers": 1}, "num_layers=1 counts encoder layers, and a llama has none"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"num_kv_heads": 8}, r"num_kv_heads must lie in \[1, 4\], got 8"),
        ({"d_kv": 15}, "d_kv=15: a llama turns halves of a head"),
        ({"num_decoder_layers": 0}, "num_decoder_layers must lie in"),
        ({"architecture": Architecture.t5}, r"num_layers must lie in \[1, inf\], got 0"),
        ({"architecture": Architecture.t5, "num_layers": 1}, "num_kv_heads: a T5 has one head of K and V"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    own = dict(d_kv=16, num_heads=4, num_kv_heads=2, num_layers=0, architecture=Architecture.llama)
    with pytest.raises(ConfigError, match=why):
        ShapeConfig(**{**own, **changes})  # type: ignore[arg-type]
