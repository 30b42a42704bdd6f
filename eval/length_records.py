"""Layers skipped and loss of recorded answers by their lengths, and by the position of a token in its answer.

Groups are quartiles of all articles, the same articles for every row of the table: ``source`` by tokens of the source
before it is cut to what the model reads, ``output`` by tokens of full depth's answer. Equal lengths stay together, so
groups differ in size. Intervals are 95 %, over articles.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from calm.config import DataConfig
from calm.errors import CalmError, DataError
from calm.experiment_config import LengthConfig
from calm.metrics import with_interval

from .common import articles_of, say
from .recorded import Answers, Recorded

SOURCE, OUTPUT, POSITION, HALVES = "source", "output", "position", "halves"
QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class SourceTokens:
    """Lengths of sources.

    Attributes:
        tokens: by id of the article, EOS included, before anything is cut.
        most: that the model reads.
    """

    tokens: dict[str, int]
    most: int

    def of(self, ids: list[str]) -> Int[np.ndarray, " articles"]:
        """Raise DataError for an article that the corpus has not."""
        lacking = [name for name in ids if name not in self.tokens]
        if lacking:
            raise DataError(f"the corpus has no article {lacking[0]!r} of the records; give their checkpoint=")
        return np.array([self.tokens[name] for name in ids])


def source_tokens(config: LengthConfig, recorded: Recorded) -> SourceTokens | None:
    """Of all test articles; None, which is said, where no model was asked for and that of the records is not there.

    Raises:
        CalmError: the model that was asked for, or its corpus, cannot be read, or holds other articles.
    """
    try:
        return _counted(_model_of(config, recorded), recorded)
    except CalmError as error:
        if config.checkpoint is not None:
            raise
        say(f"no source lengths: {error}")
        return None


def _model_of(config: LengthConfig, recorded: Recorded) -> Path:
    folder = recorded.model_folder if config.checkpoint is None else Path(config.checkpoint)
    if folder is None:
        raise DataError(f"the model of {recorded.folder} is not there; give checkpoint=")
    return folder


def _counted(folder: Path, recorded: Recorded) -> SourceTokens:
    from calm.calibration.identity import hash_rows
    from calm.data.text import text_ids
    from calm.models.folder import load

    model = load(folder)
    settings, rows = model.settings, recorded.summary.get("rows", {}).get("test", {})
    data = recorded.summary.get("config", {}).get("data")
    corpus, articles = articles_of(None if data is None else DataConfig.from_values(data), model, rows.get("n"))
    if rows.get("hash", found := hash_rows(articles)) != found:
        raise DataError(f"the test articles of {corpus} are not those that {recorded.folder} recorded")
    lengths = {each.id: len(text_ids(model.tokenizer, settings.source_prefix + each.source)) + 1 for each in articles}
    say(f"source lengths: {corpus}, {len(lengths)} articles, tokenizer of {folder}")
    return SourceTokens(lengths, settings.max_source_tokens)


def by_length(
    answers: Answers,
    lengths: Int[np.ndarray, " articles"],
    num_layers: int,
    config: LengthConfig,
    most: int | None = None,
) -> list[dict[str, Any]]:
    """A record for each quartile of the lengths.

    Args:
        most: tokens that are read; ``cut`` is the share of articles that are longer.
    """
    groups, rows = quartiles(lengths), list[dict[str, Any]]()
    for group in np.unique(groups):
        which = groups == group
        rows.append(
            {
                "group": int(group),
                "shortest": int(lengths[which].min()),
                "longest": int(lengths[which].max()),
                "articles": int(which.sum()),
                "tokens": int(answers.lengths[which].sum()),
                "cut": None if most is None else float((lengths[which] > most).mean()),
                **skipped(answers.emission[which], num_layers, config),
                **with_interval("loss", answers.loss[which], config.seed, config.bootstrap),
            }
        )
    return rows


def by_position(answers: Answers, num_layers: int, config: LengthConfig) -> list[dict[str, Any]]:
    """A record for each token of the answers, the first is 1, as long as ``fewest`` answers reach it."""
    rows = []
    for place in range(answers.emission.shape[1]):
        layers = answers.emission[answers.lengths > place, place]
        if len(layers) >= config.fewest:
            values = with_interval("layers_skipped", 1 - layers / num_layers, config.seed, config.bootstrap)
            rows.append({"group": place + 1, "articles": len(layers), "tokens": len(layers), **values})
    return rows


def by_halves(answers: Answers, num_layers: int, config: LengthConfig) -> list[dict[str, Any]]:
    """What the later half of an answer skips more than its earlier half, mean of the answers that have both.

    Other articles reach a late position than an early one; here each is compared with itself. ``late_minus_early`` is
    of all tokens, ``inner_late_minus_early`` without the first and the last, which is EOS unless the answer ran into
    its limit. The middle token of an odd number belongs to neither half.
    """
    found: dict[str, Any] = {}
    for name, ends in (("", 0), ("inner_", 1)):
        differences = []
        for layers, length in zip(answers.emission, answers.lengths, strict=True):
            inside = layers[ends : length - ends]
            if half := len(inside) // 2:
                differences.append((inside[:half].mean() - inside[len(inside) - half :].mean()) / num_layers)
        if differences:
            found[f"{name}articles"] = len(differences)
            found |= with_interval(f"{name}late_minus_early", np.array(differences), config.seed, config.bootstrap)
    return [found] if found else []


def quartiles(values: Int[np.ndarray, " articles"]) -> Int[np.ndarray, " articles"]:
    """1..4 for each value; equal ones in the same, so one may be empty."""
    groups: Int[np.ndarray, " articles"] = 1 + np.searchsorted(np.quantile(values, QUARTILES), values, side="left")
    return groups


def skipped(emission: Int[np.ndarray, "articles tokens"], num_layers: int, config: LengthConfig) -> dict[str, float]:
    """1 - mean(emission layer) / L over the tokens, and its interval: articles are drawn anew, with their tokens."""
    live: Bool[np.ndarray, "articles tokens"] = emission > 0
    layers, tokens = emission.sum(axis=1), live.sum(axis=1)
    generator = np.random.default_rng(config.seed)
    again = [generator.integers(0, len(tokens), len(tokens)) for _ in range(config.bootstrap)]
    found = 1 - np.array([layers[each].sum() / tokens[each].sum() for each in again]) / num_layers
    low, high = np.quantile(found, [0.025, 0.975])
    mean = 1 - float(layers.sum() / tokens.sum()) / num_layers
    return {"layers_skipped": mean, "layers_skipped_low": float(low), "layers_skipped_high": float(high)}
