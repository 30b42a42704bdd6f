"""The same panels for a page: plotly, with what each point is under the pointer."""

from collections.abc import Sequence
from typing import Any

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
        for series in panel.series:
            look = (series.name, series.color, series.line)
            for trace in _traces(series, told=look in told):
                figure.add_trace(trace, row=1, col=column)
            told.add(look)
        for level in panel.levels:
            _level(figure, level, column)
        _axes(figure, panel, column)
    figure.update_layout(
        template="plotly_white", height=PIXELS + 60, barmode=_barmode(shown),
        margin={"l": 60, "r": 20, "t": 50, "b": 110},
        legend={"orientation": "h", "y": -0.25}, hovermode="closest",
    )  # fmt: skip
    return figure


def _barmode(shown: Sequence[Panel]) -> str:
    return "relative" if any(series.kind == "stack" for panel in shown for series in panel.series) else "group"


def _traces(series: Series, told: bool) -> list[Any]:
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
    text = {"text": list(series.text), "textposition": "top right"} if series.text is not None else {}
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
        points["error_y"] = _ends(y, series.low, series.high)
        points["error_x"] = _ends(x, series.x_low, series.x_high)
        return [go.Scatter(**points)]
    if series.low is None or series.high is None:
        return [go.Scatter(**points)]
    band = go.Scatter(
        x=[*x, *reversed(x)], y=[*series.high, *reversed(list(series.low))], fill="toself", mode="lines",
        line={"width": 0, "color": series.color}, opacity=0.25, hoverinfo="skip", showlegend=False,
        legendgroup=common["legendgroup"],
    )  # fmt: skip
    return [band, go.Scatter(**points)]


def _ends(middle: Sequence[Any], low: Sequence[Any] | None, high: Sequence[Any] | None) -> dict[str, Any] | None:
    if low is None or high is None:
        return None
    above = [end - at for at, end in zip(middle, high, strict=True)]
    below = [at - end for at, end in zip(middle, low, strict=True)]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2}


def _level(figure: Any, level: Level, column: int) -> None:
    line = {"color": level.color, "width": 1}
    said = {"annotation_text": level.name, "annotation_font_size": 11, "annotation_font_color": level.color}
    if level.upright:
        figure.add_vline(x=level.at, line=line, row=1, col=column, **said)
    else:
        figure.add_hline(y=level.at, line=line, row=1, col=column, annotation_position="top left", **said)
    if level.low is not None and level.high is not None and not level.upright:
        figure.add_hrect(
            y0=level.low, y1=level.high, fillcolor=level.color, opacity=0.1, line_width=0, row=1, col=column
        )


def _axes(figure: Any, panel: Panel, column: int) -> None:
    x: dict[str, Any] = {"title": panel.x}
    if panel.x_log:
        x |= {"type": "log", "tickvals": panel.ticks, "ticktext": [f"{each:g}" for each in panel.ticks]}
    elif panel.x_range != (None, None):
        x["range"] = list(panel.x_range)
    figure.update_xaxes(**x, row=1, col=column)
    y: dict[str, Any] = {"title": panel.y}
    if panel.y_range != (None, None):
        y["range"] = list(panel.y_range)
    figure.update_yaxes(**y, row=1, col=column)
