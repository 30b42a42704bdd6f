"""Figures: a DataFrame in, Axes out. No file is read or written here."""

from typing import Any

import pandas as pd

# one colour per kind of row in every figure, told apart also by readers who see red and green alike
COLORS = {
    "full": "#000000",
    "static-half": "#7f7f7f",
    "lead-1": "#bbbbbb",
    "oracle": "#cc79a7",
    "softmax": "#0072b2",
    "state": "#d55e00",
    "classifier": "#009e73",
    "max_prob": "#56b4e9",
    "entropy": "#e69f00",
    "agreement": "#a6761d",
}


def color_of(row: str) -> str:
    """Of a row of Table 1; ``softmax`` and ``softmax@0.85`` share theirs."""
    return COLORS.get(row.partition("@")[0], "#444444")


def plot_exit_layers(df: pd.DataFrame, ax: Any = None) -> Any:
    """Share of tokens by the layer that they left at, one line per row.

    Args:
        df: columns row, layer (1..L), share (0..1), in the order of drawing.
    """
    ax = ax or _axes()
    for name, part in df.groupby("row", sort=False):
        style = {"linestyle": "--", "marker": "o", "markerfacecolor": "white"} if "@" in str(name) else {"marker": "o"}
        ax.plot(part["layer"], 100 * part["share"], color=color_of(str(name)), label=name, markersize=4, **style)
    ax.set_xlabel("layer that gave the token")
    ax.set_ylabel("share of tokens (%)")
    ax.set_xticks(sorted(df["layer"].unique()))
    ax.set_ylim(bottom=0)
    ax.grid(axis="y", alpha=0.3)
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def plot_speed_quality(df: pd.DataFrame, ax: Any = None) -> Any:
    """ROUGE-L with its interval against the share of decoder layers skipped; filled where certified.

    Args:
        df: columns row, layers_skipped, rouge_l, rouge_l_low, rouge_l_high (0..1), tolerance (null unless certified).
    """
    ax = ax or _axes()
    for row in df.dropna(subset=["layers_skipped"]).to_dict("records"):
        name, color = str(row["row"]), color_of(str(row["row"]))
        below, above = row["rouge_l"] - row["rouge_l_low"], row["rouge_l_high"] - row["rouge_l"]
        filled = not pd.isna(row["tolerance"])
        ax.errorbar(
            100 * row["layers_skipped"],
            row["rouge_l"],
            yerr=[[max(0.0, below)], [max(0.0, above)]],
            fmt="s" if "@" in name else "o",
            color=color,
            markerfacecolor=color if filled else "white",
            capsize=3,
            label=f"{name} (certified)" if filled else name,
        )
    ax.set_xlabel("decoder layers skipped (%)")
    ax.set_ylabel("ROUGE-L to the reference, 95 % interval")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def _axes() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(7.5, 4), layout="constrained").subplots()
