"""Corpora: one file each, one way in (``load_corpus``), splits by family, an audit that is printed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..config import DataConfig, Pretext
from ..errors import ConfigError
from ..records import Example
from .audit import article_filter, format_audit, token_audit
from .cache import cache_root, cached_rows
from .files import user_path
from .pretext import MAKERS
from .relabelled import relabelled
from .rows import Intake, raw, take_in
from .splits import (
    SPLITS,
    check_overlap,
    content_hash,
    drop_shared,
    one_per_family,
    published_split_of,
    refuse_empty,
    sample,
    split_of,
)

logger = logging.getLogger(__name__)

__all__ = [
    "CORPORA",
    "SPLITS",
    "Corpus",
    "check_overlap",
    "format_audit",
    "load_corpus",
    "token_audit",
    "training_texts",
]

Info = dict[str, str]


@dataclass
class Corpus:
    """Rows by split (``train``, ``dev``, ``calibration``, ``test``, as far as asked for) and the account of them."""

    name: str
    splits: dict[str, list[Example]]
    audit: dict[str, Any]
    content_hash: str
    hashes: dict[str, str] = field(default_factory=dict)  # of each split that was read


def _restaurants(config: DataConfig, seed: int, wanted: Sequence[str], info: Info) -> Intake:
    from . import restaurants

    return take_in(raw(restaurants.rows(config.size, seed)), config)


def _debian(config: DataConfig, seed: int, wanted: Sequence[str], info: Info) -> Intake:
    from . import debian

    rows, found = cached_rows(cache_root(config.cache_dir), debian.KEY, debian.build)
    info.update(found)
    return take_in(raw(rows), config)


def _pydoc(config: DataConfig, seed: int, wanted: Sequence[str], info: Info) -> Intake:
    from . import pydoc

    rows, found = cached_rows(cache_root(config.cache_dir), pydoc.key(), pydoc.build)
    info.update(found)
    return take_in(raw(rows), config)


def _hub(config: DataConfig, seed: int, wanted: Sequence[str], info: Info) -> Intake:
    from . import hub

    return take_in(hub.rows(config, wanted, info), config)


def _files(config: DataConfig, seed: int, wanted: Sequence[str], info: Info) -> Intake:
    from . import files

    return take_in(files.rows(config), config)


def _requests(config: DataConfig, seed: int, wanted: Sequence[str], info: Info) -> Intake:
    from . import requests

    if config.path is None:
        raise ConfigError("data.name=requests needs data.path, a server's log")
    return take_in(requests.rows(user_path(config.path)), config, references=False)


CORPORA: dict[str, Callable[[DataConfig, int, Sequence[str], Info], Intake]] = {
    "restaurants": _restaurants,
    "debian": _debian,
    "pydoc": _pydoc,
    "cnn_dailymail": _hub,
    "xsum": _hub,
    "e2e_nlg": _hub,
    "jsonl": _files,
    "parquet": _files,
    "requests": _requests,
}


def load_corpus(
    config: DataConfig,
    seed: int = 0,
    splits: Sequence[str] = SPLITS,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Corpus:
    """Read, clean, de-duplicate and split a corpus.

    Args:
        seed: draws another generated corpus; programs that must agree on the rows leave it at 0.
        splits: those that are returned and must not be empty. Only a published train split is left unread
            when it is not asked for; all others are always made, so that what a split holds never depends
            on this argument.
        tokenizer: counts tokens for ``data.max_article_tokens`` and adds token statistics to the audit.

    Raises:
        ConfigError: an unknown corpus or split, or max_article_tokens without a tokenizer.
        DataError: the corpus cannot be read, has bad rows, or leaves a split empty.
    """
    if config.name not in CORPORA:
        raise ConfigError(f"data.name={config.name!r} is no corpus; choose from {', '.join(CORPORA)}")
    unknown = [name for name in splits if name not in SPLITS]
    if unknown:
        raise ConfigError(f"unknown split {unknown[0]!r}; choose from {', '.join(SPLITS)}")
    info: Info = {}
    intake = CORPORA[config.name](config, seed, splits, info)
    if config.max_article_tokens is not None:
        _keep_short_articles(intake, config.max_article_tokens, tokenizer)
    parts, dropped = _split(intake, config)
    if config.targets is not None and "train" in splits:
        parts["train"] = relabelled(parts["train"], user_path(config.targets), dropped)
    if config.pretext is not Pretext.none:
        info["pretext"] = config.pretext.value
        parts = _pretext(parts, config.pretext, dropped)
    if "train" not in splits and "train" in parts and intake.published:
        del parts["train"]  # a published train split is read for training only
    families = len({row.family for rows in parts.values() for row in rows})
    refuse_empty(parts, splits, config.name, families)
    hashes = {name: content_hash(rows) for name, rows in parts.items()}
    overlap = check_overlap(parts)
    audit: dict[str, Any] = {
        "corpus": config.name,
        **info,
        "read": intake.read,
        "rows": {name: len(rows) for name, rows in parts.items()},
        "families": {name: len({row.family for row in rows}) for name, rows in parts.items()},
        "overlap": {"families": overlap.families, "texts": overlap.texts},
        "dropped": {**intake.dropped, **dropped},
        "cleaned": dict(intake.cleaned),
        "duplicate_ids": intake.duplicate_ids,
        "hashes": hashes,
        "content_hash": sha256(repr(sorted(hashes.items())).encode()).hexdigest(),
    }
    corpus = Corpus(config.name, {name: parts[name] for name in splits}, audit, audit["content_hash"], hashes)
    if tokenizer is not None:
        audit["tokens"] = token_audit(corpus.splits, tokenizer, config)
    return corpus


def _keep_short_articles(intake: Intake, limit: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """The paper's filter: articles of fewer than ``limit`` tokens stay."""
    if tokenizer is None:
        raise ConfigError(
            "data.max_article_tokens needs the model's tokenizer to count with: load the tokenizer first "
            "(for one from scratch, train it with data.max_article_tokens=null)"
        )
    for rows in [intake.rows, *intake.published.values()]:
        before = len(rows)
        rows[:] = article_filter(rows, tokenizer, limit)
        if before > len(rows):
            intake.dropped[f"source of {limit} tokens or more"] += before - len(rows)


def _split(intake: Intake, config: DataConfig) -> tuple[dict[str, list[Example]], dict[str, int]]:
    """Rows by split, and how many were dropped why."""
    parts: dict[str, list[Example]] = {name: [] for name in SPLITS}
    for row in intake.rows:
        parts[split_of(row.family, config.split)].append(row)
    for published, rows in intake.published.items():
        for row in rows:
            parts[published_split_of(published, row.family, config.split)].append(row)
    dropped: dict[str, int] = {}
    for name in SPLITS[1:]:
        chosen = one_per_family(parts[name])
        if len(chosen) < len(parts[name]):
            dropped[f"beyond one row per family ({name})"] = len(parts[name]) - len(chosen)
        parts[name] = chosen
    parts, shared = drop_shared(parts)
    dropped.update({f"text or family also in another split ({name})": n for name, n in shared.items()})
    for name in SPLITS[1:]:
        limited = parts[name][: config.max_eval_rows]
        if len(limited) < len(parts[name]):
            dropped[f"above data.max_eval_rows ({name})"] = len(parts[name]) - len(limited)
        parts[name] = limited
    train = sample(parts["train"], config.max_train_rows)
    if len(train) < len(parts["train"]):
        dropped["above data.max_train_rows (train)"] = len(parts["train"]) - len(train)
    parts["train"] = train
    return parts, dropped


def _pretext(parts: dict[str, list[Example]], pretext: Pretext, dropped: dict[str, int]) -> dict[str, list[Example]]:
    """Pretext pairs of each split's rows. None of train shows a source that the rows of another split have.

    A text without its first sentence can be the whole text of another family.
    """
    made = {name: list(MAKERS[pretext](rows)) for name, rows in parts.items()}
    made, _ = drop_shared({name: rows if name == "train" else one_per_family(rows) for name, rows in made.items()})
    if "train" in made:
        held_out = {row.source for name, rows in parts.items() if name != "train" for row in rows}
        kept = [row for row in made["train"] if row.source not in held_out]
        if len(kept) < len(made["train"]):
            dropped["pretext source of another split (train)"] = len(made["train"]) - len(kept)
        made["train"] = kept
    return made


def training_texts(corpus: Corpus) -> Iterator[str]:
    """What a tokenizer from scratch is trained on: sources and targets of the train split."""
    for row in corpus.splits["train"]:
        yield row.source
        yield row.target
