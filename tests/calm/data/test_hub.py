import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from calm.config import DataConfig
from calm.data import hub, load_corpus
from calm.errors import DataError


def cnn(path: str | None = None, limit: int | None = None) -> DataConfig:
    return DataConfig(
        name="cnn_dailymail", path=path, text_column="article", summary_column="highlights", id_column="id",
        source_prefix="summarize: ", max_article_tokens=limit,
    )  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A local copy in the published form, train in two shards; one validation article is also in train and in test."""
    folder = tmp_path / "cnn_dailymail" / "3.0.0"
    folder.mkdir(parents=True)

    def write(name: str, numbers: list[int]) -> None:
        texts = [
            f"Article number {i} tells a story." + " And more words." * (60 if i % 10 == 3 else 0) for i in numbers
        ]
        columns = {
            "article": texts,
            "highlights": [f"Story {i} .\nTold ." for i in numbers],
            "id": [f"h{i}" for i in numbers],
        }
        parquet.write_table(pa.table(columns), folder / name)

    write("train-00000-of-00002.parquet", list(range(0, 100)))
    write("train-00001-of-00002.parquet", [*range(100, 200), 1000])
    write("validation-00000-of-00001.parquet", list(range(1000, 1100)))
    write("test-00000-of-00001.parquet", [*range(2000, 2050), 1000])
    return tmp_path / "cnn_dailymail"


@pytest.mark.parametrize("inner", ["", "3.0.0"])
def test_local_copy_keeps_the_published_splits(copy: Path, inner: str) -> None:
    corpus = load_corpus(cnn(str(copy / inner)))
    assert corpus.audit["rows"]["train"] == 200 and corpus.audit["rows"]["test"] == 51
    assert corpus.audit["rows"]["dev"] + corpus.audit["rows"]["calibration"] == 99
    assert corpus.audit["rows"]["dev"] > 10
    assert corpus.audit["overlap"] == {"families": 0, "texts": 0}
    assert corpus.audit["dropped"]["duplicate pair"] == 2
    assert "validation is split into dev and calibration" in corpus.audit["origin"]
    row = corpus.splits["test"][0]
    assert row.target.endswith(". Told .") and row.id.startswith("h") and "\n" not in row.target


def test_train_is_read_only_where_it_is_wanted(copy: Path) -> None:
    whole = load_corpus(cnn(str(copy)))
    for shard in (copy / "3.0.0").glob("train-*"):
        shard.unlink()
    part = load_corpus(cnn(str(copy)), splits=("calibration", "test"))
    assert part.splits["test"] == whole.splits["test"]
    assert part.hashes == {name: whole.hashes[name] for name in ("dev", "calibration", "test")}
    with pytest.raises(DataError, match=r"no train-\*\.parquet there"):
        load_corpus(cnn(str(copy)))


def test_long_articles_are_filtered_by_the_tokenizer(copy: Path, scratch: PreTrainedTokenizerBase) -> None:
    corpus = load_corpus(cnn(str(copy), limit=120), tokenizer=scratch)
    numbers = {int(row.id[1:]) for part in corpus.splits.values() for row in part}
    assert not any(number % 10 == 3 for number in numbers) and len(numbers) == 315
    assert corpus.audit["dropped"]["source of 120 tokens or more"] == 35
    assert corpus.audit["tokens"]["train"]["source"]["max"] < 120 + 20


def test_without_a_hub_one_line_names_the_offline_corpora() -> None:
    begun = time.monotonic()
    with pytest.raises(DataError) as error:
        load_corpus(cnn())
    told = str(error.value)
    assert "\n" not in told and "data.path" in told
    assert all(name in told for name in ("restaurants", "debian", "pydoc", "jsonl", "parquet"))
    assert time.monotonic() - begun < 60


def test_an_address_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not hub.hub_answers("http://127.0.0.1:9") and not hub.hub_answers("http://no-such-host.invalid")
    begun = time.monotonic()
    with pytest.raises(DataError, match="the hub does not answer and the local cache has no copy"):
        load_corpus(cnn())
    assert time.monotonic() - begun < 60
    assert constants.HF_HUB_OFFLINE is False and datasets.config.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("scripted", [False, True])
def test_rows_from_the_hub(monkeypatch: pytest.MonkeyPatch, scripted: bool) -> None:
    import datasets
    from huggingface_hub import constants

    asked = []

    def load_dataset(repository: str, name: str, split: str, revision: str | None) -> datasets.Dataset:
        asked.append((repository, name, split, revision))
        if scripted and revision is None:
            raise RuntimeError("Dataset scripts are no longer supported")
        first = {"train": 0, "validation": 1000, "test": 2000}[split]
        numbers = range(first, first + 60)
        return datasets.Dataset.from_dict(
            {"document": [f"doc {i}" for i in numbers], "summary": [f"s {i}" for i in numbers]}
        )

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "hub_answers", lambda endpoint: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DataConfig(name="xsum", text_column="document", summary_column="summary")
    corpus = load_corpus(config)
    assert corpus.audit["rows"]["train"] == corpus.audit["rows"]["test"] == 60
    assert ("EdinburghNLP/xsum", "default", "test", "refs/convert/parquet" if scripted else None) in asked
    assert corpus.splits["test"][0].id.startswith("test-")
    config.summary_column = "highlights"
    with pytest.raises(
        DataError, match="no column 'highlights'; available: document, summary; set data.summary_column"
    ):
        load_corpus(config)


def test_a_family_of_two_published_splits_stays_in_the_more_protected_one(copy: Path) -> None:
    folder = copy / "3.0.0"
    for number, name in enumerate(["train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"]):
        table = parquet.read_table(folder / f"{name}.parquet")
        topics = [f"topic {number}-{i}" for i in range(len(table))]
        parquet.write_table(table.append_column("topic", pa.array(["shared", *topics[1:]])), folder / f"{name}.parquet")
    table = parquet.read_table(folder / "test-00000-of-00001.parquet")
    parquet.write_table(
        table.append_column("topic", pa.array(["shared"] * len(table))), folder / "test-00000-of-00001.parquet"
    )
    config = cnn(str(copy))
    config.family_column = "topic"
    corpus = load_corpus(config)
    assert corpus.audit["rows"]["test"] == 1 and corpus.audit["overlap"] == {"families": 0, "texts": 0}
    assert corpus.audit["dropped"]["text or family also in another split (train)"] == 2
