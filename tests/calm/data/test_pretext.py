"""Pretext pairs: made of the sources alone, in the splits of their rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from calm.config import DataConfig, Pretext, SplitConfig
from calm.data import load_corpus
from calm.data.pretext import MAKERS, gap_sentences
from calm.records import Example

FIRST = "A small server that speaks a very old protocol over the wire."
REST = "It was written for machines that nobody owns any more. Yet it runs, and people still use it."


def row(source: str, number: int = 0) -> Example:
    return Example(f"r{number}", f"f{number}", source, "old protocol server")


def test_every_pretext_has_a_maker() -> None:
    assert set(MAKERS) == set(Pretext) - {Pretext.none}


def test_a_text_gives_the_gap_and_the_lead() -> None:
    gap, lead = gap_sentences([row(f"{FIRST} {REST}")])
    assert (gap.id, gap.family, gap.source, gap.target) == ("r0/gap", "f0", REST, FIRST)
    assert (lead.id, lead.family, lead.source) == ("r0/lead", "f0", f"{FIRST} {REST}")
    assert lead.target == "small server that speaks a very old protocol over"


@pytest.mark.parametrize(
    "source", [FIRST, f"Too short. {REST}", f"{FIRST} Few words follow.", f"{'word ' * 31}end. {REST}"]
)
def test_texts_that_teach_nothing_give_no_pair(source: str) -> None:
    assert list(gap_sentences([row(source)])) == []


def test_the_reference_is_never_shown_and_families_keep_their_split(tmp_path: Path) -> None:
    lines = [
        f'{{"id": "r{i}", "family": "f{i}", "source": "Item {i} is {FIRST} {REST} So {i}.", "target": "secret {i}"}}'
        for i in range(60)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    plain = DataConfig(
        name="jsonl", path=str(tmp_path / "rows.jsonl"), family_column="family", id_column="id",
        split=SplitConfig(dev=0.2, calibration=0.2, test=0.2),
    )  # fmt: skip
    pretext = DataConfig(**{**vars(plain), "pretext": Pretext.gap_sentences})
    own, made = load_corpus(plain), load_corpus(pretext)
    for split, rows in made.splits.items():
        assert {each.family for each in rows} == {each.family for each in own.splits[split]} != set()
        assert not any("secret" in each.source + each.target for each in rows)
        assert split == "train" or len(rows) == len(own.splits[split])
    assert len(made.splits["train"]) == 2 * len(own.splits["train"])
    assert made.audit["pretext"] == "gap_sentences" and made.content_hash != own.content_hash


def test_a_text_of_another_split_is_never_shown_in_train(tmp_path: Path) -> None:
    """What follows one text's first sentence is the whole text of another family."""
    rests = [f"Part {i} of it is {FIRST} {REST} So {i}." for i in range(40)]
    lines = [{"id": f"w{i}", "family": f"w{i}", "source": rest, "target": "t"} for i, rest in enumerate(rests)]
    lines += [
        {"id": f"l{i}", "family": f"l{i}", "source": f"Look at item {i} of this long list. {rest}", "target": "t"}
        for i, rest in enumerate(rests)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plain = DataConfig(
        name="jsonl", path=str(tmp_path / "rows.jsonl"), family_column="family", id_column="id",
        split=SplitConfig(dev=0.2, calibration=0.2, test=0.2),
    )  # fmt: skip
    own = load_corpus(plain).splits
    made = load_corpus(replace(plain, pretext=Pretext.gap_sentences))
    held_out = {row.source for split in ("dev", "calibration", "test") for row in own[split]}
    assert held_out.isdisjoint({row.source for row in made.splits["train"]})
    assert made.audit["dropped"]["pretext source of another split (train)"] > 0
