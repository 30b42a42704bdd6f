"""What the notebooks share: where the records lie, figures as pictures, answers and layers as shaded HTML.

Nothing of Jupyter is needed: it asks objects for ``_repr_png_`` and ``_repr_html_``.
"""

import html
import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .config import CONF_DIR
from .errors import DataError

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm misses ipywidgets; nothing here has a bar
DARKEST = 0.85  # of a shade, so that black text can be read on it


def results(start: Path | None = None) -> Path:
    """The folder of records: ``results`` beside the working folder or above it, else that of this checkout.

    Raises DataError where there is none.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents, CONF_DIR.parent):
        if (folder / "results" / "README.md").is_file():
            return folder / "results"
    raise DataError(f"no folder of records above {start}; start in a checkout, from its root or from notebooks/")


class Picture:
    """A figure of calm.plotting or calm.report_plots as a notebook shows it.

    Args:
        axes: what the figure's function returned, one or several.
    """

    def __init__(self, axes: Any, dpi: int = 110) -> None:
        self.figure = (axes if hasattr(axes, "figure") else axes[0]).figure
        self.dpi = dpi

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=self.dpi)
        return buffer.getvalue()


class Shown:
    """HTML as a notebook shows it; ``+`` puts one under the other."""

    def __init__(self, text: str) -> None:
        self.html = text

    def _repr_html_(self) -> str:
        return self.html

    def __add__(self, other: "Shown") -> "Shown":
        return Shown(self.html + other.html)


def shaded_answer(words: Sequence[str], layers: Sequence[int], num_layers: int, title: str = "") -> Shown:
    """An answer with every token shaded by the layer that gave it, darkest at the last; the layer under the pointer.

    Args:
        words: pieces of the tokenizer; ``▁`` and a leading blank begin a word.
        layers: emission layers, 1..num_layers.
    """
    spans = []
    for word, layer in zip(words, layers, strict=True):
        text = html.escape(word.replace("▁", " "), quote=False).replace(" ", "&nbsp;") or "&nbsp;"
        share = (layer - 1) / max(1, num_layers - 1)
        spans.append(
            f'<span title="layer {layer} of {num_layers}" style="background:{_shade(share)};color:#000">{text}'
            f'<sub style="font-size:65%;color:#444">{layer}</sub></span>'
        )
    head = f'<b style="display:inline-block;min-width:7em">{html.escape(title)}</b>' if title else ""
    return Shown(f'<div style="line-height:2">{head}{"".join(spans)}</div>')


def shaded_layers(
    words: Sequence[str], values: Sequence[Sequence[float]], title: str = "", lowest: float = 0.0
) -> Shown:
    """A table of an answer: a column for each token, a row for each layer, shaded by a value in [0, 1].

    Args:
        values: by token, then by layer from 1; NaN is left empty.
        lowest: value that is white, and those below it.
    """
    depth = max(map(len, values), default=0)
    head = "".join(f"<th>{html.escape(word.replace('▁', ' ').strip() or '␣')}</th>" for word in words)
    lines = []
    for layer in range(depth, 0, -1):
        cells = "".join(_cell(value[layer - 1], lowest) for value in values)
        lines.append(f"<tr><th>{layer}</th>{cells}</tr>")
    return Shown(
        f'<table style="font-size:80%;text-align:right"><caption style="text-align:left"><b>{html.escape(title)}</b>'
        f"</caption><tr><th>layer</th>{head}</tr>{''.join(lines)}</table>"
    )


def _cell(value: float, lowest: float) -> str:
    if math.isnan(value):
        return "<td></td>"
    return f'<td style="background:{_shade((value - lowest) / (1 - lowest))};color:#000">{value:.2f}</td>'


def _shade(share: float) -> str:
    """From white to blue."""
    at = DARKEST * min(1.0, max(0.0, share))
    red, green, blue = (round(255 + at * (end - 255)) for end in (86, 180, 233))
    return f"rgb({red},{green},{blue})"
