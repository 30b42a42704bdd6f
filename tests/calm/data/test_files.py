import gzip
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet

from calm.config import DataConfig, RowPolicy
from calm.data import load_corpus
from calm.data.files import rows
from calm.data.rows import RawRow, take_in
from calm.errors import DataError

GOOD = b'{"source": "a b", "target": "c"}\n'


def jsonl(path: Path, **settings: Any) -> DataConfig:
    return DataConfig(name="jsonl", path=str(path), **settings)


def read(path: Path, content: bytes, **settings: Any) -> list[RawRow]:
    path.write_bytes(content)
    return list(rows(jsonl(path, **settings)))


def refused(path: Path, content: bytes, **settings: Any) -> str:
    with pytest.raises(DataError) as error:
        read(path, content, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_byte_order_mark_crlf_blank_lines_and_no_final_newline(path: Path) -> None:
    content = b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"\r\n  \n\n" + b'{"source": "d\\ne", "target": "f\\ng"}'
    got = read(path, content)
    assert [(row.source, row.target, row.id) for row in got] == [
        ("a b", "c", "rows.jsonl:1"),
        ("d\ne", "f\ng", "rows.jsonl:5"),
    ]
    assert [row.target for row in take_in(got, jsonl(path)).rows] == ["c", "f g"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"source": "a"', "no JSON: "),
        (b"not json", "no JSON: "),
        (b'["a", "b"]', "a JSON object is needed, got list"),
        (b'{"source": "\xff", "target": "b"}', "byte 12 is no UTF-8"),
        (b'{"source": 5, "target": "b"}', "'source' holds int, not text"),
        (b'{"source": "a", "target": ["b"]}', "'target' holds list, not text"),
        (b'{"source": true, "target": "b"}', "'source' holds bool"),
        (b'{"source": NaN, "target": "b"}', "'source' holds float"),
        (b'{"source": ' + b"9" * 5000 + b"}", "no JSON that can be read"),
        (b"[" * 100_000, "no JSON that can be read"),
    ],
)
@pytest.mark.parametrize("policy", list(RowPolicy))
def test_a_broken_line_is_named(path: Path, line: bytes, told: str, policy: RowPolicy) -> None:
    message = refused(path, GOOD + b"\n" + line + b"\n" + GOOD, row_policy=policy)
    assert f"{path}:3: " in message and told in message


def test_lone_surrogate_in_an_escape(path: Path) -> None:
    got = read(path, GOOD + b'{"source": "a \\ud800", "target": "b"}')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: source: .*U\+D800"):
        take_in(got, jsonl(path))


def test_missing_column_lists_those_that_there_are(path: Path) -> None:
    config = jsonl(path, text_column="article", family_column="topic")
    path.write_bytes(GOOD * 3)
    with pytest.raises(DataError) as error:
        take_in(rows(config), config)
    assert "no column 'article'; available: source, target; set data.text_column" in str(error.value)


def test_missing_and_null_fields_follow_the_row_policy(path: Path) -> None:
    content = GOOD + b'{"target": "x"}\n{"source": null, "target": "y"}\n{"source": "z", "target": "  "}\n'
    path.write_bytes(content)
    skip = jsonl(path, row_policy=RowPolicy.skip)
    intake = take_in(rows(skip), skip)
    assert [row.id for row in intake.rows] == ["rows.jsonl:1"]
    assert dict(intake.dropped) == {"null source": 2, "empty target": 1}
    with pytest.raises(DataError, match=r"2 rows with null source, first at .*rows\.jsonl:2, .*rows\.jsonl:3"):
        take_in(rows(jsonl(path)), jsonl(path))


def test_empty_and_absent_files(tmp_path: Path, path: Path) -> None:
    assert refused(path, b"") == f"{path}: the file is empty"
    assert "blank lines only" in refused(path, b"\n \r\n")
    with pytest.raises(DataError, match="there is no such file"):
        list(rows(jsonl(tmp_path / "other.jsonl")))
    with pytest.raises(DataError, match="needs data.path=FILE_OR_FOLDER"):
        list(rows(DataConfig(name="jsonl")))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"the folder holds no \.jsonl"):
        list(rows(jsonl(tmp_path / "folder")))


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_bytes(GOOD)
    assert [row.id for row in rows(jsonl(tmp_path))] == ["a.jsonl:1", "b.jsonl:1"]


NAMES = [
    "\u00dcbersicht/x.jsonl", "x[1].jsonl", "my data/x (1).jsonl", "a&b.jsonl", "x#1.jsonl", "a,b.jsonl",
    "run=1/x.jsonl", "$HOME.jsonl", "~x.jsonl", "trailing .jsonl",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_any_file_name_works(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    assert len(read(path, GOOD)) == 1


def test_home_and_variables_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.jsonl").write_bytes(GOOD)
    for typed in ("~/x.jsonl", "$HOME/x.jsonl"):
        assert len(list(rows(DataConfig(name="jsonl", path=typed)))) == 1


def test_ids_and_families_may_be_numbers(path: Path) -> None:
    got = read(path, b'{"source": "a", "target": "b", "n": 7, "f": 3}\n', id_column="n", family_column="f")
    assert (got[0].id, got[0].family) == ("7", "3")
    assert "'f' holds float" in refused(path, b'{"source": "a", "target": "b", "f": 1.5}\n', family_column="f")


def test_packed_files_and_endless_rows_are_refused_in_bounded_memory(path: Path) -> None:
    assert "compressed (gzip)" in refused(path, gzip.compress(b"\0" * 1_000_000))
    with open(path, "wb") as file:
        file.write(GOOD + b'{"source": "')
        file.truncate(400 << 20)  # sparse: a row of 400 MB
    before = psutil.Process().memory_info().rss
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the line has more than 16,777,216 bytes"):
        list(rows(jsonl(path)))
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_jsonl_end_to_end_keeps_ids_with_their_texts(path: Path) -> None:
    lines = [
        json.dumps({"source": f"text number {i}", "target": f"sum {i}", "k": f"id{i}", "f": i % 150})
        for i in range(300)
    ]
    lines[7] = json.dumps({"source": "", "target": "x", "k": "bad", "f": 9})
    path.write_text("\n".join(lines))
    config = jsonl(path, id_column="k", family_column="f", row_policy=RowPolicy.skip)
    corpus = load_corpus(config)
    for part in corpus.splits.values():
        for row in part:
            number = row.id.removeprefix("id")
            assert (row.source, row.target) == (f"text number {number}", f"sum {number}")
    assert corpus.audit["dropped"]["empty source"] == 1


def table(path: Path, **columns: Any) -> DataConfig:
    parquet.write_table(pa.table(columns), path)
    return DataConfig(name="parquet", path=str(path))


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    config = table(path, source=["a", None, "c"], target=pa.array(["x", "y", "z"]).dictionary_encode(), n=[1, 2, 3])
    assert [(row.id, row.source, row.target) for row in rows(config)] == [
        ("x.parquet:0", "a", "x"), ("x.parquet:1", None, "y"), ("x.parquet:2", "c", "z"),
    ]  # fmt: skip
    config.id_column = "n"
    assert [row.id for row in rows(config)] == ["1", "2", "3"]
    config.summary_column = "summary"
    with pytest.raises(DataError, match=r"no column 'summary'; available: n, source, target; set data\.summary_column"):
        list(rows(config))
    config.summary_column = "n"
    with pytest.raises(DataError, match=r"column 'n' has type int64, not string; choose another data\.summary_column"):
        list(rows(config))


def test_parquet_refusals(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    with pytest.raises(DataError, match="has no rows"):
        list(rows(table(path, source=pa.array([], pa.string()), target=pa.array([], pa.string()))))
    path.write_bytes(b"PAR1 and then something else PAR1")
    with pytest.raises(DataError, match=r"x\.parquet: no Parquet file"):
        list(rows(DataConfig(name="parquet", path=str(path))))
    path.write_bytes(b"")
    with pytest.raises(DataError, match="the file is empty"):
        list(rows(DataConfig(name="parquet", path=str(path))))
    undecodable = pa.array([b"good", b"\xff\xfe"]).view(pa.string())
    with pytest.raises(DataError, match=r"x\.parquet: row 0 or one of the 128 after it holds bytes that are no UTF-8"):
        list(rows(table(path, source=undecodable, target=["a", "b"])))


def test_parquet_bombs_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    config = table(path, source=["small", "x" * (32 << 20)], target=["t", "t"])
    assert os.path.getsize(path) < 4 << 20
    before = psutil.Process().memory_info().rss
    with pytest.raises(DataError, match=r"'source' has \d\d,\d{3},\d{3} bytes in rows 0 to 1: at least one is above"):
        list(rows(config))
    assert psutil.Process().memory_info().rss - before < 24 << 20
    config = table(path, source=["small"] * 99 + ["x" * (2 << 20)], target=["t"] * 100)
    with pytest.raises(DataError, match=r"bomb\.parquet: row 99: source has more than"):
        take_in(rows(config), config)
