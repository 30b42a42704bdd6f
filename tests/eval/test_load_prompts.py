"""Where prompts come from: a file, random ids, the test split of a corpus, with or without a model folder."""

import json
from pathlib import Path

import pytest

from calm.errors import DataError
from calm.load_config import LoadConfig
from eval.load_prompts import read_file, read_prompts

from .folders import jsonl_settings


def test_lines_of_a_text_are_prompts_and_blank_ones_are_none(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes("\ufeffone\r\n\r\n  two words \nthree\u2028still three\n".encode())
    assert read_file(path, "prompt") == ["one", "two words", "three\u2028still three"]


def test_rows_of_jsonl_hold_texts_or_ids_in_the_named_field(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a\\u2028b"}\n\n{"prompt": [5, 1]}\n')
    assert read_file(path, "prompt") == ["a\u2028b", [5, 1]]
    path.write_text('{"source": "x"}\n')
    assert read_file(path, "source") == ["x"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "no JSON"),
        ("7", "no object"),
        ('{"source": "x"}', r"no text or list of ids in 'prompt' \(there: source\); prompt_field= names another"),
        ('{"prompt": ""}', "no text or list of ids"),
        ('{"prompt": [1, true]}', "no text or list of ids"),
        ('{"prompt": []}', "no text or list of ids"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(row: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "good"}\n' + row + "\n")
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{said}"):
        read_file(path, "prompt")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name, content in (("latin.txt", b"caf\xe9"), ("empty.txt", b"\n \n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            read_file(tmp_path / name, "prompt")
    with pytest.raises(DataError, match="nothing.txt cannot be read"):
        read_file(tmp_path / "nothing.txt", "prompt")


def test_random_ids_are_seeded_and_end_as_asked() -> None:
    config = LoadConfig(random_tokens=6, vocab_size=50, n=20)
    found = read_prompts(config).prompts
    assert found == read_prompts(config).prompts != read_prompts(LoadConfig(random_tokens=6, n=20, seed=1)).prompts
    assert len(found) == 20 and all(len(ids) == 6 and ids[-1] == 1 for ids in found)
    drawn = {token for ids in found for token in ids[:-1]}
    assert min(drawn) >= 3 and max(drawn) < 50 and len(drawn) > 30  # type: ignore[operator]
    assert read_prompts(LoadConfig(random_tokens=6, vocab_size=50, n=20, as_ids=True)).prompts == found  # they are ids
    endless = read_prompts(LoadConfig(random_tokens=6, vocab_size=50, n=20, eos_id=None)).prompts
    assert [ids[:-1] for ids in endless] == [ids[:-1] for ids in found] != [ids[-1] for ids in endless]


def test_few_prompts_are_sent_again_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    found = read_prompts(LoadConfig(prompts=str(tmp_path / "p.txt"), n=5))
    assert found.first(5) == ["a", "b", "a", "b", "a"] and found.about == "p.txt" and found.count is None
    said = capsys.readouterr().out
    assert "prompts: p.txt, 2 of them" in said and "prompts come again" in said


def test_a_corpus_gives_its_test_split(certified: Path, tmp_path: Path) -> None:
    rows = [json.loads(line)["source"] for line in (certified / "rows.jsonl").read_text().splitlines()]
    found = read_prompts(LoadConfig(data=jsonl_settings(certified / "rows.jsonl"), n=7))
    assert len(found.prompts) == 7 and set(map(str, found.prompts)) <= set(rows) and found.count is None


def test_a_model_folder_brings_its_corpus_its_tokenizer_and_its_lengths(certified: Path) -> None:
    texts = read_prompts(LoadConfig(checkpoint=str(certified / "model"), n=5))
    assert all(isinstance(each, str) for each in texts.prompts)
    assert texts.count is not None and texts.count("w5 w6 w7") == 3
    as_ids = read_prompts(LoadConfig(checkpoint=str(certified / "model"), n=5, as_ids=True))
    assert [len(str(text).split()) + 1 for text in texts.prompts] == [len(ids) for ids in as_ids.prompts]
    assert all(isinstance(ids, list) and ids[-1] == 1 for ids in as_ids.prompts)


def test_without_any_choice_the_newest_model_folder_says_what(certified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.load_prompts.choose_model", lambda checkpoint: checkpoint or certified / "model")
    assert read_prompts(LoadConfig(n=3)).about == "jsonl, test split"
