"""What a cell of the serving run brought, told as records: entries of the figures, ratios, shares of the ceilings."""

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from calm.config import BatchRule, Head, Weights
from calm.errors import CalmError

from .clocks import Clocked, Noise, Paired, median_ratio
from .common import say
from .serving_cells import Cell, Runs
from .sessions import FULL, Session, between, middle, neighbours
from .workload import Entry

if TYPE_CHECKING:
    from calm.cost import CostTable

    from .ceilings import Ceilings


@dataclass
class CellResult:
    """What a cell brought, ready to be told."""

    cell: Cell
    paired: Paired
    sessions: dict[str, list[Session]]
    noise: list[Noise]
    tables: "dict[Head, CostTable | None]"

    @property
    def noisy(self) -> bool:
        return any(noise.noisy for noise in self.noise)

    def record(self, ceilings: "Ceilings | None") -> dict[str, Any]:
        """All of it as JSON has it, raw readings among it."""
        return {
            "source_tokens": self.cell.source_tokens,
            "batch": self.cell.batch,
            "runner": self.cell.runner,
            "noisy": self.noisy,
            "noise": [noise.to_json() for noise in self.noise],
            "entries": [self.entry(runs, ceilings) for runs in self.cell.runs.values()],
            "ratios": self.ratios(),
            "samples": self.samples(),
        }

    def samples(self) -> list[dict[str, Any]]:
        """Every raw reading: of kind ``clock`` (seconds of few and many tokens) and ``session`` (what users saw)."""
        place = {"source_tokens": self.cell.source_tokens, "batch": self.cell.batch}
        clocks = [
            {**place, "kind": "clock", "name": name, "round": number, "few_s": sample.few, "many_s": sample.many}
            for name, samples in self.paired.samples.items()
            for number, sample in enumerate(samples)
        ]
        sessions = [
            {**place, "kind": "session", "name": name, "round": number, **asdict(session)}
            for name, found in self.sessions.items()
            for number, session in enumerate(found)
        ]
        return clocks + sessions

    def static_name(self, depth: int) -> str:
        return FULL if depth == self.cell.workload.num_layers else f"static-{depth}"

    def static_seconds(self, runs: Runs, clock: Clocked) -> list[float]:
        """Per round, static depth of an exit's mean depth."""
        return between(runs.depth(clock), lambda depth: self.paired.seconds(self.static_name(depth), clock))

    def entry(self, runs: Runs, ceilings: "Ceilings | None") -> dict[str, Any]:
        """Everything of one way of decoding."""
        name, labels = runs.entry.name, self.labels(runs.entry)
        told: dict[str, Any] = {"name": name, "depth": runs.entry.depth, **labels, **middle(self.sessions[name])}
        told |= runs.skipped()
        if self.cell.workload.trained:
            told |= runs.rouge_l()
        for clock in Clocked:
            seconds = self.paired.median(name, clock)
            told[f"{clock.value}_s"] = seconds
            told[f"{clock.value}_over_full"] = self.paired.speedup(name, FULL, clock)
            told[f"{clock.value}_predicted_s"] = self._predicted(runs, clock)
            if runs.entry.role == "exit":
                static = self.static_seconds(runs, clock)
                told[f"{clock.value}_static_s"] = statistics.median(static)
                told[f"{clock.value}_over_static"] = median_ratio(static, self.paired.seconds(name, clock))
        if runs.entry.role == "exit":
            told["static"] = self._static_session(runs)
        if ceilings is not None:
            told["ceiling"] = self._ceiling(runs, ceilings, told["decode_s"])
        return told

    def labels(self, entry: Entry) -> dict[str, Any]:
        """What a ratio is of, in the words of every record of ratios."""
        workload = self.cell.workload
        config = workload.config
        return {
            "ours": "exit" if entry.role == "exit" else entry.role,
            "measure": entry.measure and entry.measure.value,
            "head": entry.head.value,
            "shape": workload.name,
            "dtype": config.dtype,
            "source_tokens": self.cell.source_tokens,
            "batch": self.cell.batch,
            "threads": config.threads,
            "rule": entry.rule.value,
            "trace": entry.trace,
        }

    def ratios(self) -> list[dict[str, Any]]:
        """Every exit against full and static depth of the same engine, on both clocks, with the table's prediction."""
        rows = []
        for runs in self.cell.runs.values():
            if runs.entry.role != "exit":
                continue
            for clock in Clocked:
                own = self.paired.seconds(runs.entry.name, clock)
                full = self.paired.seconds(FULL, clock)
                for against, theirs, expected in (
                    ("own-full", full, self._predicted(self.cell.runs[FULL], clock)),
                    ("static", self.static_seconds(runs, clock), self._predicted_static(runs, clock)),
                ):
                    mine = self._predicted(runs, clock)
                    rows.append(
                        {
                            **self.labels(runs.entry),
                            "against": against,
                            "clock": clock.value,
                            "ratio": median_ratio(theirs, own),
                            "predicted": expected / mine if expected and mine else None,
                            "mean_depth": runs.depth(clock),
                            **({"noisy": True} if self.noisy else {}),
                        }
                    )
        return rows

    def _predicted(self, runs: Runs, clock: Clocked) -> float | None:
        table = self.tables.get(runs.entry.head)
        if table is None:
            return None
        try:
            return self.cell.predicted(table, runs, clock)
        except CalmError as error:  # what was measured is worth more than what was foretold
            say(f"no prediction: {error}")
            self.tables[runs.entry.head] = None
            return None

    def _predicted_static(self, runs: Runs, clock: Clocked) -> float | None:
        def of(depth: int) -> list[float]:
            found = self._predicted(self.cell.runs[self.static_name(depth)], clock)
            return [float("nan") if found is None else found]

        seconds = between(runs.depth(clock), of)[0]
        return None if math.isnan(seconds) else seconds

    def _static_session(self, runs: Runs) -> dict[str, float]:
        """What static depth of the same mean would have shown in the figures."""
        around = {
            depth: middle(self.sessions[self.static_name(depth)]) for depth in neighbours(runs.depth(Clocked.call))
        }
        return {
            name: between(runs.depth(Clocked.call), lambda depth: [around[depth][name]])[0]  # noqa: B023
            for name in next(iter(around.values()))
        }

    def _ceiling(self, runs: Runs, ceilings: "Ceilings", seconds: float) -> dict[str, Any]:
        from .ceilings import Need, Sizes, floors, step_need

        workload, config = self.cell.workload, self.cell.workload.config
        sizes = Sizes.of(workload.model.spec, config.dtype)
        width = 4 if config.dtype == "fp32" else 2
        whole = Need()
        steps = range(workload.few, workload.many)
        for step in steps:
            depths = [answer.crossing_layers[step] for answer in runs.answers if step < len(answer.crossing_layers)]
            if not depths:
                continue
            if runs.entry.rule is BatchRule.sync:
                depths = [max(depths)] * len(depths)
            whole += step_need(
                workload.model.spec, sizes, depths, step + 1, self.cell.source_tokens, width, runs.entry.measure,
                runs.entry.head, 1 if config.cross_kv is Weights.int8 else None,
            )  # fmt: skip
        need = whole.over(len(steps))
        return floors(need, seconds, ceilings, config.dtype, need.bytes)
