"""Tokenizers that several tests share: one from scratch, one in the form of a published T5 (spiece.model)."""

import io
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerBase, T5Config

from calm.data import restaurants
from calm.data.tokenizer import train_tokenizer

TEXTS = [text for row in restaurants.rows(400) for text in (row.source, row.target)]


@pytest.fixture(scope="session")
def scratch() -> PreTrainedTokenizerBase:
    return train_tokenizer(TEXTS, 400)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder: Path = tmp_path_factory.mktemp("published")
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=buffer, vocab_size=200, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2, character_coverage=1.0,
    )  # fmt: skip
    (folder / "spiece.model").write_bytes(buffer.getvalue())
    T5Config().save_pretrained(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer
