"""Figure of eval.backfill."""

from typing import Any

import pandas as pd

from .panels import panels

FILLS = {
    "full": ("#000000", "full depth"),
    "true": ("#009e73", "true"),
    "project": ("#0072b2", "project"),
    "copy": ("#d55e00", "copy"),
    "mask": ("#cc79a7", "mask"),
    "other article": ("#7f7f7f", "another article's"),
}


def plot_backfill(df: pd.DataFrame, axes: Any = None) -> Any:
    """Ways of filling skipped layers: ROUGE-L of each, agreement by position, errors of keys and values.

    Args:
        df: rows of eval.backfill, told apart by kind: ``quality`` has variant, rouge_l and its interval; ``position``
            variant, position, equal and its interval; ``error`` variant, cache, skipped, key, value and intervals
            (``alone``: over a true cache).
    """
    axes = panels(3) if axes is None else axes
    _quality(axes[0], df[df["kind"] == "quality"])
    _agreement(axes[1], df[(df["kind"] == "position") & (df["variant"] != "full")])
    _errors(axes[2], df[df["kind"] == "error"])
    for ax in axes:
        ax.grid(alpha=0.3)
    return axes


def _quality(ax: Any, df: pd.DataFrame) -> None:
    full, others = df[df["variant"] == "full"], df[df["variant"] != "full"]
    for row in full.to_dict("records"):
        ax.axhline(row["rouge_l"], color=FILLS["full"][0], linewidth=1.2)
        ax.axhspan(row["rouge_l_low"], row["rouge_l_high"], color=FILLS["full"][0], alpha=0.08)
        ax.annotate(
            "full depth", (0.02, row["rouge_l"]), xycoords=("axes fraction", "data"), fontsize="small", va="bottom"
        )
    for place, row in enumerate(others.to_dict("records")):
        error = [[row["rouge_l"] - row["rouge_l_low"]], [row["rouge_l_high"] - row["rouge_l"]]]
        ax.errorbar(place, row["rouge_l"], yerr=error, fmt="o", color=FILLS[row["variant"]][0], capsize=4)
    ax.set_xticks(range(len(others)), list(others["variant"]))
    ax.set_xlim(-1.0, len(others) - 0.5)  # room for the line's name
    ax.set_title("quality", fontsize="medium")
    ax.set_xlabel("keys and values of skipped layers")
    ax.set_ylabel("ROUGE-L to the reference, 95 % interval")


def _agreement(ax: Any, df: pd.DataFrame) -> None:
    ax.axhline(100, color=FILLS["full"][0], linewidth=1.2)
    ax.annotate(
        "full depth", (0.98, 100), xycoords=("axes fraction", "data"), fontsize="small", va="bottom", ha="right"
    )
    for variant in dict.fromkeys(df["variant"]):
        color, label = FILLS[variant]
        part = df[df["variant"] == variant].sort_values("position")
        ax.plot(part["position"], 100 * part["equal"], color=color, marker="o", markersize=3, label=label)
        ax.fill_between(
            part["position"], 100 * part["equal_low"], 100 * part["equal_high"], color=color, alpha=0.12, linewidth=0
        )
    ax.set_ylim(0, 110)
    ax.set_title("agreement with full depth", fontsize="medium")
    ax.set_xlabel("position in full depth's answer (tokens)")
    ax.set_ylabel("tokens equal to full depth's (%), 95 % interval")
    ax.legend(frameon=False, fontsize="small", loc="lower left")


def _errors(ax: Any, df: pd.DataFrame) -> None:
    ax.axhline(0, color=FILLS["true"][0], linewidth=1.2)
    ax.annotate("true", (0.98, 0), xycoords=("axes fraction", "data"), fontsize="small", va="bottom", ha="right")
    for variant, cache in dict.fromkeys(zip(df["variant"], df["cache"], strict=True)):
        if (variant, cache) == ("copy", "true"):
            continue  # hardly another line than over its own cache
        color, label = FILLS[variant]
        part = df[(df["variant"] == variant) & (df["cache"] == cache)].sort_values("skipped")
        style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 3}
        if variant == "project" and cache == "true":  # broad and pale: most of it lies under the line of its own cache
            label, style = "project, alone", {"color": "#56b4e9", "linewidth": 5, "alpha": 0.5, "zorder": 1}
        for what, line in (("key", "-"), ("value", "--")):
            ax.plot(part["skipped"], part[what], line, label=label if what == "key" else None, **style)
            ax.fill_between(part["skipped"], part[f"{what}_low"], part[f"{what}_high"], color=color, alpha=0.12)
    ax.set_ylim(bottom=-0.05)
    ax.set_title("keys (solid) and values (dashed)", fontsize="medium")
    ax.set_xlabel("layers above the exit")
    ax.set_ylabel("|written - true| / |true|, 95 % interval")
    ax.legend(frameon=False, fontsize="small", loc="center", bbox_to_anchor=(0.55, 0.64), ncols=2)
