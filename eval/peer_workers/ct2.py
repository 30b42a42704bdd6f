"""CTranslate2, converted from the model folder by its own converter. Settings: ``compute_type``, float32 or int8."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ctranslate2

from .protocol import Peer, Sources


class Vocabulary:
    """CTranslate2 speaks strings: ids to tokens and back. Of ids with the same string the first one comes back."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._ids: dict[str, int] = {}
        for number, token in enumerate(tokens):
            self._ids.setdefault(token, number)

    def tokens(self, ids: Sources) -> list[list[str]]:
        return [[self._tokens[number] for number in row] for row in ids]

    def ids(self, rows: list[list[str]]) -> list[list[int]]:
        return [[self._ids[token] for token in row] for row in rows]


def converted(folder: Path, target: Path, quantization: str) -> Path:
    """``target``, written by the converter if it is not there."""
    if target.is_dir():
        return target
    from ctranslate2.converters import TransformersConverter

    unfinished = target.with_name(f"{target.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    TransformersConverter(str(folder)).convert(str(unfinished), quantization=quantization)
    return unfinished.rename(target)


class CTranslate2:
    """A Translator: static batches, greedy.

    EOS is ignored by giving no end token at all; then every row ends at ``max_decoding_length``.
    """

    _translator: Any
    _vocabulary: Vocabulary
    _rows: list[list[str]]

    def load(self, folder: Path, store: Path, threads: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        kind = settings["compute_type"]
        made = converted(folder, store / f"ctranslate2-{kind}", kind)
        self._translator = ctranslate2.Translator(
            str(made), "cpu", compute_type=kind, intra_threads=threads, inter_threads=1
        )
        self._vocabulary = Vocabulary(json.loads((made / "shared_vocabulary.json").read_text("utf-8")))
        return {"versions": {"ctranslate2": ctranslate2.__version__}, "compute_type": self._translator.compute_type}

    def prepare(self, sources: Sources, most: int, variants: Mapping[str, Mapping[str, Any]]) -> None:
        self._rows = self._vocabulary.tokens(sources)

    def decode(self, variant: str, tokens: int) -> list[int]:
        return [len(row) for row in self._translate(self._rows, tokens, [])]

    def answer(self, sources: Sources, most: int) -> list[list[int]]:
        return self._vocabulary.ids(self._translate(self._vocabulary.tokens(sources), most, None))

    def _translate(self, rows: list[list[str]], most: int, end: list[str] | None) -> list[list[str]]:
        done = self._translator.translate_batch(
            rows, beam_size=1, max_decoding_length=most, max_input_length=0, max_batch_size=0, end_token=end
        )
        return [result.hypotheses[0] for result in done]


def make() -> Peer:
    return CTranslate2()
