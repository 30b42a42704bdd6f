"""What eval.suitability found."""

from collections.abc import Mapping
from typing import Any

from .words import told


def said(summary: Mapping[str, Any]) -> list[str]:
    """The verdict and what it rests on; where a layer first says the full model's word."""
    because, oracle, first = summary["verdict"]["because"], summary["oracle"]["first"], summary["layers"][0]
    return [
        f"{because[:1].upper()}{because[1:]}.",
        f"A token first says full depth's word at layer {told(oracle, 'depth')} of {summary['num_layers']} on average; "
        f"layer 1 already says it of {told(first, 'agree', 1, 100)} % of the tokens.",
    ]
