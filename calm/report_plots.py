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


def plot_suitability(df: pd.DataFrame, axes: Any = None) -> Any:
    """What each layer says beside the last one, and how little the residual stream still turns.

    Args:
        df: a row for each layer 1..L; columns layer; agree, margin and cosine with ``_low`` and ``_high``; first,
            settled (shares of tokens, 0..1); cosine is null at layer 1.
    """
    axes = _axes(2) if axes is None else axes
    layers, last = df["layer"], int(df["layer"].max())
    axes[0].bar(layers - 0.2, 100 * df["first"], 0.4, color="#56b4e9", label="oracle: first layer that agrees")
    axes[0].bar(layers + 0.2, 100 * df["settled"], 0.4, color="#e69f00", label="and from which on all agree")
    _band(axes[0], df, "agree", 100, "#000000", "o", "says the full model's word")
    axes[0].set_ylabel("share of tokens (%), 95 % interval")
    axes[0].set_ylim(0, 135)
    axes[0].set_yticks(range(0, 101, 20))
    axes[0].set_title("what each layer would say", fontsize="medium")
    _band(axes[1], df, "cosine", 1, "#d55e00", "s", "state: cosine with the layer below")
    _band(axes[1], df, "margin", 1, "#0072b2", "^", "softmax: top-1 minus top-2 probability")
    axes[1].set_ylabel("mean confidence, 95 % interval")
    axes[1].set_ylim(0, 1.35)
    axes[1].set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes[1].set_title("how sure it is", fontsize="medium")
    for ax in axes:
        ax.axvline(last, color="#7f7f7f", linewidth=1.0, zorder=0)
        ax.annotate(
            "full depth", (last, 0.98), xycoords=("data", "axes fraction"), fontsize="small", rotation=90,
            ha="right", va="top",
        )  # fmt: skip
        ax.set_xlabel("decoder layer")
        ax.set_xticks(layers if last <= 12 else layers[1::2])
        ax.grid(axis="y", alpha=0.3)
        ax.legend(frameon=False, fontsize="small", loc="upper left")
    return axes


def _band(ax: Any, df: pd.DataFrame, name: str, scale: int, color: str, marker: str, label: str) -> None:
    points = df.dropna(subset=[name])
    low, high = (scale * points[f"{name}_{end}"].astype(float) for end in ("low", "high"))
    ax.plot(points["layer"], scale * points[name], color=color, marker=marker, markersize=4, label=label)
    ax.fill_between(points["layer"], low, high, color=color, alpha=0.2)


def _layers(ax: Any, title: str, below: str, num_layers: int) -> None:
    ax.axhline(num_layers, color="#7f7f7f", linewidth=1.0)
    ax.annotate("full depth", (0.02, num_layers), xycoords=("axes fraction", "data"), fontsize="small", va="bottom")
    ax.set_title(title, fontsize="medium")
    ax.set_xlabel(below)
    ax.set_ylim(0, 1.12 * num_layers)
    ax.grid(alpha=0.3)


def _axes(count: int) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(4.2 * count, 4.2), layout="constrained").subplots(1, count, squeeze=False)[0]
