"""Figure of a certificate: which thresholds were tested, what they lost, and where the tests ended."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..plotting import color_of
from .panels import Level, Panel, Series

LEAST = -12.0  # log10 of a p-value; smaller ones are drawn there


def certificate_panels(df: pd.DataFrame, about: Mapping[str, Any]) -> list[Panel]:
    """Mean loss and p-value against the layers that a threshold skips.

    Args:
        df: a row for each tested threshold: measure, layers_skipped, mean_loss (0..1), p_value, certified.
        about: tolerance, test_level.
    """
    risk, tests = [], []
    for measure, part in df.groupby("measure", sort=False):
        color = color_of(str(measure))
        skipped = [100 * each for each in part["layers_skipped"]]
        risk.append(Series(str(measure), skipped, list(part["mean_loss"]), color=color))
        exponents = np.log10(np.maximum(10.0**LEAST, part["p_value"].to_numpy(dtype=np.float64)))
        tests.append(Series(str(measure), skipped, exponents.tolist(), color=color))
        passed = part[part["certified"]].iloc[-1]
        risk.append(
            Series(f"{measure}: certified", [100 * passed["layers_skipped"]], [passed["mean_loss"]], kind="points",
                   color=color, marker="s", legend=False)
        )  # fmt: skip
    shape: dict[str, Any] = {"x": "layers skipped on calibration rows (%)", "x_range": (-3, 103)}
    return [
        Panel("risk table (square: certified)", y="mean loss", series=risk, legend="upper left", columns=3,
              levels=(Level("tolerance", about["tolerance"]),), y_range=(0, 1.3 * about["tolerance"]), **shape),
        Panel("tests, from full depth on", y=f"log10 of the p-value (below {LEAST:g}: drawn there)", series=tests,
              levels=(Level("test level", float(np.log10(about["test_level"]))),), y_range=(LEAST - 0.5, 2.5),
              legend="upper left", columns=3, **shape),
    ]  # fmt: skip
