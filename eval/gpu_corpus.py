"""Debian's package descriptions for a machine that reaches no mirror: texts and token ids, as few bytes as is simple.

    python -m eval.gpu_corpus .gpu/debian

``rows.jsonl.xz`` holds the rows as calm.data has them before they are cleaned and split, ``tokens.safetensors.xz`` the
ids of the texts of all splits by the tokenizer of ``MODEL`` (calm.data.tokenised), ``corpus.json`` how much there is of
what. There, ``unpack`` fills the cache from which ``data=debian`` reads, so that splits and hashes are those of every
other machine.
"""

import json
import lzma
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from calm.checkpoint import read_json, write_atomic, write_json
from calm.config import DataConfig
from calm.data import debian, load_corpus, tokenised
from calm.data.cache import cache_root, cached_rows
from calm.errors import CalmError, DataError
from calm.models.folder import SETTINGS
from calm.records import Example

from .common import say

MODEL = Path(__file__).resolve().parents[1] / "results" / "debian_tiny" / "model"
ROWS, TOKENS, ABOUT = "rows.jsonl.xz", "tokens.safetensors.xz", "corpus.json"


@dataclass(frozen=True)
class Unpacked:
    """Settings that read the corpus, and the file of its token ids."""

    data: DataConfig
    tokens: Path


def settings(cache: Path | None = None) -> DataConfig:
    """The corpus as ``MODEL`` was trained on it, with the references as targets."""
    data = DataConfig.from_values(read_json(MODEL / SETTINGS)["data"])
    return replace(data, targets=None, cache_dir=None if cache is None else str(cache))


def pack(rows: Sequence[Example], info: dict[str, str], folder: Path, cache: Path | None = None) -> dict[str, Any]:
    """Write the three files; returns what ``corpus.json`` tells.

    Args:
        info: where the rows are from.
        cache: of the rows, which are read once more to be split.

    Raises:
        CheckpointError, DataError: the disk refuses; a split is left empty.
    """
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps([row.id, row.family, row.source, row.target], ensure_ascii=False) for row in rows)
    write_atomic(folder / ROWS, lzma.compress("\n".join(lines).encode()))
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    corpus = load_corpus(settings(cache))
    plain = folder / Path(TOKENS).stem
    texts = chain.from_iterable(tokenised.texts_of(each, settings().source_prefix) for each in corpus.splits.values())
    count = tokenised.write(plain, tokenizer, texts)
    write_atomic(folder / TOKENS, lzma.compress(plain.read_bytes()))
    plain.unlink()
    about = {
        "corpus": corpus.name,
        "content_hash": corpus.content_hash,
        "info": info,
        "rows": corpus.audit["rows"],
        "texts": count,
        "vocabulary": len(tokenizer),
    }
    write_json(folder / ABOUT, about)
    return about


def unpack(folder: Path, where: Path) -> Unpacked:
    """Put what was brought along into a folder of caches.

    Raises:
        DataError: it was not brought along, or is damaged.
    """
    missing = [name for name in (ROWS, TOKENS, ABOUT) if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder / missing[0]} is missing; make gpu-carry writes it where apt reaches a Debian mirror")

    def build(info: dict[str, str]) -> Iterator[Example]:
        info.update(read_json(folder / ABOUT)["info"])
        with lzma.open(folder / ROWS, "rt", encoding="utf-8") as file:
            for line in file:
                yield Example(*json.loads(line))

    try:
        cached_rows(where, debian.KEY, build)
        tokens = where / Path(TOKENS).stem
        with lzma.open(folder / TOKENS) as packed, open(tokens, "wb") as file:
            shutil.copyfileobj(packed, file)
    except CalmError:
        raise
    except (lzma.LZMAError, EOFError, ValueError, TypeError) as error:
        raise DataError(f"{folder} is damaged ({error}); make gpu-carry writes it anew") from None
    return Unpacked(settings(where), tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    words = sys.argv[1:] if argv is None else argv
    folder = Path(words[0] if words else ".gpu/debian")
    try:
        rows, info = cached_rows(cache_root(None), debian.KEY, debian.build)
        about = pack(rows, info, folder)
    except (CalmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum((folder / name).stat().st_size for name in (ROWS, TOKENS, ABOUT))
    say(f"{folder}: {sum(about['rows'].values())} rows, ids of {about['texts']} texts, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
