"""What the figures of the experiments share."""

from typing import Any


def panels(count: int) -> Any:
    """Axes side by side in a figure of their own."""
    from matplotlib.figure import Figure

    return Figure(figsize=(4.2 * count, 4.2), layout="constrained").subplots(1, count, squeeze=False)[0]
