"""Certified exit thresholds: consistency losses, p-values, fixed-sequence testing, the artifact and what makes it.

The public names load on first use: who reads an artifact needs neither scipy nor transformers. What makes one is
``calibrate`` in the module of that name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .artifact import Artifact, Certificate, load_artifacts
    from .consistency import ConsistencyLoss
    from .identity import ModelIdentity, hash_rows
    from .pvalues import hoeffding, hoeffding_bentkus, largest_passing_mean, needed_n
    from .rows import check_disjoint
    from .testing import certified_points, fixed_sequence

_HOME = {
    "Artifact": ".artifact",
    "Certificate": ".artifact",
    "load_artifacts": ".artifact",
    "ConsistencyLoss": ".consistency",
    "ModelIdentity": ".identity",
    "hash_rows": ".identity",
    "hoeffding": ".pvalues",
    "hoeffding_bentkus": ".pvalues",
    "largest_passing_mean": ".pvalues",
    "needed_n": ".pvalues",
    "check_disjoint": ".rows",
    "certified_points": ".testing",
    "fixed_sequence": ".testing",
}

__all__ = [
    "Artifact",
    "Certificate",
    "ConsistencyLoss",
    "ModelIdentity",
    "certified_points",
    "check_disjoint",
    "fixed_sequence",
    "hash_rows",
    "hoeffding",
    "hoeffding_bentkus",
    "largest_passing_mean",
    "load_artifacts",
    "needed_n",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'calm.calibration' has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
