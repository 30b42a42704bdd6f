"""Which rows a model was trained on, for corpora that may share rows with its training.

Rows that a model has seen say nothing of new articles. As long as a corpus is split as it was for training, its splits
are disjoint and nothing has to be read; any other split, column or file can hand rows of the train split to another.
"""

import logging
from dataclasses import asdict
from typing import Any

from ..config import DataConfig
from ..data import load_corpus
from ..data.files import user_path
from ..errors import ConfigError, DataError
from ..models.speaking import SpeakingModel
from ..records import Example

logger = logging.getLogger(__name__)

# these leave every row in the split in which it was, or only leave rows out
_HARMLESS = ("max_eval_rows", "max_train_rows", "cache_dir", "row_policy", "targets")


def training_rows(model: SpeakingModel, data: DataConfig) -> list[Example]:
    """The train splits of the corpora that the model was trained on, one after another.

    Without those that are split like ``data``; empty where no corpus is told. Where a corpus of training can no
    longer be read this is said in the log, and its rows are missing. Of logged requests none are asked for: texts that
    the model has seen are part of them as they will be of later ones.
    """
    if data.name == "requests":
        return []
    corpora = [model.settings.data, *model.settings.earlier_data]
    return [row for values in corpora if values for row in _rows_of(values, model, data)]


def _rows_of(values: dict[str, Any], model: SpeakingModel, data: DataConfig) -> list[Example]:
    try:
        trained = DataConfig.from_values(values)
        if _membership(trained) == _membership(data):
            return []
        tokenizer = model.tokenizer if trained.max_article_tokens is not None else None
        return load_corpus(trained, splits=("train",), tokenizer=tokenizer).splits["train"]
    except (ConfigError, DataError, OSError) as error:
        logger.warning("overlap with rows that the model was trained on could not be checked: %s", error)
        return []


def _membership(data: DataConfig) -> dict[str, Any]:
    """The settings that decide which rows there are and which split each lies in."""
    values = {name: value for name, value in asdict(data).items() if name not in _HARMLESS}
    return {**values, "path": data.path and user_path(data.path).resolve()}
