"""The rows of Table 1: which decodes they are, and what is certified of them. Knows no text and no score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from calm.calibration import Artifact, Certificate, ModelIdentity
from calm.calibration.grid import point_to_json
from calm.config import Measure, Schedule, Table1Config
from calm.models.settings import EarlyExitSettings
from calm.policies import Confident, Full, Oracle, Policy, Static
from calm.thresholds import ThresholdSchedule, measure_schedule


@dataclass(frozen=True)
class Row:
    """One row before it is decoded.

    Attributes:
        policy: None for lead-1, which decodes nothing.
        schedule: thresholds over the answer; None for rows without one.
        artifact, certificate: the calibration behind a certified row, also where nothing below 1 passed.
    """

    name: str
    policy: Policy | None
    measure: Measure | None = None
    schedule: ThresholdSchedule | None = None
    artifact: Artifact | None = None
    certificate: Certificate | None = None
    picked: bool = False

    @property
    def certified(self) -> bool:
        """A threshold below 1 is certified."""
        return self.certificate is not None and self.certificate.certified_below_one


@dataclass
class Plan:
    """All rows in order, and what has to be said about them."""

    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def plan_rows(
    config: Table1Config,
    given_thresholds: Mapping[str, float],
    settings: EarlyExitSettings,
    identity: ModelIdentity,
    artifacts: Sequence[Artifact],
) -> Plan:
    """Rows lead-1, full, static-half, two per measure, oracle.

    Args:
        given_thresholds: those of the rows MEASURE@threshold, by measure.

    Raises:
        CalibrationError: an artifact belongs to another model, or does not know the tolerance.
    """
    plan = Plan([Row("lead-1", None), Row("full", Full())])
    half = max(1, identity.num_layers // 2)
    plan.rows.append(Row("static-half", Static(half)))
    found = {artifact.measure: artifact for artifact in artifacts if artifact.consistency is config.consistency}
    certified = [_certified_row(measure, found.get(measure), config, identity, plan) for measure in config.measures]
    certified = _one_pick(certified, plan)
    for measure, row in zip(config.measures, certified, strict=True):
        plan.rows.append(row)
        given = given_thresholds.get(measure.value)
        if given is None:
            continue
        if measure is Measure.classifier and not settings.has_classifier:
            plan.notes.append(
                "classifier: this model has none; python -m train stage=classifier checkpoint=FOLDER trains it"
            )
            continue
        plan.rows.append(_given_row(measure, given, found.get(measure), config, identity))
    if config.oracle:
        plan.rows.append(Row("oracle", Oracle()))
    return plan


def _certified_row(
    measure: Measure, artifact: Artifact | None, config: Table1Config, identity: ModelIdentity, plan: Plan
) -> Row:
    """The row of a measure at its certified threshold; at full depth where there is none."""
    full = ThresholdSchedule(1.0, length=identity.max_target_tokens)
    consistency = config.consistency.value
    if artifact is None:
        plan.notes.append(
            f"{measure.value}: not calibrated for {consistency} consistency, so it stays at full depth; "
            f"python -m eval.calibrate calibration.measures=[{','.join(m.value for m in config.measures)}]"
        )
        return Row(measure.value, Full(), measure, full)
    artifact.check_against(identity, measure)
    certificate = artifact.certificate(config.tolerance, config.consistency)
    if not certificate.certified_below_one:
        plan.notes.append(
            f"{measure.value}: nothing below threshold 1 passed {consistency} tolerance {config.tolerance:g} at "
            f"n = {artifact.n} (at least {certificate.needed_n} are needed), so it stays at full depth"
        )
        return Row(measure.value, Full(), measure, full, artifact, certificate, certificate.picked)
    policy = artifact.policy(certificate.threshold)
    return Row(measure.value, policy, measure, policy.schedule, artifact, certificate, certificate.picked)


def _one_pick(rows: list[Row], plan: Plan) -> list[Row]:
    """A pick counts only where its measures were certified together, each at its share of error_prob."""
    artifacts = [row.artifact for row in rows if row.artifact is not None]
    together = {(frozenset(each.measures), each.error_prob, each.calibration_rows) for each in artifacts}
    if len(together) < 2 and sum(row.picked for row in rows) < 2:
        return rows
    plan.notes.append(
        f"{', '.join(each.measure.value for each in artifacts)} come from separate calibrations, so no row counts as "
        "picked; calibrate them together"
    )
    return [Row(r.name, r.policy, r.measure, r.schedule, r.artifact, r.certificate) for r in rows]


def _given_row(
    measure: Measure, threshold: float, artifact: Artifact | None, config: Table1Config, identity: ModelIdentity
) -> Row:
    """The row of a threshold that somebody chose; nothing is certified of it."""
    kind, tau, k = config.given_schedule, 4.0, 3
    if artifact is not None:
        tau, k = artifact.tau, artifact.agreement_k
        kind = artifact.schedule if kind is Schedule.auto else kind
    kind = measure_schedule(measure, Schedule.decaying if kind is Schedule.auto else kind)
    schedule = ThresholdSchedule(threshold, kind, tau, identity.max_target_tokens)
    policy: Policy = Full() if schedule.exits_off else Confident(measure, schedule, k)
    return Row(f"{measure.value}@{threshold:g}", policy, measure, schedule)


def bounds(schedule: ThresholdSchedule | None) -> tuple[float | list[float] | None, float | list[float] | None]:
    """Thresholds at t = 0 and t = N."""
    if schedule is None:
        return None, None
    first, last = schedule.threshold_at(0), schedule.threshold_at(schedule.length)
    return point_to_json(first), point_to_json(last)
