"""Figures: a DataFrame in, Axes out. No file is read or written here."""

from textwrap import fill
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


MARKERS = {"softmax": "o", "state": "s", "classifier": "^", "max_prob": "v", "entropy": "D", "agreement": "P"}


def marker_of(row: str) -> str:
    """Of a row's measure, so that lines are told apart without their colours."""
    return MARKERS.get(row.partition("\n")[0].partition("@")[0], "X")


def color_of(row: str) -> str:
    """Of a row of Table 1; ``softmax`` and ``softmax@0.85`` share theirs, and so do lines below the first."""
    return COLORS.get(row.partition("\n")[0].partition("@")[0], "#444444")


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


CHARACTERS_PER_INCH = 13  # of a title
HATCHES = {
    "own": "",
    "compact": "///",
    "rebatch": "\\\\\\",
    "auto": "xx",
    "sync": "...",
    "quantile": "++",
    "lockstep": "oo",
}
BAR = 0.8  # of the room of a group
PANEL, BAR_ROOM = 3.3, 0.27  # inches: of a panel at least, and of a bar with what stands on it
NOTE_SIZE = 6.5  # points, of what stands on a bar
PANEL_POINTS = 225  # height of a panel, for room above its bars


def plot_serving(df: pd.DataFrame, value_label: str, title: str = "", axes: Any = None) -> Any:
    """Bars of the same rows side by side, one panel each for the paper and every batch size of ours.

    Panels have scales of their own: what can be compared is within a panel, and its ratio to full depth is on the bar.

    Args:
        df: columns panel, row (full, softmax, ...), rule (null: one bar), value, note (on the bar), static (value of
            static depth of the same mean, a line across the bar; null: none), in the order of drawing.
        value_label: of the vertical axis, with its unit.
    """
    panels = list(dict.fromkeys(df["panel"]))
    room = max(PANEL, BAR_ROOM * int(df.groupby("panel").size().max()))
    axes = _row_of_axes(len(panels), title, room) if axes is None else axes
    for ax, panel in zip(axes, panels, strict=True):
        _plot_panel(df[df["panel"] == panel], ax)
        ax.set_title(panel, fontsize="medium")
    axes[0].set_ylabel(value_label)
    _serving_legend(df, axes[-1])
    return axes


def _plot_panel(part: pd.DataFrame, ax: Any) -> None:
    rows = list(dict.fromkeys(part["row"]))
    top = 0.0
    for place, row in enumerate(rows):
        bars = part[part["row"] == row].to_dict("records")
        width, upright = BAR / len(bars), len(bars) > 1
        for number, bar in enumerate(bars):
            x = place + (number - (len(bars) - 1) / 2) * width
            hatch = HATCHES.get(str(bar["rule"]), "")
            ax.bar(x, bar["value"], 0.94 * width, color=color_of(row), hatch=hatch, edgecolor="white", linewidth=0.4)
            highest = bar["value"]
            if not pd.isna(bar["static"]):
                ax.plot([x - width / 2, x + width / 2], [bar["static"]] * 2, color="#e6007e", linewidth=1.6)
                highest = max(highest, bar["static"])
            ax.annotate(
                bar["note"], (x, highest), (0, 3), textcoords="offset points", ha="center", va="bottom",
                fontsize=NOTE_SIZE, rotation=90 if upright else 0, linespacing=1.1,
            )  # fmt: skip
            lines = str(bar["note"]).split("\n")
            points = 0.62 * NOTE_SIZE * max(map(len, lines)) if upright else 1.4 * NOTE_SIZE * len(lines)
            top = max(top, highest / (1 - (points + 8) / PANEL_POINTS))
    ax.set_xticks(range(len(rows)), rows, fontsize="small")
    ax.set_ylim(0, top or 1.0)
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _serving_legend(df: pd.DataFrame, ax: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rules = [rule for rule in dict.fromkeys(df["rule"]) if not pd.isna(rule)]
    handles: list[Any] = [
        Patch(facecolor="#999999", edgecolor="white", hatch=HATCHES.get(rule, ""), label=rule) for rule in rules
    ]
    if df["static"].notna().any():
        handles.append(Line2D([], [], color="#e6007e", linewidth=1.6, label="static depth\nof the same mean"))
    ax.legend(
        handles=handles, title="batch rule", frameon=False, fontsize="small", title_fontsize="small",
        loc="upper left", bbox_to_anchor=(1, 1),
    )  # fmt: skip


def _row_of_axes(count: int, title: str, panel: float = PANEL) -> Any:
    from matplotlib.figure import Figure

    width = panel * count + 1.2
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    if title:
        figure.suptitle(fill(title, int(CHARACTERS_PER_INCH * width)), fontsize="medium")
    return figure.subplots(1, count, squeeze=False)[0]


# a way of decoding under load: colours by its kind, in the order in which ways of that kind come, and a marker
WAYS = {
    "plain": (("#444444",), "D"),
    "full": ((COLORS["full"],), "o"),
    "static": (("#7f7f7f", "#bbbbbb", "#a6761d"), "s"),
    "tolerance": (("#0072b2", "#56b4e9", "#009e73"), "^"),
    "threshold": (("#d55e00", "#e69f00", "#cc79a7"), "v"),
}


def plot_load(df: pd.DataFrame, title: str = "", axes: Any = None) -> Any:
    """Values against the rate of requests: one panel each, one line a way.

    Latencies are on a logarithmic scale, and their high percentile is dashed. What came all at once stands right of the
    rates, unconnected.

    Args:
        df: columns panel, label (of its vertical axis, with the unit), way (full, static=4, ...), rate (a second;
            infinite: all at once), value, high (null: none), marked (drawn hollow), in the order of drawing.
    """
    panels, rates = list(dict.fromkeys(df["panel"])), sorted(set(df["rate"]))
    axes = _row_of_axes(len(panels), title) if axes is None else axes
    finite = [rate for rate in rates if rate != float("inf")]
    at_once = 2 * finite[-1] if finite else 1.0
    for ax, panel in zip(axes, panels, strict=True):
        part = df[df["panel"] == panel]
        for way in dict.fromkeys(df["way"]):
            _plot_way(part[part["way"] == way].sort_values("rate"), ax, at_once, *_way_style(way, df["way"]))
        ax.set_title(panel, fontsize="medium")
        ax.set_ylabel(part["label"].iloc[0])
        ax.set_xscale("log", base=2)
        ax.set_xticks([*finite, *([at_once] if len(finite) < len(rates) else [])], [
            *(f"{rate:g}" for rate in finite), *(["all\nat once"] if len(finite) < len(rates) else [])
        ], minor=False)  # fmt: skip
        ax.set_xlabel("requests a second")
        if part["high"].notna().any() and (part["value"] > 0).all():
            _plain_log(ax)
        else:
            ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    _load_legend(df, axes[-1])
    return axes


def _plain_log(ax: Any) -> None:
    """A logarithmic vertical scale whose numbers are written out."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def _plot_way(points: pd.DataFrame, ax: Any, at_once: float, color: str, marker: str) -> None:
    steady = points[points["rate"] != float("inf")]
    ax.plot(steady["rate"], steady["value"], color=color, linewidth=1.4)
    ax.plot(steady["rate"], steady["high"].astype(float), color=color, linewidth=1.0, linestyle="--")
    for point in points.to_dict("records"):
        x = at_once if point["rate"] == float("inf") else point["rate"]
        face = "white" if point["marked"] else color
        ax.plot([x], [point["value"]], marker, color=color, markerfacecolor=face, markersize=5)
        if not pd.isna(point["high"]):
            ax.plot([x], [point["high"]], marker, color=color, markerfacecolor=face, markersize=3)


def _way_style(way: str, ways: pd.Series) -> tuple[str, str]:
    kind = way.partition("=")[0]
    colors, marker = WAYS[kind]
    alike = [each for each in dict.fromkeys(ways) if each.partition("=")[0] == kind]
    return colors[alike.index(way) % len(colors)], marker


def _load_legend(df: pd.DataFrame, ax: Any) -> None:
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    for way in dict.fromkeys(df["way"]):
        color, marker = _way_style(way, df["way"])
        handles.append(Line2D([], [], color=color, marker=marker, markersize=5, label=way))
    if df["marked"].any():
        hollow = "some failed, or\nthe client was late"
        handles.append(Line2D([], [], color="#444444", marker="o", markerfacecolor="white", linestyle="", label=hollow))
    ax.legend(handles=handles, frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def plot_held(df: pd.DataFrame, title: str = "", axes: Any = None) -> Any:
    """What a server holds over time: memory, open files, requests.

    Args:
        df: columns at (seconds), rss_mib, files, running, waiting.
    """
    axes = _row_of_axes(3, title) if axes is None else axes
    minutes = df["at"] / 60.0
    shown = (("resident memory, MiB", ["rss_mib"]), ("open files", ["files"]), ("requests", ["running", "waiting"]))
    for ax, (label, columns) in zip(axes, shown, strict=True):
        for column in columns:
            ax.plot(minutes, df[column], linewidth=1.0, label=column)
        ax.set_ylabel(label)
        ax.set_xlabel("minutes")
        ax.set_ylim(0, 1.1 * max(1.0, float(df[columns].to_numpy().max())))
        ax.grid(alpha=0.3)
    axes[-1].legend()
    return axes
