import logging

import pytest

from calm.config import DataConfig, RowPolicy
from calm.data.rows import MAX_TEXT_BYTES, RawRow, take_in
from calm.errors import DataError

SKIP = DataConfig(name="jsonl", row_policy=RowPolicy.skip)
STRICT = DataConfig(name="jsonl")


def row(number: int, source: str | None, target: str | None, family: str | None = None) -> RawRow:
    return RawRow(f"r{number}", source, target, family, f"x.jsonl:{number}")


def test_bad_rows_are_one_error_with_counts_and_first_ids() -> None:
    rows = [row(i, None if i % 2 else "a b", "" if i == 4 else "c") for i in range(20)]
    rows.append(row(20, "a", "t", family=""))
    with pytest.raises(DataError) as error:
        take_in(rows, STRICT)
    told = str(error.value)
    assert "\n" not in told
    assert "10 rows with null source, first at x.jsonl:1 (id r1), x.jsonl:3 (id r3)" in told
    assert told.count("(id") == 7  # five of the ten, and one each of the others
    assert "1 rows with empty target, first at x.jsonl:4 (id r4)" in told
    assert "1 rows with null family" in told and "data.row_policy=skip" in told


def test_skip_leaves_them_out_and_says_how_many(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(1, "a", "b"), row(2, " \t\u00a0", "b"), row(3, "a", None), row(4, "\x00", "c"), row(5, "d", "e")]
    with caplog.at_level(logging.WARNING):
        intake = take_in(rows, SKIP)
    assert [kept.id for kept in intake.rows] == ["r1", "r5"]
    assert dict(intake.dropped) == {"empty source": 2, "null target": 1}
    assert "2 rows with empty source, first at x.jsonl:2 (id r2), x.jsonl:4 (id r4)" in caplog.text


def test_text_is_cleaned_and_counted() -> None:
    intake = take_in([row(1, "a\x00b\x07", "cafe\u0301\r\nx"), row(2, "w" * 1_000_000, "t")], STRICT)
    assert (intake.rows[0].source, intake.rows[0].target) == ("a b", "caf\u00e9 x")
    assert dict(intake.cleaned) == {"source with control characters, replaced by blanks": 1}
    assert len(intake.rows[1].source) == 1_000_000  # long, but within the limit: kept


@pytest.mark.parametrize("config", [SKIP, STRICT])
def test_never_accepted(config: DataConfig) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl:1: source has more than 1,048,576 bytes"):
        take_in([row(1, "\u00e9" * (MAX_TEXT_BYTES // 2 + 1), "t")], config)
    with pytest.raises(DataError, match=r"x\.jsonl:2: target: .*lone surrogate U\+DC80"):
        take_in([row(2, "s", "a\udc80")], config)
    with pytest.raises(DataError, match=r"x\.jsonl:3: family: .*lone surrogate"):
        take_in([row(3, "s", "t", "\ud800")], config)


def test_duplicates(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        row(1, "a", "b"),
        row(1, "a", "c"),
        row(1, "a  ", "b"),
        row(2, "e\u0301", "x"),
        row(3, "\u00e9", "x"),
        row(1, "z", "z"),
    ]
    with caplog.at_level(logging.WARNING):
        intake = take_in(rows, STRICT)
    assert [(kept.id, kept.target) for kept in intake.rows] == [("r1", "b"), ("r1#2", "c"), ("r2", "x"), ("r1#3", "z")]
    assert intake.dropped["duplicate pair"] == 2 and intake.duplicate_ids == 2
    assert "2 rows repeat an id" in caplog.text
    assert intake.rows[0].family == intake.rows[1].family != intake.rows[2].family


def test_short_sources_are_left_out() -> None:
    config = DataConfig(name="jsonl", min_source_words=3)
    intake = take_in([row(1, "a b", "t"), row(2, "a b c", "t")], config)
    assert [kept.id for kept in intake.rows] == ["r2"] and intake.dropped["source below 3 words"] == 1
