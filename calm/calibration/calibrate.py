"""Certify exit thresholds (CALM section 4, Learn then Test): dev decides what is tried, calibration what passes.

Steps: rows checked and the n needed said; plans made and stored on dev (plan.py); a full decode of the calibration
rows; thresholds decoded from 1.0 down until none of the tolerances passes any more; p-values; artifacts.

The decoder is handed in and must record confidences. It may split rows over processes by itself; ``calibrate`` then
runs in one of them. Nothing here knows a model, and equal inputs give equal artifacts.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import CalibrationConfig, Measure, Schedule
from ..errors import CalibrationError
from ..metrics import metric_signature
from ..policies import Full
from ..records import DecodeTrace, Example
from ..thresholds import measure_schedule
from .artifact import Artifact, Certificate
from .consistency import Clean, ConsistencyLoss
from .identity import ModelIdentity, artifact_name, code_version, hash_json, hash_rows
from .plan import DevChoice, Plan, Planner, budgets, pick
from .pvalues import hoeffding_bentkus, needed_n
from .risk_table import CHUNK_BATCHES, Decode, Progress, RiskTable, TraceCache, cache_key, walk_grid
from .rows import check_disjoint, check_families
from .testing import certified_points

logger = logging.getLogger(__name__)


def calibrate(
    decode: Decode,
    dev: Sequence[Example],
    calibration: Sequence[Example],
    config: CalibrationConfig,
    identity: ModelIdentity,
    out_dir: str | Path,
    progress: Progress | None = None,
    clean: Clean | None = None,
    *,
    cache_dir: str | Path | None = None,
    others: Mapping[str, Sequence[Example]] | None = None,
    device: str = "cpu",
) -> list[Artifact]:
    """Certify every measure of ``config`` and write ``<out_dir>/<measure>-<consistency>.json``.

    Args:
        decode: ``decode(examples, policy) -> traces`` with confidences at every checked layer, also at threshold 1.
        dev, calibration: rows of disjoint families; the first ``dev_rows`` and ``n`` of them are used.
        progress: called with (what, rows done, rows in all) before and after every chunk.
        clean: applied to predictions and references before they are scored.
        cache_dir: traces, plans and risk tables; default ``<out_dir>/work``. A second run goes on from it.
        others: further splits, such as train and test, that must share no row with calibration.
        device: kind of device that decodes. Cached traces of another kind are not mixed with its own; a certificate
            holds on either.

    Returns:
        One artifact per measure, in the order of ``config.measures``. Where nothing below 1 passes, its threshold is
        1.0 and ``certified_below_one`` is False.

    Raises:
        CalibrationError: no rows, rows that overlap or repeat a family, losses that are no losses.
    """
    dev = list(dev)[: config.dev_rows]
    rows = list(calibration)[: config.n] if config.n is not None else list(calibration)
    _check_rows(dev, rows, config, others or {})
    level = config.error_prob / len(config.measures)
    hopeful = _say_needed(config, len(rows), level)
    work = Path(cache_dir) if cache_dir is not None else Path(out_dir) / "work"
    decoded_by = {**identity.to_json(), "device": device}
    run = _Calibration(decode, rows, config, identity, work, level, hash_rows(dev), decoded_by, progress, clean)
    if hopeful:
        budget_of = budgets(config.tolerances, len(rows), level)
        planner = Planner(decode, dev, config, identity, work, budget_of, decoded_by, clean=clean, progress=progress)
        plans = [planner.plan(measure) for measure in config.measures]
    else:
        plans = [_hopeless_plan(measure, config, identity) for measure in config.measures]
    picked = {tolerance: pick(plans, tolerance).measure for tolerance in config.tolerances}
    artifacts = [run.certify(plan, picked) for plan in plans]
    for artifact in artifacts:
        artifact.save(out_dir)
    return artifacts


def _check_rows(
    dev: Sequence[Example],
    rows: Sequence[Example],
    config: CalibrationConfig,
    others: Mapping[str, Sequence[Example]],
) -> None:
    for name, split in (("calibration", rows), ("dev", dev)):
        if not split:
            raise CalibrationError(f"the {name} split has no rows: nothing can be certified; give it some")
    if config.n is not None and len(rows) < config.n:
        logger.warning(
            "calibration.n=%d was asked, the corpus has %d calibration rows: using these", config.n, len(rows)
        )
    check_disjoint({"calibration": rows, "dev": dev, **others})
    check_families(rows)


def _say_needed(config: CalibrationConfig, n: int, level: float) -> bool:
    """Say, before anything is decoded, what n rows can certify; False where they cannot certify anything."""
    hopeful = False
    for tolerance in config.tolerances:
        needed = needed_n(tolerance, level)
        if n < needed:
            logger.warning(
                "%d calibration rows certify nothing at tolerance %g: even without any loss %d rows are needed "
                "(test level %.4g = error_prob %g / %d measures), and %d at a mean loss of half the tolerance; "
                "the threshold will be 1.0 (full depth)",
                n, tolerance, needed, level, config.error_prob, len(config.measures),
                needed_n(tolerance, level, tolerance / 2),
            )  # fmt: skip
        else:
            hopeful = True
            budget = budgets([tolerance], n, level)[tolerance]
            logger.info("%d rows certify a mean loss up to %.4f at tolerance %g", n, budget, tolerance)
    return hopeful


def _labelled(progress: Progress | None, plan: Plan) -> Progress | None:
    """The same with measure and threshold in front instead of the name of a cache file."""
    if progress is None:
        return None
    names = {f"threshold-{index:03d}": threshold for index, threshold in enumerate(plan.grid)}

    def told(what: str, done: int, total: int) -> None:
        threshold = names.get(what)
        shown = f"{threshold:.4f}" if isinstance(threshold, float) else what
        progress(f"{plan.measure.value} {shown}", done, total)

    return told


def _hopeless_plan(measure: Measure, config: CalibrationConfig, identity: ModelIdentity) -> Plan:
    """Full depth only: no grid is worth decoding."""
    kind = Schedule.constant if config.schedule is Schedule.auto else measure_schedule(measure, config.schedule)
    choices = tuple(DevChoice(tolerance, None, 0, 1.0, 0.0, 0.0) for tolerance in config.tolerances)
    return Plan(measure, kind, config.tau, config.agreement_k, identity.max_target_tokens, (1.0,), choices, {})


class _Calibration:
    """The pass over calibration rows; the full decode is shared by all measures."""

    def __init__(
        self,
        decode: Decode,
        rows: Sequence[Example],
        config: CalibrationConfig,
        identity: ModelIdentity,
        folder: Path,
        level: float,
        dev_hash: str,
        decoded_by: Mapping[str, Any],
        progress: Progress | None,
        clean: Clean | None,
    ) -> None:
        self.decode = decode
        self.rows = rows
        self.rows_hash = hash_rows(rows)
        self.config = config
        self.identity = identity
        self.folder = folder
        self.level = level
        self.dev_hash = dev_hash
        self.decoded_by = decoded_by
        self.progress = progress
        self.clean = clean
        self._full: list[DecodeTrace] | None = None
        self._loss: ConsistencyLoss | None = None

    def certify(self, plan: Plan, picked: Mapping[float, Measure]) -> Artifact:
        """Decode down the plan's grid, test, and state the result."""
        table, p_values, complete = self._test(plan)
        certificates = []
        for choice in plan.choices:
            tested = p_values[choice.tolerance]
            certified = certified_points(plan.grid, tested, self.level)
            certificates.append(
                Certificate(
                    tolerance=choice.tolerance,
                    p_values=tuple(tested),
                    certified=tuple(certified),
                    threshold=certified[-1],
                    needed_n=needed_n(choice.tolerance, self.level),
                    picked=picked[choice.tolerance] is plan.measure,
                    dev=json.loads(json.dumps({**asdict(choice), "rejected_schedules": plan.rejected})),
                )
            )
            logger.info(
                "%s at tolerance %g: %d of %d tested thresholds certified, down to %s",
                plan.measure.value, choice.tolerance, len(certified), len(tested), certified[-1],
            )  # fmt: skip
        return self._artifact(plan, table, tuple(certificates), complete)

    def _test(self, plan: Plan) -> tuple[RiskTable, dict[float, list[float]], bool]:
        """Risk table and, per tolerance, the p-values of the thresholds decoded.

        Full depth has no loss by definition, so its p-value is 0. Below it thresholds are decoded in order until the
        sequence of every tolerance has ended, or to the end of the grid where the whole curve is asked for.
        """
        table = RiskTable([row.id for row in self.rows], plan.grid, self.identity.num_layers)
        p_values = {tolerance: [0.0] for tolerance in self.config.tolerances}
        going = set(self.config.tolerances)
        if len(plan.grid) == 1:
            return table, p_values, True
        full, loss = self._full_decode()
        table.add(np.zeros(len(self.rows)), full)
        key = cache_key(
            self.decoded_by, self.rows_hash, measure=plan.measure.value, schedule=plan.schedule.value,
            tau=plan.tau, agreement_k=plan.agreement_k, grid=hash_json(plan.grid),
        )  # fmt: skip
        chunk_rows = CHUNK_BATCHES * self.config.batch_size
        cache = TraceCache(self.folder / "calibration" / plan.measure.value, key, chunk_rows)
        exits = (self.identity.exit_layers, self.identity.num_layers)
        told = _labelled(self.progress, plan)
        steps = walk_grid(cache, self.decode, self.rows, plan.policy, plan.grid, full, exits, told)
        for _, traces in steps:
            losses = loss(traces)
            table.add(losses, traces)
            for tolerance, values in p_values.items():
                values.append(float(hoeffding_bentkus(losses.mean(), len(losses), tolerance)))
                if values[-1] > self.level:
                    going.discard(tolerance)
            if not going and not self.config.complete:
                break
        table.save(self.folder / f"risk-{artifact_name(plan.measure, self.config.consistency, self.identity)}.parquet")
        return table, p_values, len(table.losses) == len(plan.grid)

    def _full_decode(self) -> tuple[list[DecodeTrace], ConsistencyLoss]:
        if self._full is None or self._loss is None:
            key = cache_key(self.decoded_by, self.rows_hash)
            cache = TraceCache(self.folder / "calibration" / "full", key, CHUNK_BATCHES * self.config.batch_size)
            traces = cache.decode(self.decode, self.rows, Full(), "full depth", self.progress)
            # no measure was asked, so whatever stands there is no measure's: every row is decoded at the next threshold
            self._full = [replace(trace, confidences=()) for trace in traces]
            self._loss = ConsistencyLoss(self.config.consistency, self.rows, self._full, clean=self.clean)
        return self._full, self._loss

    def _artifact(
        self, plan: Plan, table: RiskTable, certificates: tuple[Certificate, ...], complete: bool
    ) -> Artifact:
        return Artifact(
            measure=plan.measure,
            consistency=self.config.consistency,
            schedule=plan.schedule,
            tau=plan.tau,
            agreement_k=plan.agreement_k,
            grid=plan.grid,
            error_prob=self.config.error_prob,
            test_level=self.level,
            measures=tuple(self.config.measures),
            n=len(self.rows),
            mean_losses=tuple(table.mean_losses) or (0.0,),
            layers_skipped=tuple(table.layers_skipped) or (0.0,),
            article_skips=tuple(table.article_skips) or ((0.0, 0.0),),
            exit_shares=tuple(table.exit_shares) or ((*[0.0] * (self.identity.num_layers - 1), 1.0),),
            complete=complete,
            certificates=certificates,
            identity=self.identity,
            calibration_rows=self.rows_hash,
            dev_rows=self.dev_hash,
            metric=metric_signature(),
            code_version=code_version(),
        )
