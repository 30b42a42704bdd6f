"""What a load sends: articles of a corpus, lines of a file, or random ids."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calm.errors import DataError
from calm.load_config import LoadConfig

from .common import articles_of, choose_model, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from calm.models.speaking import SpeakingModel

Prompt = str | list[int]


@dataclass(frozen=True)
class Prompts:
    """What is sent, in order and again from the start where there are fewer than requests.

    Attributes:
        about: where they come from, for the record.
        count: tokens of an answer's text; None without a tokenizer.
    """

    prompts: list[Prompt]
    about: str
    count: "Callable[[str], int] | None" = None

    def first(self, n: int) -> list[Prompt]:
        return [self.prompts[i % len(self.prompts)] for i in range(n)]


def read_prompts(config: LoadConfig) -> Prompts:
    """Those asked for; says what they are.

    Raises:
        ConfigError, CheckpointError: no model folder to take the corpus of.
        DataError: the corpus or file cannot be read, or has no prompt.
    """
    model = _model(config)
    if config.random_tokens is not None:
        found, about = random_ids(config), f"random ids, {config.random_tokens} a prompt"
    elif config.prompts is not None:
        found, about = read_file(Path(config.prompts), config.prompt_field), Path(config.prompts).name
    else:
        corpus, rows = articles_of(config.data, model, config.n)
        found, about = [row.source for row in rows], f"{corpus}, test split"
    if config.as_ids and model is not None:
        from calm.data.text import encode_source

        tokenizer, settings = model.tokenizer, model.settings
        found = [encode_source(tokenizer, each, settings) if isinstance(each, str) else each for each in found]
    say(f"prompts: {about}, {len(found)} of them")
    if len(found) < config.n:
        say(f"note: n={config.n} requests, so prompts come again; a server that remembers them will be faster")
    return Prompts(found, about, None if model is None else _counter(model))


def _model(config: LoadConfig) -> "SpeakingModel | None":
    """The folder, where its corpus or its tokenizer is needed."""
    chosen = (config.random_tokens, config.prompts, config.data) != (None, None, None)
    encodes = config.as_ids and config.random_tokens is None
    if chosen and config.checkpoint is None and not encodes:
        return None
    from calm.models.folder import load

    return load(choose_model(config.checkpoint))


def _counter(model: "SpeakingModel") -> "Callable[[str], int]":
    from calm.data.text import text_ids

    return lambda text: len(text_ids(model.tokenizer, text))


def random_ids(config: LoadConfig) -> list[Prompt]:
    """Drawn evenly from above the control ids; ``eos_id`` last, where there is one."""
    import numpy as np

    assert config.random_tokens is not None
    draw = np.random.default_rng(config.seed)
    rows = draw.integers(3, config.vocab_size, size=(config.n, config.random_tokens))
    if config.eos_id is not None:
        rows[:, -1] = config.eos_id
    return [[int(token) for token in row] for row in rows]


def read_file(path: Path, field: str) -> list[Prompt]:
    """Lines of a text, or ``field`` (a text or ids) of JSON rows; blank lines are no prompts.

    Raises:
        DataError: names the file and line.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"prompts={path} cannot be read ({error}); give a UTF-8 text or .jsonl file") from None
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"prompts={path} holds no prompt")
    if path.suffix not in (".jsonl", ".ndjson"):
        return [line.strip() for _, line in rows]
    return [_prompt(line, field, f"{path}:{number}") for number, line in rows]


def _prompt(line: str, field: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: no JSON") from None
    value = row.get(field) if isinstance(row, dict) else None
    if isinstance(value, str) and value.strip():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"{where}: a lone surrogate, which is no valid Unicode; repair the text") from None
        return value
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return value
    there = ", ".join(row) if isinstance(row, dict) else "no object"
    raise DataError(f"{where}: no text or list of ids in {field!r} (there: {there}); prompt_field= names another")
