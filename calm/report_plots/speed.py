"""Figure of measured speed beside quality: exits, depths fixed for every token, and full depth of the same engine."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..metrics import median_interval
from ..plotting import color_of
from .panels import BASELINE, Level, Panel, Series

FIXED = "static depth"


def speed_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Quality against speed, a panel for each batch size.

    Args:
        df: columns batch, name (a measure, or static-2 ...), depth (layers; null: exits), ratio to full depth with
            ratio_low and ratio_high, rouge_l with rouge_l_low and rouge_l_high.
        about: clock, the name of what was timed; full, full_low, full_high: ROUGE-L of full depth.
    """
    levels = [
        Level("full depth", about["full"], about["full_low"], about["full_high"], color="#000000"),
        Level("", 1.0, upright=True, color="#000000"),
    ]
    found, low, high = [], float(df["rouge_l_low"].min()), float(df["rouge_l_high"].max())
    for batch, part in df.groupby("batch"):
        fixed = part[part["depth"].notna()].sort_values("depth")
        series = [_points(FIXED, fixed, BASELINE, "s")] if len(fixed) else []
        series += [
            _points(str(row["name"]), pd.DataFrame([row]), color_of(str(row["name"])), "o")
            for row in part[part["depth"].isna()].to_dict("records")
        ]
        found.append(
            Panel(f"{about['clock']}, batch {batch}", "times as fast as full depth", "ROUGE-L, 95 % interval", series,
                  levels, y_range=(low - 0.3 * (high - low), high + 0.1 * (high - low)), legend="lower left",
                  columns=2)
        )  # fmt: skip
    return found


def _points(name: str, part: pd.DataFrame, color: str, marker: str) -> Series:
    depths = [f"{depth:.0f}" for depth in part["depth"]] if part["depth"].notna().all() else None
    return Series(
        name, list(part["ratio"]), list(part["rouge_l"]), list(part["rouge_l_low"]), list(part["rouge_l_high"]),
        list(part["ratio_low"]), list(part["ratio_high"]), kind="points", color=color, marker=marker, text=depths,
    )  # fmt: skip


def ratios(samples: pd.DataFrame, clock: str, against: str = "full") -> pd.DataFrame:
    """How many times as fast as ``against`` each name was: the median of the repeats, and its 95 % interval.

    Numerator and denominator are of the same repeat, in which all names were timed in turn. The interval is of order
    statistics, so it supposes no distribution; below six repeats it is from the least to the most, which is less sure.

    Args:
        samples: of eval.throughput: kind, batch, name, round; many_s, few_s (kind clock); tokens, seconds (session).
        clock: ``decode``: what tokens after the first few take; ``session``: whole answers, encoder and host included.

    Returns:
        Columns batch, name, ratio, ratio_low, ratio_high.
    """
    part = samples[samples["kind"] == ("clock" if clock == "decode" else "session")]
    seconds = part["many_s"] - part["few_s"] if clock == "decode" else part["seconds"] / part["tokens"]
    part = part.assign(took=seconds)
    other = part[part["name"] == against][["batch", "round", "took"]]
    paired = part.merge(other, on=["batch", "round"], suffixes=("", "_other"))
    paired = paired.assign(ratio=paired["took_other"] / paired["took"])
    found: pd.DataFrame = (
        paired.groupby(["batch", "name"])["ratio"]
        .agg(
            ratio="median",
            ratio_low=lambda each: median_interval(each)[0],
            ratio_high=lambda each: median_interval(each)[1],
        )
        .reset_index()
    )
    return found
