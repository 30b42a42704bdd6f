"""Figure of eval.speculative."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from .panels import MARKERS, PALETTE, Level, Panel, Series

ROLES = {  # of what is timed: colour, marker
    "static": ("#7f7f7f", "X"),
    "exit": ("#d55e00", "s"),
    "draft": ("#0072b2", "o"),
}


def speculative_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Acceptance by layer, passes saved by layer and length, and the clock by batch size.

    Args:
        df: rows of eval.speculative, told apart by kind: ``simulated`` has layer, length, threshold, acceptance and
            fewer_passes with intervals; ``clock``, which may be missing, way, role, batch and decode_tokens_ratio with
            its interval.
    """
    simulated = df[df["kind"] == "simulated"]
    clock = df[df["kind"] == "clock"]
    return [_acceptance(simulated), _passes(simulated), *([] if clock.empty else [_clock(clock)])]


def _acceptance(df: pd.DataFrame) -> Panel:
    shortest = df[df["length"] == df["length"].min()]
    series = []
    for number, (threshold, part) in enumerate(shortest.groupby("threshold")):
        part = part.dropna(subset=["acceptance"]).sort_values("layer")
        middle, low, high = (
            [100 * each for each in part[f"acceptance{end}"].astype(float)] for end in ("", "_low", "_high")
        )
        name = "every word" if threshold == 0 else f"where sure: {threshold:g}"
        look: dict[str, Any] = {"color": PALETTE[number % len(PALETTE)], "marker": MARKERS[number % len(MARKERS)]}
        series.append(Series(name, list(part["layer"]), middle, low, high, **look))
    length = int(shortest["length"].iloc[0])
    title = "a draft's first word" if length == 1 else f"drafts of at most {length} words"
    return Panel(
        title, "layer whose words are drafts", "drafted words accepted (%), 95 % interval",
        series, [Level("all", 100, color="#000000")], y_range=(0, 135), legend="upper left", columns=2,
    )  # fmt: skip


def _passes(df: pd.DataFrame) -> Panel:
    series = []
    for number, (length, part) in enumerate(df.groupby("length")):
        best = part.loc[part.groupby("layer")["fewer_passes"].idxmax()].sort_values("layer")
        middle, low, high = (list(best[f"fewer_passes{end}"]) for end in ("", "_low", "_high"))
        look: dict[str, Any] = {"color": PALETTE[number % len(PALETTE)], "marker": MARKERS[number % len(MARKERS)]}
        series.append(Series(f"at most {length:g} words", list(best["layer"]), middle, low, high, **look))
    return Panel(
        "simulated, best threshold of each", "layer whose words are drafts",
        "times fewer passes of weights than full depth", series, [Level("full depth", 1.0, color="#000000")],
        y_range=(0.95, None), legend="upper right",
    )  # fmt: skip


def _clock(df: pd.DataFrame) -> Panel:
    """The best draft of each batch size beside the best static depth and exit; of one batch size, way by way."""
    if df["batch"].nunique() == 1:
        return _one_batch(df)
    series = []
    for role, (color, marker) in ROLES.items():
        for number, (way, part) in enumerate(df[df["role"] == role].groupby("way", sort=False)):
            part = part.sort_values("batch")
            middle, low, high = (list(part[f"decode_tokens_ratio{end}"]) for end in ("", "_low", "_high"))
            line = ("-", "--", ":")[number % 3]
            look: dict[str, Any] = {"color": color, "marker": marker, "line": line}
            series.append(Series(str(way), list(part["batch"]), middle, low, high, **look))
    return Panel(
        "on the clock", "batch size", "tokens/s of decoding, over full depth's", series,
        [Level("full depth", 1.0, color="#000000")], x_log=True, legend="best",
    )  # fmt: skip


def _one_batch(df: pd.DataFrame) -> Panel:
    series = []
    for role, (color, marker) in ROLES.items():
        part = df[df["role"] == role]
        middle, low, high = (list(part[f"decode_tokens_ratio{end}"]) for end in ("", "_low", "_high"))
        ways = [str(way).replace(", ", ",\n") for way in part["way"]]
        if ways:
            series.append(Series(role, ways, middle, low, high, kind="points", color=color, marker=marker))
    return Panel(
        f"on the clock, batch {df['batch'].iloc[0]:g}", "way of decoding",
        "tokens/s of decoding, over full depth's, 95 %", series, [Level("full depth", 1.0, color="#000000")],
        legend="upper right",
    )  # fmt: skip
