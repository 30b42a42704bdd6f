"""Figures 1 and 2 from the record of a serving run: the paper's bars beside ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import can_draw
from .sessions import FULL

PAPER_PANEL = "paper: RTX 4090"


@dataclass(frozen=True)
class Drawn:
    """One of the two figures.

    Attributes:
        value: of an entry of the record; ``label`` names it on the axis, with its unit.
        scale: what a value is multiplied by to be in that unit.
    """

    number: int
    program: str
    value: str
    label: str
    scale: float
    title: str


THROUGHPUT = Drawn(1, "throughput", "tokens_per_s", "tokens a second", 1.0, "throughput")
LATENCY = Drawn(
    2,
    "latency",
    "inner_token_latency",
    "inner-token latency (ms)\n@ sequences decoding at once",
    1000.0,
    "latency between tokens",
)


def draw_figure(summary: Mapping[str, Any], drawn: Drawn, run_dir: Path) -> list[str]:
    """One PNG for every source length and trace; their names. Says so where matplotlib is not installed."""
    if not can_draw():
        return []
    import pandas as pd

    from calm.plotting import plot_serving

    names = []
    for source, trace in cases(summary):
        bars = pd.DataFrame(figure_rows(summary, drawn, source, trace))
        name = f"figure{drawn.number}_{summary['model']['name']}_{source}_{trace}.png"
        axes = plot_serving(bars, drawn.label, headline(summary, drawn, source, trace))
        axes[0].figure.savefig(run_dir / name, dpi=150)
        names.append(name)
    return names


def cases(summary: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Source lengths and traces that were run, in their order."""
    entries = [entry for cell in summary["cells"] for entry in cell["entries"]]
    return list(dict.fromkeys((e["source_tokens"], e["trace"]) for e in entries if e["trace"] is not None))


def headline(summary: Mapping[str, Any], drawn: Drawn, source: int, trace: str) -> str:
    """What was measured, for who sees the picture alone."""
    config, model = summary["config"], summary["model"]
    weights = "random weights, depths of trace " + trace if model["weights"] == "random" else "trained"
    noisy = " (noisy machine)" if summary["noisy"] else ""
    return (
        f"Figure {drawn.number}, {drawn.title}: {model['name']}, {weights}; source {source} tokens, "
        f"{config['dtype']}, {config['threads']} thread{'s' if config['threads'] > 1 else ''}{noisy}"
    )


def figure_rows(summary: Mapping[str, Any], drawn: Drawn, source: int, trace: str) -> list[dict[str, Any]]:
    """The bars of a figure: the paper's panel where it ran this model, then one panel a batch size."""
    rows = [bar for bar in paper_rows(summary["model"]["paper"], drawn)]
    for cell in summary["cells"]:
        entries = [e for e in cell["entries"] if e["source_tokens"] == source]
        full = next((e for e in entries if e["ours"] == FULL), None)
        if full is None:
            continue
        panel = f"ours: batch {cell['batch']}"
        rows.append(_bar(panel, FULL, None, full, full, drawn))
        exits = [e for e in entries if e["ours"] == "exit" and e["trace"] == trace]
        rows += [_bar(panel, row_of(e, full), e["rule"], e, full, drawn) for e in exits]
    return rows


def row_of(entry: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    """The measure; and the head below it, where it is another one than full depth's."""
    return str(entry["measure"]) if entry["head"] == full["head"] else f"{entry['measure']}\n{entry['head']}"


def paper_rows(model: str, drawn: Drawn) -> list[dict[str, Any]]:
    """The paper's bars; none for a model that it did not run."""
    from calm.papers import figure_bars

    rows = []
    bars = figure_bars(model)
    for row, bar in bars.items():
        value = bar.tokens_per_s if drawn is THROUGHPUT else bar.inner_token_latency_s
        first = bars[FULL].tokens_per_s if drawn is THROUGHPUT else bars[FULL].inner_token_latency_s
        if value is None or first is None:
            continue
        shown = [note(value * drawn.scale, value / first if row != FULL else None)]
        if drawn is LATENCY and bar.concurrency is not None:
            shown.append(f"@ {bar.concurrency:.0f}")
        if drawn is THROUGHPUT and bar.printed is not None:
            shown.append(f"(printed: {bar.printed:.0f})")
        rows.append(_plain(PAPER_PANEL, row, None, value * drawn.scale, "\n".join(shown), None))
    return rows


def note(value: float, ratio: float | None) -> str:
    """A value, and how it stands to full depth."""
    shown = f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return shown if ratio is None else f"{shown}  ×{ratio:.2f}"


def _bar(
    panel: str, row: str, rule: str | None, entry: Mapping[str, Any], full: Mapping[str, Any], drawn: Drawn
) -> dict[str, Any]:
    value = entry[drawn.value] * drawn.scale
    shown = note(value, entry[drawn.value] / full[drawn.value] if entry is not full else None)
    if drawn is LATENCY:
        shown += f"{'  ' if rule else chr(10)}@ {entry['concurrency']:.1f}"
    static = entry["static"][drawn.value] * drawn.scale if "static" in entry else None
    return _plain(panel, row, rule, value, shown, static)


def _plain(panel: str, row: str, rule: str | None, value: float, shown: str, static: float | None) -> dict[str, Any]:
    return {"panel": panel, "row": row, "rule": rule, "value": value, "note": shown, "static": static}
