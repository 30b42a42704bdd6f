"""The certificate as a file: what was tested, on what, and what passed. JSON beside the weights.

``calibration/<measure>-<consistency>.json`` of a model folder, with the way of decoding in the name where it is not
the plain one (``state-risk-int8-on-bfloat16.json``). The file carries the hash of its own content, so an edited
threshold is refused, and the identity of what was certified, so another model's certificate is.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..checkpoint import write_atomic
from ..config import Consistency, Measure, Schedule
from ..errors import CalibrationError
from ..policies import Confident
from ..thresholds import ThresholdSchedule
from .grid import Threshold, check_grid, point_from_json
from .identity import ModelIdentity, artifact_name, hash_json
from .testing import certified_points

FORMAT = 2


@dataclass(frozen=True)
class Certificate:
    """What holds at one tolerance. With several, each holds by itself, not all at once.

    Attributes:
        tolerance: CALM's delta.
        p_values: of the thresholds tested, in the order of the grid; the first is of 1.0 and 0 by definition.
        certified: the leading thresholds whose p-value is at most the test level, 1.0 first.
        threshold: the most aggressive of them.
        needed_n: rows below which nothing can pass at this tolerance.
        picked: dev chose this measure for this tolerance.
        dev: what dev foresaw: budget, threshold, mean_loss, layers_skipped.
    """

    tolerance: float
    p_values: tuple[float, ...]
    certified: tuple[Threshold, ...]
    threshold: Threshold
    needed_n: int
    picked: bool
    dev: dict[str, Any]

    @property
    def certified_below_one(self) -> bool:
        """False where only full depth is certified."""
        return len(self.certified) > 1


@dataclass(frozen=True)
class Artifact:
    """One measure and one consistency, certified on one model.

    Attributes:
        grid: thresholds in the order of testing, fixed on dev; ``grid_hash`` names the file written before.
        error_prob: family-wise, over all ``measures`` that a reader may choose from.
        test_level: error_prob / number of measures; each tolerance's sequence is tested at it.
        n: calibration rows.
        mean_losses, layers_skipped: per decoded threshold, in the order of the grid.
        article_skips: likewise, mean and standard deviation over articles of an article's own share of layers skipped.
        exit_shares: likewise, share of tokens by emission layer 1..L. With these a server sees that its traffic is
            not what was calibrated on.
        complete: True when the whole grid was decoded, also below the first failure.
        calibration_rows, dev_rows: hashes of the rows.
    """

    measure: Measure
    consistency: Consistency
    schedule: Schedule
    tau: float
    agreement_k: int
    grid: tuple[Threshold, ...]
    error_prob: float
    test_level: float
    measures: tuple[Measure, ...]
    n: int
    mean_losses: tuple[float, ...]
    layers_skipped: tuple[float, ...]
    article_skips: tuple[tuple[float, float], ...]
    exit_shares: tuple[tuple[float, ...], ...]
    complete: bool
    certificates: tuple[Certificate, ...]
    identity: ModelIdentity
    calibration_rows: str
    dev_rows: str
    metric: str
    code_version: str
    order: str = "descending"

    @property
    def name(self) -> str:
        return artifact_name(self.measure, self.consistency, self.identity)

    def certificate(self, tolerance: float, consistency: Consistency | None = None) -> Certificate:
        """The certificate for a tolerance.

        Raises:
            CalibrationError: another consistency, or a tolerance that was not tested (the tested ones are named).
        """
        if consistency is not None and consistency is not self.consistency:
            raise CalibrationError(
                f"{self.name} certifies {self.consistency.value} consistency, {consistency.value} was asked; "
                f"run python -m eval.calibrate calibration.consistency={consistency.value}"
            )
        for certificate in self.certificates:
            if math.isclose(certificate.tolerance, tolerance, rel_tol=1e-9):
                return certificate
        tested = ", ".join(f"{certificate.tolerance:g}" for certificate in self.certificates)
        raise CalibrationError(
            f"{self.name} was not tested at tolerance {tolerance:g}, only at {tested}; "
            f"run python -m eval.calibrate calibration.tolerances=[{tolerance:g}]"
        )

    def threshold_for(self, tolerance: float, consistency: Consistency | None = None) -> Threshold:
        """The most aggressive certified threshold; 1.0 (full depth) where nothing below it passed."""
        return self.certificate(tolerance, consistency).threshold

    def is_certified(self, threshold: Threshold, tolerance: float) -> bool:
        """Whether exactly this threshold is in the certified set."""
        return threshold in self.certificate(tolerance).certified

    def picked(self, tolerance: float | None) -> bool:
        """Whether dev picked this measure: for this tolerance, or for any."""
        near = (c for c in self.certificates if tolerance is None or abs(c.tolerance - tolerance) < 1e-12)
        return any(certificate.picked for certificate in near)

    def policy(self, threshold: Threshold) -> Confident:
        """Decode with this artifact's measure and schedule at a threshold."""
        length = self.identity.max_target_tokens
        schedule = ThresholdSchedule(threshold=threshold, kind=self.schedule, tau=self.tau, length=length)
        return Confident(self.measure, schedule, self.agreement_k)

    def check_against(self, identity: ModelIdentity, measure: Measure | None = None) -> None:
        """Raise CalibrationError, naming what differs with both values, unless the artifact belongs to ``identity``."""
        differences = self.identity.differences(identity)
        if measure is not None and measure is not self.measure:
            differences.append(f"measure: {self.measure.value!r} here, {measure.value!r} asked")
        if differences:
            raise CalibrationError(
                f"calibration {self.name} does not belong to what it is used with ({'; '.join(differences)}); "
                "run python -m eval.calibrate on this model"
            )

    def save(self, folder: str | Path) -> Path:
        """Write ``<folder>/<name>.json`` atomically."""
        path = Path(folder) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, self.dumps())
        return path

    def dumps(self) -> str:
        values = self._values()
        return _layout({**values, "signature": hash_json(values)})

    def _values(self) -> dict[str, Any]:
        values = {"format": FORMAT, **asdict(self)}
        values["identity"] = self.identity.to_json()
        for saved, certificate in zip(values["certificates"], self.certificates, strict=True):
            saved["certified_below_one"] = certificate.certified_below_one
        plain: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
        return plain

    @classmethod
    def load(cls, path: str | Path) -> "Artifact":
        """Read an artifact and check that it is whole.

        Raises:
            CalibrationError: missing, no JSON, another format, edited, or at odds with itself.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CalibrationError(f"cannot read calibration {path}: {error}") from None
        return cls.loads(text, str(path))

    @classmethod
    def loads(cls, text: str, where: str) -> "Artifact":
        """``load`` from text; ``where`` is named in errors."""
        try:
            values = json.loads(text)
            signature = values.pop("signature")
            written_in = values.pop("format")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise CalibrationError(
                f"{where} is no calibration artifact ({error!r}); run python -m eval.calibrate"
            ) from None
        if written_in != FORMAT:
            raise CalibrationError(f"{where} has format {written_in}, expected {FORMAT}; run python -m eval.calibrate")
        if signature != hash_json({"format": written_in, **values}):
            raise CalibrationError(
                f"{where} was edited: its content does not match its signature, so nothing in it is certified; "
                "run python -m eval.calibrate to write it anew"
            )
        artifact = _from_values(values, where)
        artifact._check(where)
        return artifact

    def _check(self, where: str) -> None:
        check_grid(self.grid)
        for certificate in self.certificates:
            expected = tuple(certified_points(self.grid, certificate.p_values, self.test_level))
            if certificate.certified != expected or not expected or certificate.threshold != expected[-1]:
                raise CalibrationError(
                    f"{where}: the certified set at tolerance {certificate.tolerance:g} does not follow from its "
                    "p-values; run python -m eval.calibrate to write it anew"
                )


def load_artifacts(folder: str | Path) -> list[Artifact]:
    """Every artifact of a model folder's ``calibration``, or of that folder itself; empty where there is none."""
    folder = Path(folder)
    inner = folder / "calibration"
    return [Artifact.load(path) for path in sorted((inner if inner.is_dir() else folder).glob("*-*.json"))]


def served_as(artifacts: Sequence[Artifact], identity: ModelIdentity) -> list[Artifact]:
    """Those that belong to this way of decoding; of a measure that has none, those of others: they say what differs."""
    fitting = [each for each in artifacts if not each.identity.differences(identity)]
    known = {(each.measure, each.consistency) for each in fitting}
    return [*fitting, *(each for each in artifacts if (each.measure, each.consistency) not in known)]


def choose_artifact(
    artifacts: Sequence[Artifact],
    consistency: Consistency,
    measure: Measure | None = None,
    tolerance: float | None = None,
) -> Artifact:
    """That of the measure asked for, else the one that dev picked: for this tolerance, or for any where it is None.

    Raises:
        CalibrationError: there is none; it names what there is.
    """
    fitting = [a for a in artifacts if a.consistency is consistency and measure in (None, a.measure)]
    if not fitting:
        asked = "-".join([*([measure.value] if measure else []), consistency.value])
        there = ", ".join(a.name for a in artifacts) or "none"
        raise CalibrationError(f"this model has no calibration {asked}; it has {there}; run python -m eval.calibrate")
    return next((a for a in fitting if a.picked(tolerance)), fitting[0])


def _from_values(values: Mapping[str, Any], where: str) -> Artifact:
    known = {field.name for field in fields(Artifact)}
    if set(values) != known:
        raise CalibrationError(f"{where}: unknown or missing entries {sorted(set(values) ^ known)}")
    certificates = tuple(
        Certificate(
            tolerance=c["tolerance"],
            p_values=tuple(c["p_values"]),
            certified=tuple(point_from_json(p) for p in c["certified"]),
            threshold=point_from_json(c["threshold"]),
            needed_n=c["needed_n"],
            picked=c["picked"],
            dev=c["dev"],
        )
        for c in values["certificates"]
    )
    return Artifact(
        **{
            **values,
            "measure": Measure(values["measure"]),
            "consistency": Consistency(values["consistency"]),
            "schedule": Schedule(values["schedule"]),
            "measures": tuple(Measure(m) for m in values["measures"]),
            "grid": tuple(point_from_json(p) for p in values["grid"]),
            "mean_losses": tuple(values["mean_losses"]),
            "layers_skipped": tuple(values["layers_skipped"]),
            "article_skips": tuple(tuple(pair) for pair in values["article_skips"]),
            "exit_shares": tuple(tuple(shares) for shares in values["exit_shares"]),
            "certificates": certificates,
            "identity": ModelIdentity.from_json(values["identity"]),
        }
    )


def _layout(values: Mapping[str, Any]) -> str:
    """JSON with one entry a line; lists of numbers stay on theirs."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"
