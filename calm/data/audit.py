"""What a corpus looks like to a tokenizer: lengths, truncation, unknown tokens; and the audit as text."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..config import DataConfig
from ..records import Example
from .splits import sample
from .text import decode_ids, text_ids

logger = logging.getLogger(__name__)

_TRAIN_ROWS = 5_000  # the statistics of train are a sample of this size
_CHUNK = 1_000
_UNCASED = "uncased tokenizer: capitals are read as small letters and never written"


def article_filter(rows: Sequence[Example], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[Example]:
    """Rows whose source has fewer than ``limit`` tokens, prefix and EOS not counted."""
    kept: list[Example] = []
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(
            [row.source for row in chunk], add_special_tokens=False
        )
        kept += [row for row, encoding in zip(chunk, encodings, strict=True) if len(encoding.ids) < limit]
    return kept


def _quantiles(lengths: list[int], limit: int) -> dict[str, int | float]:
    """Median, 95 % and maximum, and the share of rows longer than ``limit`` (EOS counted)."""
    ordered = sorted(lengths)
    return {
        "median": ordered[len(ordered) // 2],
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "max": ordered[-1],
        "truncated": sum(n > limit for n in ordered) / len(ordered),
    }


def token_audit(
    splits: Mapping[str, Sequence[Example]], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> dict[str, Any]:
    """Per split: token lengths before truncation (EOS included), and the share of unknown tokens, warned about.

    Every row of the evaluation splits and at most 5,000 of train are looked at.
    """
    result: dict[str, Any] = {}
    prefix = len(text_ids(tokenizer, config.source_prefix))
    uncased = decode_ids(tokenizer, text_ids(tokenizer, "A")) == "a"
    if uncased:
        logger.info("%s", _UNCASED)
    for name, rows in splits.items():
        rows = sample(rows, _TRAIN_ROWS) if name == "train" else rows
        if not rows:
            continue
        sources = [text_ids(tokenizer, row.source) for row in rows]
        targets = [text_ids(tokenizer, row.target) for row in rows]
        unknown = _unknown(rows, sources, targets, tokenizer)
        result[name] = {
            "rows": len(rows),
            "source": _quantiles([len(ids) + prefix + 1 for ids in sources], config.max_source_tokens),
            "target": _quantiles([len(ids) + 1 for ids in targets], config.max_target_tokens),
            **unknown,
            "uncased": uncased,
        }
        if unknown["unk_share"] > 0:
            logger.warning(
                "%s: %.3g %% of the tokens are unknown to the tokenizer, in %d of %d rows; characters: %s",
                name, 100 * unknown["unk_share"], unknown["unk_rows"], len(rows), unknown["unk_characters"],
            )  # fmt: skip
    return result


def _unknown(
    rows: Sequence[Example], sources: list[list[int]], targets: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Share of unk among all tokens, rows that have one, and the commonest characters behind them."""
    unk = tokenizer.unk_token_id
    total = unknown = affected = 0
    characters: Counter[str] = Counter()
    for row, source, target in zip(rows, sources, targets, strict=True):
        count = source.count(unk) + target.count(unk)
        total += len(source) + len(target)
        unknown += count
        affected += count > 0
        if count and affected <= _CHUNK:
            characters.update(
                char for char in set(row.source + row.target) if unk in text_ids(tokenizer, char) and not char.isspace()
            )
    common = "".join(char for char, _ in characters.most_common(20))
    return {"unk_share": unknown / max(1, total), "unk_rows": affected, "unk_characters": common}


def format_audit(audit: Mapping[str, Any]) -> str:
    """The audit as a few lines for people."""
    head = " · ".join(str(audit[key]) for key in ("corpus", "release", "origin") if key in audit)
    lines = [f"corpus {head}: {audit['read']:,} rows read, hash {audit['content_hash'][:12]}"]
    for name, count in audit["rows"].items():
        line = f"  {name:<12}{count:>9,} rows {audit['families'][name]:>9,} families"
        tokens = audit.get("tokens", {}).get(name)
        if tokens:
            line += "".join(
                f" · {side} tokens median {tokens[side]['median']}, p95 {tokens[side]['p95']}, "
                f"max {tokens[side]['max']}, {100 * tokens[side]['truncated']:.1f} % truncated"
                for side in ("source", "target")
            )
            line += f" · unknown {100 * tokens['unk_share']:.3g} %"
        lines.append(line)
    overlap = audit["overlap"]
    lines.append(f"  overlap between splits: {overlap['families']} families, {overlap['texts']} texts")
    for key in ("dropped", "cleaned"):
        lines += [f"  {key}: {count:,} · {reason}" for reason, count in audit[key].items()]
    if audit["duplicate_ids"]:
        lines.append(f"  repeated ids: {audit['duplicate_ids']:,}")
    if any(told["uncased"] for told in audit.get("tokens", {}).values()):
        lines.append(f"  {_UNCASED}")
    return "\n".join(lines)
