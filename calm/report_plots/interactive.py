"""The same panels for a page: plotly, with what each point is under the pointer."""

from collections.abc import Sequence
from math import log10
from typing import Any

from .labels import anchor, labels
from .panels import Level, Panel, Series

DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
SYMBOLS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "v": "triangle-down",
    "D": "diamond",
    "P": "cross",
    "X": "x",
}
PIXELS = 380  # height of a row of panels


def interactive(shown: Sequence[Panel]) -> Any:
    """A plotly figure of panels side by side.

    Raises:
        ImportError: plotly is not installed.
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=len(shown), subplot_titles=[panel.title for panel in shown])
    told: set[tuple[str, str, str]] = set()
    for column, panel in enumerate(shown, start=1):
        words = labels(panel)
        for series, beside in zip(panel.series, words.texts, strict=True):
            look = (series.name, series.color, series.line)
            for trace in _traces(series, beside, told=look in told):
                figure.add_trace(trace, row=1, col=column)
            told.add(look)
        for level, (share, above) in zip(panel.levels, words.names, strict=True):
            _level(figure, level, column, share, above)
        _axes(figure, panel, column)
    figure.update_layout(
        template="plotly_white", height=PIXELS + 60, barmode=_barmode(shown),
        margin={"l": 60, "r": 20, "t": 50, "b": 110},
        legend={"orientation": "h", "y": -0.25}, hovermode="closest",
    )  # fmt: skip
    return figure


def _barmode(shown: Sequence[Panel]) -> str:
    return "relative" if any(series.kind == "stack" for panel in shown for series in panel.series) else "group"


def _traces(series: Series, beside: Sequence[str], told: bool) -> list[Any]:
    """The band of a line first, so that the line lies on it."""
    from plotly import graph_objects as go

    x, y = list(series.x), list(series.y)
    common: dict[str, Any] = {
        "x": x, "y": y, "name": series.name, "legendgroup": f"{series.name} {series.color} {series.line}",
        "showlegend": series.legend and not told,
    }  # fmt: skip
    if series.kind in ("bar", "stack"):
        bar = go.Bar(**common, marker={"color": series.color}, error_y=_ends(y, series.low, series.high))
        return [bar]
    marker = {
        "color": "white" if series.hollow else series.color, "symbol": SYMBOLS.get(series.marker, "circle"), "size": 7,
        "line": {"color": series.color, "width": 1.5},
    }  # fmt: skip
    text: dict[str, Any] = {}
    if series.text is not None:
        text = {"text": list(series.text), "textposition": list(beside), "textfont": {"color": series.color}}
    mode = "lines+markers" if series.kind == "line" else "markers"
    line = {"color": series.color, "dash": DASHES.get(series.line, "solid")}
    points: dict[str, Any] = {
        **common,
        **text,
        "mode": mode + ("+text" if text else ""),
        "marker": marker,
        "line": line,
    }
    if series.kind == "points":
        for name, ends in (("error_y", (y, series.low, series.high)), ("error_x", (x, series.x_low, series.x_high))):
            points[name] = _ends(*ends, color=series.color)
        return [go.Scatter(**points)]
    if series.low is None or series.high is None:
        return [go.Scatter(**points)]
    band = go.Scatter(
        x=[*x, *reversed(x)], y=[*series.high, *reversed(list(series.low))], fill="toself", mode="lines",
        line={"width": 0, "color": series.color}, opacity=0.25, hoverinfo="skip", showlegend=False,
        legendgroup=common["legendgroup"],
    )  # fmt: skip
    return [band, go.Scatter(**points)]


def _ends(
    middle: Sequence[Any], low: Sequence[Any] | None, high: Sequence[Any] | None, color: str | None = None
) -> dict[str, Any] | None:
    if low is None or high is None:
        return None
    above = [end - at for at, end in zip(middle, high, strict=True)]
    below = [at - end for at, end in zip(middle, low, strict=True)]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2, "color": color}


def _level(figure: Any, level: Level, column: int, share: float, above: bool) -> None:
    line = {"color": level.color, "width": 1}
    said = {"text": level.name, "font": {"size": 11, "color": level.color}, "showarrow": False}
    if level.upright:
        figure.add_vline(x=level.at, line=line, row=1, col=column)
        where = {"x": level.at, "y": share, "yref": "y domain", "textangle": -90}
        where |= {"xanchor": "right" if above else "left", "yanchor": anchor(share, "bottom", "middle", "top")}
    else:
        figure.add_hline(y=level.at, line=line, row=1, col=column)
        where = {"x": share, "xref": "x domain", "y": level.at}
        where |= {"yanchor": "bottom" if above else "top", "xanchor": anchor(share, "left", "center", "right")}
    figure.add_annotation(**said, **where, row=1, col=column)
    if level.low is not None and level.high is not None and not level.upright:
        figure.add_hrect(
            y0=level.low, y1=level.high, fillcolor=level.color, opacity=0.1, line_width=0, row=1, col=column
        )


def _axes(figure: Any, panel: Panel, column: int) -> None:
    x: dict[str, Any] = {"title": panel.x}
    if panel.x_range != (None, None):
        x["range"] = [log10(end) if panel.x_log and end else end for end in panel.x_range]
    if panel.x_log:
        x |= {"type": "log", "tickvals": panel.ticks, "ticktext": [f"{each:g}" for each in panel.ticks]}
    figure.update_xaxes(**x, row=1, col=column)
    y: dict[str, Any] = {"title": panel.y}
    if panel.y_range != (None, None):
        y["range"] = list(panel.y_range)
    figure.update_yaxes(**y, row=1, col=column)
