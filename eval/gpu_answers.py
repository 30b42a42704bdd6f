"""Is it right? The part of eval.gpu_check that compares answers with decode_one's."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from calm.config import BatchRule, Measure, RunnerName, Stepping
from calm.errors import CalmError
from calm.near_ties import Reference, Told, parts_at
from calm.policies import Confident, Full, Policy, Static
from calm.records import Example
from calm.thresholds import ThresholdSchedule
from serve import backend
from serve.engine import Engine
from serve.graph.branches import can_branch
from serve.graph.ops import TorchOps
from serve.requests import Status

from .gpu_asked import Asked, Record

ROWS, LENGTH = 64, 12  # of what is checked
SAME, NEAR = "same", "near-tie"


def correctness(asked: Asked) -> Record:
    """Row-exact rules against decode_one in fp32, by every way of stepping; and how many tokens bf16 changes.

    Branches, and kernels launched ahead, that cannot be had here are told under ``impossible``.
    """
    from .shapes import random_model

    device = asked.device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model, rows = random_model("tiny", 32, LENGTH), _rows(200)
    policies = dict(_policies(model, rows))
    decoder = Reference(model, record_confidences=True)
    told = {name: [decoder.tell(row, policy) for row in rows] for name, policy in policies.items()}
    counts: dict[str, dict[str, int]] = {}
    impossible: dict[str, str] = {}
    found: Record = {"rows": len(rows) * len(policies), "ways": counts, "impossible": impossible}
    possible = list(product(ways(device), (BatchRule.own, BatchRule.compact)))
    for way, rule in possible:
        if way.plain:
            engine = _engine(device, torch.float32, rule, way)
            counts[f"{way.name} {rule.value}"] = _compared(engine, rows, policies, told)
            asked.keep(found)
    twins = _engine(device, torch.float32, BatchRule.own, WHOLE)
    twins.machine.ops = TorchOps(twins.machine.parts)  # tells a fault of the kernels from one of the capture
    counts["twins whole own"] = _compared(twins, rows, policies, told)
    found["bf16_changed"] = _changed_by_bf16(device, rows, policies)
    asked.keep(found)
    for way, rule in possible:
        if not way.plain:
            name = f"{way.name} {rule.value}"
            try:
                counts[name] = _compared(_engine(device, torch.float32, rule, way), rows, policies, told)
            except Exception as error:
                impossible[name] = f"{type(error).__name__}: {error}"
            asked.keep(found)
    wrong = {name: each["different"] for name, each in counts.items() if each["different"]}
    if wrong:
        return {**found, "status": "failed", "why": f"answers that differ, and no near-tie excuses them: {wrong}"}
    return found


def _rows(vocabulary: int) -> list[Example]:
    from .shapes import random_sources

    sources = random_sources(vocabulary, ROWS, 24, seed=3)
    return [
        Example(f"row-{i}", f"row-{i}", " ".join(f"w{token}" for token in ids[: 4 + i % 20]), "")
        for i, ids in enumerate(sources)
    ]


def _policies(model: Any, rows: Sequence[Example]) -> Iterator[tuple[str, Policy]]:
    """Full and static depth, and each measure at a threshold that about half of the checks reach."""
    from calm.decode_batch import BatchDecoder

    yield "full", Full()
    yield "static", Static(3)
    decoder = BatchDecoder(model, record_confidences=True)
    for measure in (Measure.softmax, Measure.state, Measure.classifier, Measure.agreement):
        if measure is Measure.agreement:
            yield measure.value, Confident(measure, ThresholdSchedule(0.5, length=LENGTH), 3)
            continue
        traces = decoder(list(rows[:16]), Confident(measure, ThresholdSchedule(0.999999, length=LENGTH)))
        seen = sorted(c for trace in traces for step in trace.confidences for c in step if c == c)
        yield measure.value, Confident(measure, ThresholdSchedule(min(statistics.median(seen), 0.999), length=LENGTH))


@dataclass(frozen=True)
class Way:
    """Of going through a step. ``ahead``: each kernel is launched while the one before runs."""

    stepping: Stepping
    ahead: bool = False

    @property
    def name(self) -> str:
        return f"{self.stepping.value}{' ahead' * self.ahead}"

    @property
    def plain(self) -> bool:
        """Whether every device has it. Another may fail, and take its process along: it is tried last."""
        return self.stepping is not Stepping.branches and not self.ahead

    @contextmanager
    def taken(self) -> Iterator[None]:
        """By graph engines that are made in here with its stepping."""
        before, backend.LAUNCHED_AHEAD = backend.LAUNCHED_AHEAD, self.ahead
        try:
            yield
        finally:
            backend.LAUNCHED_AHEAD = before


WHOLE = Way(Stepping.whole)


def ways(device: str) -> list[Way]:
    """Those that this torch and device may have, plain ones first."""
    found = [WHOLE, Way(Stepping.segments)]
    if device == "cuda":
        found += [Way(Stepping.whole, ahead=True), *([Way(Stepping.branches)] if can_branch() else [])]
    return found


def _engine(device: str, dtype: torch.dtype, rule: BatchRule, way: Way) -> Engine:
    from serve.model import served

    from .shapes import random_model

    there = random_model("tiny", 32, LENGTH).to(device, dtype)
    there.classifier.float()
    with way.taken():
        return Engine(
            served(there), rule=rule, runner=RunnerName.graph, stepping=way.stepping, max_batch=16, buckets=(16,),
            max_waiting=4 * ROWS, poison=True, overlap=True,
        )  # fmt: skip


def _compared(
    engine: Engine, rows: Sequence[Example], policies: Mapping[str, Policy], told: Mapping[str, Sequence[Told]]
) -> dict[str, int]:
    """How many answers are the reference's, how many a near-tie excuses, and how many are neither.

    Raises CalmError where one fails.
    """
    counts = {SAME: 0, NEAR: 0, "different": 0}
    for name, policy in policies.items():
        answers = engine.generate([row.source for row in rows], policy=policy)
        for answer, right in zip(answers, told[name], strict=True):
            if answer.status is Status.failed:
                raise CalmError(answer.error)
            theirs = right.trace.tokens, right.trace.crossing_layers
            first = parts_at((answer.tokens, answer.crossing_layers), theirs)
            counts[SAME if first is None else NEAR if right.nearly(first) else "different"] += 1
    return counts


def _changed_by_bf16(device: str, rows: Sequence[Example], policies: Mapping[str, Policy]) -> dict[str, float]:
    """Share of the tokens, by policy, that are others in bf16; from the first difference on all count."""
    engines = [_engine(device, dtype, BatchRule.own, WHOLE) for dtype in (torch.float32, torch.bfloat16)]
    found = {}
    for name, policy in policies.items():
        pairs = zip(*(engine.generate([row.source for row in rows], policy=policy) for engine in engines), strict=True)
        changed = total = 0
        for fine, coarse in pairs:
            total += len(fine.tokens)
            same = next(
                (i for i, (a, b) in enumerate(zip(fine.tokens, coarse.tokens, strict=False)) if a != b),
                min(len(fine.tokens), len(coarse.tokens)),
            )
            changed += len(fine.tokens) - same
        found[name] = changed / total
    return found
