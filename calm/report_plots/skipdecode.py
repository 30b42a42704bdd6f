"""Figure of eval.skipdecode."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from .panels import Level, Panel, Series

LOOKS = {  # by method: name, colour, marker
    "skipdecode": ("SkipDecode", "#0072b2", "o"),
    "multi_layer_exit": ("multi-layer exit", "#d55e00", "s"),
    "calm_dec": ("CALM-DEC", "#009e73", "^"),
}


def skipdecode_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Quality against the layers that a token runs, then against the clock, a panel for each batch size.

    Args:
        df: columns way, method, speedup, layers, rouge_l and its interval.
        about: clocks (way, batch, decode_tokens_ratio and its interval).
    """
    full = df[df["method"] == "base"].iloc[0]
    quality = Level("full depth", full["rouge_l"], full["rouge_l_low"], full["rouge_l_high"], color="#000000")
    found = [
        Panel("by layers", "layers that a generated token runs, mean", "ROUGE-L to the reference, 95 % interval",
              _series(df, "layers"), [quality], legend="lower right")
    ]  # fmt: skip
    clocks = pd.DataFrame(list(about["clocks"]))
    for batch, part in clocks.groupby("batch") if not clocks.empty else ():
        timed = df.merge(part.drop(columns="layers"), on="way")
        found.append(
            Panel(f"by the clock, batch {batch}", "decode steps by time, over full depth's",
                  "ROUGE-L to the reference, 95 % interval", _series(timed, "decode_tokens_ratio"),
                  [quality, Level("full depth", 1.0, upright=True, color="#000000")], legend="lower right")
        )  # fmt: skip
    return found


def _series(df: pd.DataFrame, x: str) -> list[Series]:
    found = []
    for method, (name, color, marker) in LOOKS.items():
        part = df[df["method"] == method].sort_values(x)
        if not part.empty:
            quality, low, high = (list(part[f"rouge_l{end}"]) for end in ("", "_low", "_high"))
            times = [f"{each}x" for each in part["speedup"]]
            found.append(Series(name, list(part[x]), quality, low, high, color=color, marker=marker, text=times))
    return found
