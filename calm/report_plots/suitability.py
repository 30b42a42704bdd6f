"""Figure of eval.suitability."""

from typing import Any

import pandas as pd

from .panels import panels


def plot_suitability(df: pd.DataFrame, axes: Any = None) -> Any:
    """What each layer says beside the last one, and how little the residual stream still turns.

    Args:
        df: a row for each layer 1..L; columns layer; agree, margin and cosine with ``_low`` and ``_high``; first,
            settled (shares of tokens, 0..1); cosine is null at layer 1.
    """
    axes = panels(2) if axes is None else axes
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
