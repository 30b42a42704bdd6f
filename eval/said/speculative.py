"""What eval.speculative found."""

from collections.abc import Mapping, Sequence
from typing import Any

from .words import BUSY, listed, number, told

Row = Mapping[str, Any]


def said(summary: Mapping[str, Any]) -> list[str]:
    """The best draft of dev as simulated, whether answers were full depth's, the clock beside, and the peer's."""
    kinds = ("chosen", "simulated", "decoded", "clock", "peer")
    of = {kind: [row for row in summary["rows"] if row["kind"] == kind] for kind in kinds}
    found = [
        *_simulated(of["simulated"], of["chosen"], summary),
        *_decoded(of["decoded"]),
        *_clock(of["clock"]),
        *_peer(of["peer"]),
    ]
    return [*found, *([BUSY] if summary["noisy"] else [])]


def _simulated(rows: Sequence[Row], chosen: Sequence[Row], summary: Mapping[str, Any]) -> list[str]:
    ways = [row["way"] for row in chosen]
    best = next((row for row in rows if row["way"] in ways[:1]), None)
    if best is None:
        return []
    accepted = "no word is drafted" if best["acceptance"] is None else (
        f"{told(best, 'acceptance', 1, 100)} % of its words are accepted"
    )  # fmt: skip
    return [
        f"Of {len(rows)} drafts, simulated, {_name(best)}, the best on dev: {accepted}, a round says "
        f"{told(best, 'words_a_round')} words, a word takes {number(best['layer_passes'])} passes of a layer (full "
        f"depth {summary['num_layers']}) and {number(best['head_passes'])} of the head, which weighs "
        f"{number(summary['head_layers'], 1)} layers; by passes that is {told(best, 'fewer_passes')} times as cheap, "
        "which is a bound and no clock."
    ]


def _decoded(rows: Sequence[Row]) -> list[str]:
    found = []
    for key in dict.fromkeys((row["decoder"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["decoder"], row["dtype"]) == key]
        compared, changed = sum(row["articles"] for row in mine), sum(row["changed"] for row in mine)
        if not changed:
            text = f"all {compared} are full depth's, word for word"
        elif mine[0]["near_ties"] is None:
            text = f"{compared - changed} of {compared} are full depth's, word for word"
        else:
            tied = sum(row["near_ties"] for row in mine)
            text = f"{changed} of {compared} are not full depth's, {tied} of them at a near tie"
        found.append(f"{key[0]} in {key[1]}: {text}")
    return [f"Answers of {'; '.join(found)}."] if found else []


def _clock(rows: Sequence[Row]) -> list[str]:
    found = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        mine = [row for row in rows if row["batch"] == batch]
        named = [row for row in mine if row["role"] == "draft"]
        for role in ("exit", "static"):  # of its rivals the best
            rivals = [row for row in mine if row["role"] == role]
            named += sorted(rivals, key=lambda row: -row["decode_tokens_ratio"])[:1]
        each = [f"{row['way']} {told(row, 'decode_tokens_ratio')}" for row in named]
        if each:
            found.append(f"batch {batch}: {listed(each)}")
    return [f"Decode steps by the clock, full depth's being 1: {'; '.join(found)}."] if found else []


def _peer(rows: Sequence[Row]) -> list[str]:
    mine = [row for row in rows if row["layer"] is not None]
    if not mine:
        return []
    best = max(mine, key=lambda row: row["tokens_ratio"])
    return [
        f"transformers' own early-exit drafts run {told(best, 'tokens_ratio')} times as fast as its greedy search at "
        f"best (layer {best['layer']:g}, batch 1)."
    ]


def _name(row: Row) -> str:
    """A draft in words."""
    sure = "" if row["measure"] is None else f", while {row['measure']} is {row['threshold']:g} or more"
    return f"layer {row['layer']:g} with at most {row['length']:g} words{sure}"
