"""T5 v1.1 shapes with random weights, to time engines where no trained model is at hand.

A seed and a shape give the same weights in every process, as a model to be served (``served_shape``) and as a plain
Hugging Face folder for the engines of others (``write_folder``). Nothing is learnt: depths come from traces
(calm.traces). Control words have a head of zeros, so their logits are 0 and the best of thousands of other words is
above: no answer ends before its length, under any engine.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from calm.config import ShapeConfig
from calm.engine_config import SERVED_SHAPES
from calm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from calm.models.t5 import EarlyExitT5
    from serve.model import ServedModel

SMALL = ShapeConfig(
    vocab_size=32128, d_model=512, d_kv=64, num_heads=6, d_ff=1024, num_layers=8, num_decoder_layers=8, tied=False
)
SHAPES = {
    "tiny": replace(SMALL, vocab_size=200, d_model=32, d_kv=16, num_heads=2, d_ff=64),
    "small": SMALL,
    "base": replace(SMALL, d_model=768, num_heads=12, d_ff=2048, num_layers=12, num_decoder_layers=12),
}
PAPER_NAMES = {"small": "t5-v1_1-small", "base": "t5-v1_1-base"}
WORDS = ("<pad>", "</s>", "<unk>")  # T5's control ids 0, 1, 2
MAX_SOURCE, MAX_TARGET = 512, 128


def shape_of(name: str) -> ShapeConfig:
    """Raise ConfigError for a name that is none."""
    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is none; choose from {', '.join(SERVED_SHAPES)}")
    return SHAPES[name]


def word_tokenizer(size: int) -> "PreTrainedTokenizerBase":
    """Reads ``"w5 w6"`` as the ids 5, 6, which is how the folder's texts are written."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    pad, eos, unknown = WORDS
    words = {**{word: i for i, word in enumerate(WORDS)}, **{f"w{i}": i for i in range(len(WORDS), size)}}
    backend = Tokenizer(WordLevel(words, unk_token=unknown))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, eos_token=eos, unk_token=unknown)


def random_model(shape: str, max_source: int, max_target: int, seed: int = 0) -> "EarlyExitT5":
    """A model in fp32 and eval mode, with an exit after every layer and an exit classifier. Other draws go on as if
    nothing had been drawn here.

    Raises ConfigError for a shape that is none.
    """
    from calm.models.build import t5_from_scratch
    from calm.models.settings import EarlyExitSettings

    config = shape_of(shape)
    settings = EarlyExitSettings(
        exit_layers=list(range(1, config.num_decoder_layers)),
        max_source_tokens=max_source,
        max_target_tokens=max_target,
        has_classifier=True,
        model=PAPER_NAMES.get(shape, shape),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = t5_from_scratch(config, word_tokenizer(config.vocab_size), settings)
        with torch.no_grad():
            model.hf.lm_head.weight[: len(WORDS)] = 0.0
            torch.nn.init.normal_(model.classifier.linear.weight, std=0.1 * config.d_model**-0.5)
    return model.eval().requires_grad_(False)


@cache
def served_shape(
    shape: str,
    dtype: torch.dtype,
    max_source: int = MAX_SOURCE,
    max_target: int = MAX_TARGET,
    seed: int = 0,
    device: str = "cpu",
) -> "ServedModel":
    """The model as an engine takes it; its encoder is transformers' T5 encoder, as that of a trained folder is.

    Raises ConfigError for a shape that is none.
    """
    from serve.model import served

    model = random_model(shape, max_source, max_target, seed).to(device, dtype)
    model.classifier.float()
    return served(model)


def write_folder(
    shape: str,
    folder: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_source: int = MAX_SOURCE,
    max_target: int = MAX_TARGET,
) -> Path:
    """The same weights as a model folder: config.json, model.safetensors, tokenizer.json and our sidecars.

    Raises:
        ConfigError: a shape that is none.
        CheckpointError: the disk refuses.
    """
    from calm.models.folder import save

    return save(random_model(shape, max_source, max_target, seed), folder, dtype)


def random_sources(vocabulary: int, rows: int, tokens: int, seed: int = 0, end: int = 1) -> list[list[int]]:
    """Ids of ``rows`` sources of ``tokens`` each, ``end`` last."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(WORDS), vocabulary, (rows, tokens), generator=generator)
    drawn[:, -1] = end
    return [[int(token) for token in row] for row in drawn]
