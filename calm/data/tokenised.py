"""Token ids of texts, made once and kept in a file: a fast device must not wait for a tokenizer on one core.

    write(Path("tokens.safetensors"), tokenizer, texts_of(corpus.splits["train"], settings.source_prefix))
    python -m train tokenised=tokens.safetensors ...

Texts (sources with their prefix) are found by their hash, so rows may be picked, ordered and cut as anybody likes, and
a text that is not there is tokenised when it is met.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b, sha256
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..checkpoint import load_tensors, save_tensors
from ..errors import ConfigError
from ..records import Example
from .text import KNOWN, text_ids

_NARROW = 2**16  # words that two bytes can tell apart


class KnownTexts:
    """Ids by text: ``keys`` (texts,) int64, ``ends`` (texts,) into ``ids``, which holds one text after another."""

    def __init__(self, keys: Tensor, ends: Tensor, ids: Tensor) -> None:
        self._place = {key: place for place, key in enumerate(keys.tolist())}
        self._ends, self._ids = [0, *ends.tolist()], ids

    def __len__(self) -> int:
        return len(self._place)

    def get(self, text: str) -> list[int] | None:
        """Ids of ``text`` without EOS; None where they are not known."""
        place = self._place.get(_key(text))
        if place is None:
            return None
        found: list[int] = self._ids[self._ends[place] : self._ends[place + 1]].tolist()
        return found


def texts_of(rows: Iterable[Example], source_prefix: str) -> Iterator[str]:
    """Sources, with the prefix that the model puts before them, and targets."""
    for row in rows:
        yield source_prefix + row.source
        yield row.target


def write(path: Path, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> int:
    """Ids of every text, each text once; returns how many texts there are.

    Raises:
        CheckpointError: the disk refuses.
    """
    found = {_key(text): text_ids(tokenizer, text) for text in dict.fromkeys(texts)}
    ends = torch.tensor([len(ids) for ids in found.values()], dtype=torch.int64).cumsum(0)
    kind = torch.uint16 if len(tokenizer) <= _NARROW else torch.int32
    tensors = {
        "keys": torch.tensor(list(found), dtype=torch.int64),
        "ends": ends,
        "ids": torch.tensor([token for ids in found.values() for token in ids], dtype=kind),
        "tokenizer": _hash(tokenizer),
    }
    save_tensors(path, tensors)
    return len(found)


def use(path: Path, tokenizer: PreTrainedTokenizerBase) -> KnownTexts:
    """Let ``tokenizer`` take the ids of such a file wherever it meets one of its texts.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
        ConfigError: another tokenizer made it.
    """
    tensors = load_tensors(path)
    if set(tensors) != {"keys", "ends", "ids", "tokenizer"}:
        raise ConfigError(f"{path} holds no token ids of texts; calm.data.tokenised.write makes such a file")
    if not torch.equal(tensors["tokenizer"], _hash(tokenizer)):
        raise ConfigError(f"{path} was made by another tokenizer than the model's; make it anew")
    known = KnownTexts(tensors["keys"], tensors["ends"], tensors["ids"])
    setattr(tokenizer, KNOWN, known)
    return known


def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True)


def _hash(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Of all that decides which ids a text has, (32,) bytes."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    deciding = {name: parts.get(name) for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
    return torch.frombuffer(
        bytearray(sha256(json.dumps(deciding, sort_keys=True).encode()).digest()), dtype=torch.uint8
    )
