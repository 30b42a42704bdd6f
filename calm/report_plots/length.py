"""Figure of eval.length."""

from typing import Any

import pandas as pd

from ..plotting import color_of
from .panels import panels

SOURCES = (("#56b4e9", "o"), ("#0072b2", "s"), ("#009e73", "^"), ("#e69f00", "v"), ("#d55e00", "D"), ("#cc79a7", "P"))


def plot_length(df: pd.DataFrame, axes: Any = None) -> Any:
    """Layers skipped by quartile of length; what a cost table predicts by answer length; layers skipped by position.

    Args:
        df: column part. Of part records: row, by (source, output, position), group, layers_skipped (0..1) and its
            _low and _high. Of part predicted, which may be missing: source, batch, tokens, call_ratio and its _low
            and _high; drawn is the largest batch.
    """
    kept, told = df[df["part"] == "records"], df[df["part"] == "predicted"]
    axes = panels(2 + (not told.empty)) if axes is None else axes
    lines = {"source": ("-", "o", 0.06), "output": ("--", "s", -0.06)}
    for (name, kind), part in kept[kept["by"].isin(lines)].groupby(["row", "by"], sort=False):
        style, marker, aside = lines[str(kind)]
        middle = 100 * part["layers_skipped"]
        error = [middle - 100 * part["layers_skipped_low"], 100 * part["layers_skipped_high"] - middle]
        axes[0].errorbar(
            part["group"] + aside, middle, yerr=error, linestyle=style, marker=marker, markersize=4, capsize=2,
            color=color_of(str(name)), label=f"{name}, {kind}",
        )  # fmt: skip
    axes[0].set_xticks([1, 2, 3, 4], ["shortest", "2nd", "3rd", "longest"])
    _skipped(axes[0], "by length", "quartile of tokens, source or full answer")
    axes[0].legend(frameon=False, fontsize="small", ncols=2, loc="upper center")
    if not told.empty:
        _gain(axes[1], told[told["batch"] == told["batch"].max()])
    for name, part in kept[kept["by"] == "position"].groupby("row", sort=False):
        color = color_of(str(name))
        axes[-1].plot(part["group"], 100 * part["layers_skipped"], color=color, marker="o", markersize=3, label=name)
        band = 100 * part["layers_skipped_low"], 100 * part["layers_skipped_high"]
        axes[-1].fill_between(part["group"], *band, color=color, alpha=0.15)
    _skipped(axes[-1], "by position", "token of the answer")
    axes[-1].legend(frameon=False, fontsize="small", ncols=3, loc="upper center")
    return axes


def _gain(ax: Any, told: pd.DataFrame) -> None:
    for number, (source, part) in enumerate(told.groupby("source")):
        points, (color, marker) = part.sort_values("tokens"), SOURCES[number % len(SOURCES)]
        ax.plot(points["tokens"], points["call_ratio"], color=color, marker=marker, markersize=4, label=f"{source:g}")
        ax.fill_between(points["tokens"], points["call_ratio_low"], points["call_ratio_high"], color=color, alpha=0.15)
    ax.axhline(1.0, color="#7f7f7f", linewidth=1.0)
    ax.annotate(
        "full depth", (0.98, 1.0), xycoords=("axes fraction", "data"), fontsize="small", va="bottom", ha="right"
    )
    lengths = sorted(told["tokens"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:g}" for length in lengths])
    ax.set_ylim(min(0.95, 0.98 * told["call_ratio"].min()), 1.12 * max(1.0, told["call_ratio"].max()))
    ax.set_title(f"whole call, batch {told['batch'].max():g}: predicted, not timed", fontsize="medium")
    ax.set_xlabel("tokens of the answer")
    ax.set_ylabel("full depth / exits, by a measured cost table")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize="small", title="source tokens", title_fontsize="small", ncols=3, loc="upper left")


def _skipped(ax: Any, title: str, below: str) -> None:
    ax.axhline(0.0, color="#7f7f7f", linewidth=1.0)
    ax.annotate("full depth", (0.02, 0.0), xycoords=("axes fraction", "data"), fontsize="small", va="bottom")
    ax.set_title(f"recorded answers {title}", fontsize="medium")
    ax.set_xlabel(below)
    ax.set_ylabel("layers skipped (%), mean and 95 % interval")
    ax.set_ylim(-2, 110)
    ax.set_yticks(range(0, 101, 20))
    ax.grid(alpha=0.3)
