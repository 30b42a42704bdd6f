from statistics import mean

from calm.config import DataConfig
from calm.data import load_corpus, restaurants, token_audit, training_texts
from calm.data.tokenizer import train_tokenizer
from calm.metrics import lead1, rouge_l

CONFIG = DataConfig(name="restaurants", size=1500, max_source_tokens=64, max_target_tokens=64)


def test_same_rows_always_and_a_longer_corpus_begins_with_the_shorter() -> None:
    rows = list(restaurants.rows(50))
    assert rows == list(restaurants.rows(80))[:50]
    assert rows != list(restaurants.rows(50, seed=1))
    assert len(set(restaurants.NAMES)) == 256


def test_the_text_says_the_facts() -> None:
    for row in restaurants.rows(200):
        facts = dict(part.split("=") for part in row.family.split("; "))
        assert all(f"{slot}[{value}]" in row.source for slot, value in facts.items())
        assert row.source.count("[") == len(facts) >= 3
        said = [facts[slot] for slot in ("name", "type", "food", "near") if slot in facts]
        assert all(value in row.target for value in said)
        assert not {"  ", " .", ".."}.intersection(row.target[i : i + 2] for i in range(len(row.target)))


def test_splits_and_difficulty() -> None:
    corpus = load_corpus(CONFIG)
    assert corpus.audit["overlap"] == {"families": 0, "texts": 0}
    assert {name: len(rows) > 25 for name, rows in corpus.splits.items()} == dict.fromkeys(corpus.splits, True)
    rows = corpus.splits["test"]
    assert 0.27 < mean(rouge_l(lead1(row.source), row.target) for row in rows) < 0.37
    orders = {tuple(part.split("[")[0] for part in row.source.split(", ")) for row in rows}
    assert len(orders) > 50


def test_nothing_is_truncated_with_the_demo_vocabulary() -> None:
    corpus = load_corpus(CONFIG)
    for lowercase in (False, True):
        tokenizer = train_tokenizer(training_texts(corpus), 400, lowercase)
        told = token_audit(corpus.splits, tokenizer, CONFIG)
        assert all(told[name][side]["truncated"] == 0 for name in told for side in ("source", "target"))
        assert all(told[name]["unk_share"] == 0 for name in told)
