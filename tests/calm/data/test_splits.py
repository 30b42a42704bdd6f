from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm.config import DataConfig, SplitConfig
from calm.data import SPLITS, Corpus, load_corpus
from calm.data.splits import (
    check_overlap,
    content_hash,
    drop_shared,
    one_per_family,
    published_split_of,
    sample,
    split_of,
)
from calm.errors import ConfigError, DataError
from calm.records import Example

SPLIT = SplitConfig()


def rows(*families: str, source: str = "") -> list[Example]:
    return [Example(f"id{i}", family, source or f"text {family} {i}", "t") for i, family in enumerate(families)]


def test_shares_are_as_configured_and_a_family_never_moves() -> None:
    names = [f"family-{i}" for i in range(4000)]
    shares = Counter(split_of(name, SPLIT) for name in names)
    for name in ("dev", "calibration", "test"):
        assert shares[name] / 4000 == pytest.approx(getattr(SPLIT, name), abs=0.015)
    # sha256 is the same everywhere: these are facts, not samples
    known = {"bash": "train", "vim": "test", "zlib": "test", "glibc": "calibration", "package-19": "dev"}
    assert {name: split_of(name, SPLIT) for name in known} == known


def test_a_larger_dev_share_takes_from_train_only() -> None:
    names = [f"family-{i}" for i in range(3000)]
    larger = SplitConfig(dev=0.2)
    moved = {(split_of(n, SPLIT), split_of(n, larger)) for n in names if split_of(n, SPLIT) != split_of(n, larger)}
    assert moved == {("train", "dev")}


def test_published_validation_is_shared_by_hash() -> None:
    names = [f"family-{i}" for i in range(5000)]
    assert published_split_of("train", "x", SPLIT) == "train" and published_split_of("test", "x", SPLIT) == "test"
    got = Counter(published_split_of("validation", name, SPLIT) for name in names)
    assert got["dev"] / 5000 == pytest.approx(3 / 11, abs=0.02) and set(got) == {"dev", "calibration"}


def test_one_row_per_family_whatever_the_order() -> None:
    many = rows(*[f"f{i % 7}" for i in range(60)])
    chosen = one_per_family(many)
    assert sorted(row.family for row in chosen) == [f"f{i}" for i in range(7)]
    assert chosen == one_per_family(many[::-1])
    assert [row.family for row in chosen] != sorted(row.family for row in chosen)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_text_in_two_splits_after_dropping(pairs: list[tuple[int, int]]) -> None:
    splits: dict[str, list[Example]] = {name: [] for name in SPLITS}
    for i, (family, text) in enumerate(pairs):
        splits[split_of(f"f{family}", SplitConfig(0.25, 0.25, 0.25))].append(
            Example(str(i), f"f{family}", f"s{text}", "t")
        )
    kept, lost = drop_shared(splits)
    assert not check_overlap(kept)
    assert sum(lost.values()) == sum(map(len, splits.values())) - sum(map(len, kept.values()))
    assert kept["test"] == splits["test"]
    assert {row.source for part in kept.values() for row in part} == {f"s{text}" for _, text in pairs}


def test_overlap_is_reported() -> None:
    assert not check_overlap({"a": rows("f", "g"), "b": rows("h")})
    found = check_overlap({"a": rows("f", "g"), "b": rows("f", "h", source="text g 1")})
    assert (found.families, found.texts) == (1, 1) and found
    assert "1 families and 1 source texts" in str(found) and "family 'f' (a, b)" in str(found)


def test_sample_is_a_subset_in_order() -> None:
    many = rows(*[f"f{i}" for i in range(100)])
    few = sample(many, 10)
    assert few == [row for row in many if row in few] and len(few) == 10
    assert set(few) < set(sample(many, 20)) and sample(many, None) == many


def test_content_hash_sees_everything() -> None:
    one = rows("f", "g")
    assert content_hash(one) == content_hash(list(one))
    changed = [Example("id0", "f", "text f 0", "u"), one[1]]
    assert len({content_hash(one), content_hash(one[::-1]), content_hash(changed), content_hash([])}) == 4


def load(**settings: object) -> Corpus:
    return load_corpus(DataConfig(name="restaurants", size=800, **settings))  # type: ignore[arg-type]


def test_caps_keep_the_first_and_are_counted() -> None:
    whole, capped = load(), load(max_eval_rows=15, max_train_rows=100)
    for name in SPLITS[1:]:
        assert capped.splits[name] == whole.splits[name][:15]
        assert capped.audit["dropped"][f"above data.max_eval_rows ({name})"] == len(whole.splits[name]) - 15
    assert len(capped.splits["train"]) == 100 and set(capped.splits["train"]) < set(whole.splits["train"])


def test_a_subset_of_splits_holds_the_same_rows_and_the_same_hash() -> None:
    whole = load()
    part = load_corpus(DataConfig(name="restaurants", size=800), splits=("calibration", "dev"))
    assert list(part.splits) == ["calibration", "dev"]
    assert part.splits["calibration"] == whole.splits["calibration"] and part.content_hash == whole.content_hash


def test_refusals() -> None:
    with pytest.raises(DataError, match="no row is left for dev"):
        load_corpus(DataConfig(name="restaurants", size=5))
    with pytest.raises(ConfigError, match="unknown split 'valid'"):
        load_corpus(DataConfig(name="restaurants"), splits=("valid",))
    with pytest.raises(ConfigError, match="choose from restaurants, debian"):
        load_corpus(DataConfig(name="resturants"))
    with pytest.raises(ConfigError, match="max_article_tokens needs the model's tokenizer"):
        load(max_article_tokens=10)
