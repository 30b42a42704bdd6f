"""Articles that the eval programs share."""

from pathlib import Path

import pytest

from calm.data import load_corpus
from calm.errors import ConfigError
from eval.common import articles_of, first_articles

from .folders import jsonl_settings


def test_the_first_articles_of_splits_are_those_of_each_alone(certified: Path) -> None:
    data = jsonl_settings(certified / "rows.jsonl")
    corpus, found = first_articles(data, None, {"dev": 3, "test": None})
    alone = {split: load_corpus(data, splits=(split,)).splits[split] for split in ("dev", "test")}
    assert corpus == "jsonl" and found == {"dev": alone["dev"][:3], "test": alone["test"]} and len(found["dev"]) == 3
    assert articles_of(data, None) == (corpus, alone["test"])
    with pytest.raises(ConfigError, match="choose a corpus with data=NAME"):
        first_articles(None, None, {"dev": 3})
