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
    axes = _axes(3) if axes is None else axes
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
