import json
import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer, T5Config

from calm.config import DataConfig
from calm.data import load_corpus, token_audit, training_texts
from calm.data.text import decode_ids, text_ids
from calm.data.tokenizer import train_tokenizer
from calm.errors import DataError

from .conftest import TEXTS


def test_layout_and_determinism() -> None:
    one, two = train_tokenizer(TEXTS, 400), train_tokenizer(iter(TEXTS), 400)
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()
    assert (one.pad_token_id, one.eos_token_id, one.unk_token_id) == (0, 1, 2)
    assert len(one) == 400
    assert one("food").input_ids[-1] == 1


def test_saved_tokenizer_opens_with_the_auto_class(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([*TEXTS, "caf\u00e9 " * 60], 400)
    tokenizer.save_pretrained(tmp_path)
    T5Config().save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS[:20], "cafe\u0301 {x} </s>", "  two  blanks\n"]:
        assert text_ids(again, text) == text_ids(tokenizer, text)
        assert again(text).input_ids == tokenizer(text).input_ids
    assert again.decode(again(TEXTS[0]).input_ids, skip_special_tokens=True) == TEXTS[0]


def test_common_characters_survive_and_rare_ones_are_unknown() -> None:
    texts = ["\u4e2d\u6587 caf\u00e9 \U0001f642"] * 50 + ["\u8c61"] * 3 + TEXTS
    tokenizer = train_tokenizer(texts, 400)
    text = "use {x} for <T> now: caf\u00e9 \U0001f642\u4e2d!"
    assert decode_ids(tokenizer, text_ids(tokenizer, text)) == text
    assert decode_ids(tokenizer, text_ids(tokenizer, "a \u2581\u2592 b")) == "a \ufffd\ufffd b"


def test_uncased() -> None:
    tokenizer = train_tokenizer(TEXTS, 400, lowercase=True)
    assert text_ids(tokenizer, "The FOX") == text_ids(tokenizer, "the fox")
    assert decode_ids(tokenizer, text_ids(tokenizer, "\u0130stanbul THE")) == "i\ufffdstanbul the"


def test_refusals() -> None:
    with pytest.raises(DataError, match="empty"):
        train_tokenizer(["", " \n"], 400)
    many = ["".join(chr(0x4E00 + i) for i in range(500))] * 50
    with pytest.raises(DataError, match=r"500|501.*set model\.shape\.vocab_size to 520 or more"):
        train_tokenizer(many, 400)
    assert len(train_tokenizer(many, 520)) <= 520


def test_small_vocabulary_without_room_for_ascii() -> None:
    tokenizer = train_tokenizer(["abc abd " * 60], 40)
    assert len(tokenizer) <= 40
    assert decode_ids(tokenizer, text_ids(tokenizer, "abd abc")) == "abd abc"


def test_unknown_share_is_counted_per_split_and_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"source": f"use {{x}} for <T{i}> now \U0001f642 caf\u00e9", "target": f"cafe\u0301 {i}"} for i in range(200)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    config = DataConfig(name="jsonl", path=str(path))
    test_source = load_corpus(config).splits["test"][0].source
    for row in rows:
        if row["source"] == test_source:
            row["target"] = "\u4e2d\u6587"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    corpus = load_corpus(config)
    tokenizer = train_tokenizer(training_texts(corpus), 400)
    for row in corpus.splits["train"] + corpus.splits["dev"]:
        assert decode_ids(tokenizer, text_ids(tokenizer, row.source)) == row.source
        assert decode_ids(tokenizer, text_ids(tokenizer, row.target)) == row.target
    with caplog.at_level(logging.WARNING):
        told = token_audit(corpus.splits, tokenizer, config)
    assert {name: told[name]["unk_rows"] for name in told} == {"train": 0, "dev": 0, "calibration": 0, "test": 1}
    assert told["test"]["unk_share"] > 0 and set(told["test"]["unk_characters"]) == {"\u4e2d", "\u6587"}
    assert len(caplog.records) == 1 and caplog.records[0].getMessage().startswith("test: ")
    assert "in 1 of" in caplog.records[0].getMessage()
