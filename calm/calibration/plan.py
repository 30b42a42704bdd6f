"""What is fixed on dev before calibration data is read: grid, schedule, and which measure to pick.

A plan is free to look at dev as it likes; that is why dev rows may not be calibration rows. For each schedule that is
open, dev is decoded at full depth for the grid, then at the thresholds that a bisection asks for: the most aggressive
one whose dev loss leaves room to pass at n rows. The schedule (and later the measure) that skips most layers there
wins. With constant thresholds 1.0 is the limit of the grid; with decaying ones a threshold just below 1 already lets
late tokens exit, which is why the two have grids of their own.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import write_atomic
from ..config import CalibrationConfig, Measure, Schedule
from ..metrics import depth_summary
from ..policies import Confident
from ..records import DecodeTrace, Example
from ..thresholds import ThresholdSchedule, measure_schedule
from .consistency import Clean, ConsistencyLoss, check_rows
from .grid import Threshold, check_grid, collect_flips, layer_path, point_from_json, scalar_grid
from .identity import ModelIdentity, artifact_name, hash_json, hash_rows
from .pvalues import largest_passing_mean
from .risk_table import CHUNK_BATCHES, Decode, Progress, TraceCache, cache_key, step_down

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DevChoice:
    """What dev foresees at one tolerance.

    Attributes:
        budget: largest mean loss that passes at n rows; None where n is too small for any.
        index, threshold: most aggressive member of the grid found within the budget; 0 and 1.0 where none is.
        mean_loss, layers_skipped: of dev there.
    """

    tolerance: float
    budget: float | None
    index: int
    threshold: Threshold
    mean_loss: float
    layers_skipped: float


@dataclass(frozen=True)
class Plan:
    """One measure's grid and schedule; ``rejected`` tells what the other schedule would have skipped."""

    measure: Measure
    schedule: Schedule
    tau: float
    agreement_k: int
    length: int
    grid: tuple[Threshold, ...]
    choices: tuple[DevChoice, ...]
    rejected: dict[str, float]

    def policy(self, threshold: Threshold) -> Confident:
        schedule = ThresholdSchedule(threshold=threshold, kind=self.schedule, tau=self.tau, length=self.length)
        return Confident(self.measure, schedule, self.agreement_k)

    @property
    def mean_skipped(self) -> float:
        """Share of layers that dev skips, mean over the tolerances."""
        return sum(choice.layers_skipped for choice in self.choices) / len(self.choices)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Plan":
        grid = tuple(point_from_json(point) for point in values["grid"])
        choices = tuple(DevChoice(**{**c, "threshold": point_from_json(c["threshold"])}) for c in values["choices"])
        plan = cls(
            **{
                **values,
                "measure": Measure(values["measure"]),
                "schedule": Schedule(values["schedule"]),
                "grid": grid,
                "choices": choices,
            }
        )
        check_grid(plan.grid)
        return plan


class Planner:
    """Makes the plans of one calibration. ``budgets`` maps each tolerance to the largest mean loss that passes."""

    def __init__(
        self,
        decode: Decode,
        dev: Sequence[Example],
        config: CalibrationConfig,
        identity: ModelIdentity,
        folder: Path,
        budgets: Mapping[float, float | None],
        decoded_by: Mapping[str, Any],
        *,
        clean: Clean | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.decode = decode
        self.dev = list(dev)
        self.dev_hash = hash_rows(self.dev)
        self.config = config
        self.identity = identity
        self.folder = folder
        self.budgets = dict(budgets)
        self.decoded_by = decoded_by
        self.clean = clean
        self.progress = progress

    def plan(self, measure: Measure) -> Plan:
        """The stored plan of these settings and rows, or a new one, which is stored before it is returned."""
        key = self._key(measure)
        path = self.folder / f"plan-{artifact_name(measure, self.config.consistency, self.identity)}.json"
        stored = _read_plan(path, key)
        if stored is not None:
            return stored
        candidates = [self._plan_schedule(measure, kind) for kind in self._schedules(measure)]
        best = max(candidates, key=lambda plan: plan.mean_skipped)
        rejected = {plan.schedule.value: plan.mean_skipped for plan in candidates if plan is not best}
        best = Plan(**{**_shallow(best), "rejected": rejected})
        check_grid(best.grid)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"key": key, "plan": best.to_json()}, indent=1) + "\n")
        return best

    def _key(self, measure: Measure) -> str:
        config = self.config
        settings = [config.consistency.value, config.grid_size, config.schedule.value, config.tau, config.agreement_k]
        return hash_json(
            [
                cache_key(self.decoded_by, self.dev_hash, measure=measure.value, settings=settings),
                config.per_layer,
                list(self.budgets.items()),
            ]
        )

    def _schedules(self, measure: Measure) -> list[Schedule]:
        asked = self.config.schedule
        kinds = [Schedule.constant, Schedule.decaying] if asked is Schedule.auto else [asked]
        return list(dict.fromkeys(measure_schedule(measure, kind) for kind in kinds))

    def _plan_schedule(self, measure: Measure, kind: Schedule) -> Plan:
        config, identity = self.config, self.identity
        bare = Plan(measure, kind, config.tau, config.agreement_k, identity.max_target_tokens, (1.0,), (), {})
        key = cache_key(
            self.decoded_by, self.dev_hash, measure=measure.value, tau=config.tau, agreement_k=config.agreement_k
        )
        chunk_rows = CHUNK_BATCHES * config.batch_size
        full_cache = TraceCache(self.folder / "dev" / f"{measure.value}-full", key, chunk_rows)
        full = full_cache.decode(self.decode, self.dev, bare.policy(1.0), f"dev-{measure.value}-full", self.progress)
        check_rows(full, self.dev, "dev")
        flips = collect_flips(full, identity.exit_layers, kind, config.tau, identity.max_target_tokens)
        if config.per_layer:
            grid = layer_path(flips, identity.exit_layers, identity.num_layers, config.grid_size)
        else:
            grid = scalar_grid(flips, config.grid_size)
        key = {**key, "schedule": kind.value, "grid": hash_json(grid)}
        cache = TraceCache(self.folder / "dev" / f"{measure.value}-{kind.value}", key, chunk_rows)
        curve = DevCurve(self, Plan(**{**_shallow(bare), "grid": tuple(grid)}), full, cache)
        choices = tuple(curve.choose(tolerance, budget) for tolerance, budget in self.budgets.items())
        return Plan(**{**_shallow(curve.plan), "choices": choices})


def _shallow(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}


def _read_plan(path: Path, key: str) -> Plan | None:
    """A stored plan of the same key; None (said in the log) where it is of another, or unreadable."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            logger.info("%s was planned for other settings or rows: planning anew", path)
            return None
        return Plan.from_json(stored["plan"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s): planning anew", path, error)
        return None


class DevCurve:
    """Dev loss and depth along a grid, decoded only where asked."""

    def __init__(self, planner: Planner, plan: Plan, full: Sequence[DecodeTrace], cache: TraceCache) -> None:
        self.planner = planner
        self.plan = plan
        self.cache = cache
        config = planner.config
        self.loss = ConsistencyLoss(config.consistency, planner.dev, full, clean=planner.clean)
        self.traces: dict[int, Sequence[DecodeTrace]] = {0: full}

    def at(self, index: int) -> tuple[float, float]:
        """(mean loss, share of layers skipped) at a member of the grid."""
        if index not in self.traces:
            nearest = max(known for known in self.traces if known < index)
            identity = self.planner.identity
            self.traces[index] = step_down(
                self.cache,
                self.planner.decode,
                self.planner.dev,
                self.plan.policy(self.plan.grid[index]),
                self.traces[nearest],
                (identity.exit_layers, identity.num_layers),
                f"dev-{self.plan.measure.value}-{self.plan.schedule.value}-{index:03d}-from-{nearest:03d}",
                self.planner.progress,
            )
        traces = self.traces[index]
        depth = depth_summary(traces, self.planner.identity.num_layers)
        return float(self.loss(traces).mean()), float(depth["layers_skipped"])

    def choose(self, tolerance: float, budget: float | None) -> DevChoice:
        """Bisect for the most aggressive threshold within the budget, as if the loss only rose along the grid.

        Where it does not, another threshold may be better, never invalid: calibration tests the whole sequence.
        """
        low, high = 0, len(self.plan.grid)  # low is within the budget: loss 0 at full depth
        while budget is not None and high - low > 1:
            middle = (low + high) // 2
            if self.at(middle)[0] <= budget:
                low = middle
            else:
                high = middle
        mean_loss, skipped = self.at(low)
        return DevChoice(tolerance, budget, low, self.plan.grid[low], mean_loss, skipped)


def pick(plans: Sequence[Plan], tolerance: float) -> Plan:
    """The measure that skips most layers on dev at this tolerance; the first named where they tie."""

    def skipped(plan: Plan) -> float:
        return next(choice.layers_skipped for choice in plan.choices if choice.tolerance == tolerance)

    return max(plans, key=skipped)


def budgets(tolerances: Sequence[float], n: int, level: float) -> dict[float, float | None]:
    """Per tolerance the largest mean loss that passes at ``n`` rows; None where not even 0 does."""
    return {tolerance: largest_passing_mean(n, tolerance, level) for tolerance in tolerances}
