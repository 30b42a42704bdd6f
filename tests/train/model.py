"""A tiny early-exit T5 with a byte-pair tokenizer of its own, built once."""

import copy
from functools import cache

import torch

from calm.config import ShapeConfig
from calm.data.tokenizer import train_tokenizer
from calm.models.build import t5_from_scratch
from calm.models.settings import EarlyExitSettings, default_exit_layers
from calm.models.t5 import EarlyExitT5


@cache
def _model(dropout: float) -> EarlyExitT5:
    tokenizer = train_tokenizer(["a b c d e ab bc cd de abc bcd"] * 60, 60)
    shape = ShapeConfig(
        vocab_size=60,
        d_model=16,
        d_kv=8,
        num_heads=2,
        d_ff=32,
        num_layers=1,
        num_decoder_layers=3,
        dropout_rate=dropout,
    )
    settings = EarlyExitSettings(default_exit_layers(3), max_source_tokens=16, max_target_tokens=8)
    torch.manual_seed(0)
    return t5_from_scratch(shape, tokenizer, settings)


def tiny_model(dropout: float = 0.0) -> EarlyExitT5:
    """A copy: tests train it in place."""
    return copy.deepcopy(_model(dropout))
