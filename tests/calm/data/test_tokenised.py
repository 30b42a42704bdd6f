"""Ids made before are those that would be made now, and only for texts that are there."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tokenizers.normalizers import Lowercase
from transformers import PreTrainedTokenizerBase

from calm.checkpoint import save_tensors
from calm.config import DataConfig
from calm.data import tokenised
from calm.data.text import KNOWN, encode_source, encode_target
from calm.data.tokenizer import train_tokenizer
from calm.errors import CheckpointError, ConfigError

TEXTS = ["a tiny kettle sings", "ein Öl &c.", "", "spelt </s> tokens </s>", "a tiny kettle sings", "longer " * 40]


def test_ids_are_the_same_with_and_without_the_file(tmp_path: Path, scratch: PreTrainedTokenizerBase) -> None:
    file, settings = tmp_path / "tokens.safetensors", DataConfig("x", max_source_tokens=20)
    plain, knows = scratch, deepcopy(scratch)
    assert tokenised.write(file, plain, TEXTS) == 5  # each text once
    known = tokenised.use(file, knows)
    assert len(known) == 5 and known.get("another") is None
    for text in (*TEXTS, "another kettle"):
        assert encode_source(knows, text, settings) == encode_source(plain, text, settings)
        assert encode_target(knows, text, 7) == encode_target(plain, text, 7)


def test_they_are_taken_from_the_file(tmp_path: Path, scratch: PreTrainedTokenizerBase) -> None:
    file, knows = tmp_path / "tokens.safetensors", deepcopy(scratch)
    tokenised.write(file, knows, TEXTS)
    known = tokenised.use(file, knows)
    known._ids = torch.full_like(known._ids, 7)
    assert encode_target(knows, TEXTS[0], 99) == [7] * (len(encode_target(scratch, TEXTS[0], 99)) - 1) + [1]
    assert getattr(knows, KNOWN) is known


def test_another_tokenizer_and_another_file_are_refused(tmp_path: Path, scratch: PreTrainedTokenizerBase) -> None:
    file = tmp_path / "tokens.safetensors"
    tokenised.write(file, scratch, TEXTS)
    other = deepcopy(scratch)
    other.backend_tokenizer.normalizer = Lowercase()  # the same words
    for tokenizer in (train_tokenizer(TEXTS * 9, 150), other):
        with pytest.raises(ConfigError, match="another tokenizer than the model's"):
            tokenised.use(file, tokenizer)
    save_tensors(file, {"keys": torch.zeros(1)})
    with pytest.raises(ConfigError, match="holds no token ids of texts"):
        tokenised.use(file, scratch)
    with pytest.raises(CheckpointError, match="is missing"):
        tokenised.use(tmp_path / "none", scratch)
