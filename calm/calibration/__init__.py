"""Certified exit thresholds: consistency losses, p-values, fixed-sequence testing, the artifact and what makes it."""

from .artifact import Artifact, Certificate, artifact_name, load_artifacts
from .calibrate import calibrate
from .consistency import ConsistencyLoss
from .identity import ModelIdentity, hash_rows
from .pvalues import hoeffding, hoeffding_bentkus, largest_passing_mean, needed_n
from .rows import check_disjoint
from .testing import certified_points, fixed_sequence

__all__ = [
    "Artifact",
    "Certificate",
    "ConsistencyLoss",
    "ModelIdentity",
    "artifact_name",
    "calibrate",
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
