"""Figure of eval.uniformity."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from .panels import MARKERS, PALETTE, Level, Panel, Series


def uniformity_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Quality against the layers that a token runs in the largest batch, a panel for each measure; then the clock.

    Args:
        df: columns model, measure (``full`` of full depth), rule (own, sync), batch, rouge_l and its interval, layers.
        about: num_layers, close, clocks.
    """
    models = list(dict.fromkeys(df["model"]))
    looks = {name: (PALETTE[number % 7], MARKERS[number % 7]) for number, name in enumerate(models)}
    full, exits = df[df["measure"] == "full"], df[df["measure"] != "full"]
    first = full[full["model"] == models[0]].iloc[0]
    batch, found = int(exits["batch"].max()), []
    for measure, part in exits.groupby("measure", sort=False):
        series = []
        for rule, line in (("sync", "-"), ("own", "--")):
            for name, (color, marker) in looks.items():
                here = part[(part["model"] == name) & (part["rule"] == rule)]
                here = here[here["batch"] == batch] if rule == "sync" else here
                points = pd.concat([here, full[full["model"] == name]]).sort_values("layers")
                label = f"{name}, {rule}"
                series.append(
                    Series(
                        label, list(points["layers"]), list(points["rouge_l"]), color=color, marker=marker, line=line
                    )
                )
        levels = [Level(f"{first['model']}, full depth", first["rouge_l"], color="#000000")]
        found.append(
            Panel(f"{measure}: batch {batch} under sync, and each row alone", "layers that a token runs, mean",
                  "ROUGE-L to the reference", series, levels, legend="lower right")
        )  # fmt: skip
    clocks = pd.DataFrame([row for row in about["clocks"] if row.get("model")])
    if not clocks.empty:
        found.append(_clocks(clocks, looks, float(about["close"])))
    return found


def _clocks(clocks: pd.DataFrame, looks: Mapping[str, tuple[str, str]], close: float) -> Panel:
    series = []
    for name, part in clocks.groupby("model", sort=False):
        places = [f"{row['measure']}, {row['batch']}" for row in part.to_dict("records")]
        clock, low, high = (
            list(part[column])
            for column in ("decode_tokens_ratio", "decode_tokens_ratio_low", "decode_tokens_ratio_high")
        )
        series.append(Series(str(name), places, clock, low, high, kind="bar", color=looks[str(name)][0]))
    return Panel(
        f"sync, no more than {close:g} ROUGE-L below", "measure, rows of a batch",
        "decode steps by time, over full depth's", series, [Level("full depth", 1.0, color="#000000")],
        x_range=(-1.3, len(series[0].x) - 0.5),
        y_range=(0.0, 1.35 * float(clocks["decode_tokens_ratio_high"].max())), legend="upper left",
    )  # fmt: skip
