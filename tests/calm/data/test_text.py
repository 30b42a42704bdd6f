import unicodedata
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from calm.config import DataConfig, Truncate
from calm.data.text import (
    REPLACEMENT,
    clean_text,
    decode_ids,
    encode_source,
    encode_target,
    text_ids,
    truncate_ids,
)
from calm.errors import DataError

from .conftest import TEXTS

CONTROL_TEXTS = [
    "a </s> b", "<pad>x", "the <extra_id_0> food", "is<unk>", "</s>", "<pad></s><unk>", "<</s>pad>", "\uff1c/s\uff1e",
]  # fmt: skip


def settings_of(length: int, truncate: str = "head", prefix: str = "") -> SimpleNamespace:
    return SimpleNamespace(max_source_tokens=length, source_prefix=prefix, truncate=truncate)


@pytest.mark.parametrize("text", CONTROL_TEXTS)
@pytest.mark.parametrize("kind", ["scratch", "published"])
def test_control_tokens_in_text_stay_text(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: PreTrainedTokenizerBase = request.getfixturevalue(kind)
    control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    ids = text_ids(tokenizer, text)
    assert not control.intersection(ids)
    if kind == "scratch" and text.isascii():
        assert tokenizer.unk_token_id not in ids
        assert decode_ids(tokenizer, ids) == text
    assert encode_source(tokenizer, text, settings_of(64)) == [*ids, 1]
    assert encode_target(tokenizer, text, 64) == [*ids, 1]


def test_the_published_tokenizer_alone_would_read_control_tokens(published: PreTrainedTokenizerBase) -> None:
    assert published("a </s> b").input_ids.count(1) == 2
    assert published("a </s> b", split_special_tokens=True).input_ids.count(1) == 2


@pytest.mark.parametrize("kind", ["scratch", "published"])
def test_by_hand_and_ordinary_path_agree_where_no_control_token_is_spelt(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: PreTrainedTokenizerBase = request.getfixturevalue(kind)
    text = "the food is \u4e2d\u6587 {very} \u4e2d cheap"  # unknown characters alone take the path by hand
    assert tokenizer.unk_token_id in text_ids(tokenizer, text)
    assert text_ids(tokenizer, text) == tokenizer(text, add_special_tokens=False).input_ids


@given(st.text(alphabet=st.characters(max_codepoint=0x7F, exclude_characters="\x7f"), max_size=60))
@settings(max_examples=150, deadline=None)
def test_every_ascii_text_survives_the_round_trip(scratch: PreTrainedTokenizerBase, text: str) -> None:
    assert decode_ids(scratch, text_ids(scratch, text)) == clean_text(text)


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_unknown_characters_are_shown_and_forms_are_one(scratch: PreTrainedTokenizerBase, text: str) -> None:
    ids = text_ids(scratch, text)
    assert ids == text_ids(scratch, unicodedata.normalize("NFD", text)) == text_ids(scratch, clean_text(text))
    back = decode_ids(scratch, ids)
    cleaned = clean_text(text)
    assert len(back) == len(cleaned)
    assert all(b in (a, REPLACEMENT) for a, b in zip(cleaned, back, strict=True))


def test_decode_equals_the_tokenizers_own(published: PreTrainedTokenizerBase) -> None:
    for text in TEXTS[:40]:
        ids = text_ids(published, text)
        assert decode_ids(published, [0, *ids, 1, 0, 0]) == published.decode(ids, skip_special_tokens=True) == text


def test_ids_without_text(scratch: PreTrainedTokenizerBase) -> None:
    food = text_ids(scratch, "food")
    assert decode_ids(scratch, [-100, *food, -100, 1, 0]) == "food"
    assert decode_ids(scratch, [*food, len(scratch), 10**15]) == "food" + 2 * REPLACEMENT
    assert decode_ids(scratch, []) == ""
    with pytest.raises(DataError, match=r"token id -7: ids are 0\.\.399, or -100"):
        decode_ids(scratch, [-7])


@pytest.mark.parametrize("kind", ["scratch", "published"])
def test_lone_surrogate_is_one_clear_error(kind: str, request: pytest.FixtureRequest) -> None:
    with pytest.raises(DataError, match=r"lone surrogate U\+D800 at character 2"):
        text_ids(request.getfixturevalue(kind), "ab\ud800")


def test_clean_text() -> None:
    assert clean_text("  a\r\n\tb\u00a0c\x00d\u0085e\x1c ") == "a b c d e"
    assert clean_text("cafe\u0301") == "caf\u00e9"
    assert clean_text(" \x00\n") == ""


def test_truncation_keeps_head_or_head_and_tail() -> None:
    ids = list(range(100))
    assert truncate_ids(ids, 9, "head") == list(range(9))
    assert truncate_ids(ids, 9, "head_tail") == [0, 1, 2, 3, 4, 5, 97, 98, 99]
    assert truncate_ids(ids, 1, "head_tail") == [0]
    assert truncate_ids(ids, 2, "head_tail") == [0, 1]
    assert truncate_ids(ids, 100, "head_tail") == ids
    with pytest.raises(DataError, match="head or head_tail"):
        truncate_ids(ids, 9, "tail")


def test_eos_is_last_and_the_prefix_stays(scratch: PreTrainedTokenizerBase) -> None:
    prefix = text_ids(scratch, "describe:")
    text = " ".join(TEXTS[:4])
    for how in Truncate:
        config = DataConfig(name="jsonl", max_source_tokens=32, truncate=how, source_prefix="describe: ")
        ids = encode_source(scratch, text, config)
        assert len(ids) == 32 and ids[-1] == 1 and ids.count(1) == 1
        assert ids[: len(prefix)] == prefix
    assert ids[-11:-1] == text_ids(scratch, text)[-10:]
    assert encode_source(scratch, "", settings_of(8)) == [1]
    target = encode_target(scratch, text, 12)
    assert len(target) == 12 and target[-1] == 1
    assert encode_target(scratch, text, 1) == [1]
