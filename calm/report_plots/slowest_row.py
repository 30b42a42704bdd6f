"""Figure of eval.slowest_row."""

from typing import Any

import pandas as pd

from ..plotting import color_of
from .panels import panels

RULES = {
    "own": ("#000000", "--", "o"),
    "sync": ("#d55e00", "-", "s"),
    "quantile 0.9": ("#0072b2", "-", "^"),
    "quantile 0.5": ("#56b4e9", "-", "v"),
}
OTHERS = ("#009e73", "#cc79a7", "#e69f00")


def plot_slowest_row(df: pd.DataFrame, num_layers: int, axes: Any = None) -> Any:
    """Where tokens stop against the batch size, a panel for each row of the table; last, the share of hard rows.

    Args:
        df: columns row, batch, hard_share (null: drawn plainly), rule, layers, layers_low, layers_high.
    """
    plain, mixed = df[df["hard_share"].isna()], df[df["hard_share"].notna() & (df["rule"] == "sync")]
    names = list(dict.fromkeys(df["row"]))
    axes = panels(len(names) + (not mixed.empty)) if axes is None else axes
    for ax, name in zip(axes, names, strict=False):
        part = plain[plain["row"] == name]
        for number, rule in enumerate(dict.fromkeys(part["rule"])):
            color, line, marker = RULES.get(rule, (OTHERS[number % len(OTHERS)], "-", "D"))
            points = part[part["rule"] == rule].sort_values("batch")
            ax.plot(points["batch"], points["layers"], line, color=color, marker=marker, markersize=4, label=rule)
            ax.fill_between(points["batch"], points["layers_low"], points["layers_high"], color=color, alpha=0.15)
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(part["batch"].unique()), [str(size) for size in sorted(part["batch"].unique())])
        _layers(ax, f"{name}: random batches", "rows of a batch", num_layers)
    if not mixed.empty:
        ax = axes[len(names)]
        for (name, batch), part in mixed.groupby(["row", "batch"], sort=False):
            points, line = part.sort_values("hard_share"), "-" if batch == mixed["batch"].max() else ":"
            ax.plot(
                100 * points["hard_share"], points["layers"], line, color=color_of(str(name)), marker="o",
                markersize=4, label=f"{name}, batch {batch}",
            )  # fmt: skip
        _layers(ax, "sync: mixtures", "hard rows in a batch (%)", num_layers)
    for ax in axes[: len(names)]:
        ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0.0, 0.89))
    for ax in axes[len(names) :]:
        ax.legend(frameon=False, fontsize="small", loc="lower right")
    axes[0].set_ylabel("layers that a token runs, mean and 95 % interval")
    return axes


def _layers(ax: Any, title: str, below: str, num_layers: int) -> None:
    ax.axhline(num_layers, color="#7f7f7f", linewidth=1.0)
    ax.annotate("full depth", (0.02, num_layers), xycoords=("axes fraction", "data"), fontsize="small", va="bottom")
    ax.set_title(title, fontsize="medium")
    ax.set_xlabel(below)
    ax.set_ylim(0, 1.12 * num_layers)
    ax.grid(alpha=0.3)
