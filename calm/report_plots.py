"""Figures of the experiments: a DataFrame in, Axes out. No file is read or written here."""

from typing import Any

import pandas as pd

from .plotting import color_of

RULES = {
    "own": ("#000000", "--", "o"),
    "sync": ("#d55e00", "-", "s"),
    "quantile 0.9": ("#0072b2", "-", "^"),
    "quantile 0.5": ("#56b4e9", "-", "v"),
}
SOURCES = (("#56b4e9", "o"), ("#0072b2", "s"), ("#009e73", "^"), ("#e69f00", "v"), ("#d55e00", "D"), ("#cc79a7", "P"))
OTHERS = ("#009e73", "#cc79a7", "#e69f00")


def plot_slowest_row(df: pd.DataFrame, num_layers: int, axes: Any = None) -> Any:
    """Where tokens stop against the batch size, a panel for each row of the table; last, the share of hard rows.

    Args:
        df: columns row, batch, hard_share (null: drawn plainly), rule, layers, layers_low, layers_high.
    """
    plain, mixed = df[df["hard_share"].isna()], df[df["hard_share"].notna() & (df["rule"] == "sync")]
    names = list(dict.fromkeys(df["row"]))
    axes = _axes(len(names) + (not mixed.empty)) if axes is None else axes
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


def plot_length(df: pd.DataFrame, axes: Any = None) -> Any:
    """Layers skipped by quartile of length; what a cost table predicts by answer length; layers skipped by position.

    Args:
        df: column part. Of part records: row, by (source, output, position), group, layers_skipped (0..1) and its
            _low and _high. Of part predicted, which may be missing: source, batch, tokens, call_ratio and its _low
            and _high; drawn is the largest batch.
    """
    kept, told = df[df["part"] == "records"], df[df["part"] == "predicted"]
    axes = _axes(2 + (not told.empty)) if axes is None else axes
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


def _axes(count: int) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(4.2 * count, 4.2), layout="constrained").subplots(1, count, squeeze=False)[0]
