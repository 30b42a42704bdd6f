"""Is it right? The parts of eval.gpu_check that compare: kernels with plain torch, answers with decode_one."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from calm.config import BatchRule, Measure, RunnerName, Stepping, Weights
from calm.errors import CalmError
from calm.near_ties import Reference, Told, parts_at
from calm.policies import Confident, Full, Policy, Static
from calm.records import Example
from calm.thresholds import ThresholdSchedule
from serve.engine import Engine
from serve.graph.branches import can_branch
from serve.graph.ops import TorchOps
from serve.requests import Status

from .gpu_asked import Asked, Record

ROWS, LENGTH = 64, 12  # of what is checked
SOURCE = 512
SAME, NEAR = "same", "near-tie"


@torch.inference_mode()
def kernels(asked: Asked) -> Record:
    """What the device runs, verb by verb, beside plain torch on the same numbers: tiny and the small shape."""
    device = asked.device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found: Record = {}
    bounds = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
    for shape, dtype, cross in product(dict.fromkeys(("tiny", asked.shapes[0])), bounds, Weights):
        bound, kind = bounds[dtype], " int8 cross" if cross is Weights.int8 else ""
        for verb, error in _beside(shape, dtype, device, cross).items():
            name = f"{shape} {str(dtype).removeprefix('torch.')}{kind} {verb}"
            found[name] = error
            if not error <= bound:
                raise CalmError(f"{name}: off by {error:.2g} of its size, more than {bound:g} ({found})")
    return {"relative_errors": found}


def _beside(shape: str, dtype: torch.dtype, device: str, cross: Weights) -> dict[str, float]:
    """Relative error of each verb's results, over rows that run, in the middle of an answer."""
    from .shapes import random_sources, served_shape

    model = served_shape(shape, dtype, SOURCE, 128, 0, device)
    engine = Engine(model, runner=RunnerName.graph, max_batch=8, buckets=(8,), cross_cache_rows=0, cross_kv=cross)
    policy = Confident(Measure.state, ThresholdSchedule(0.9999, length=128))
    for ids in random_sources(model.spec.vocab_size, 7, 100):
        engine.add_request(ids, policy=policy, ignore_eos=True, max_tokens=64)
    for _ in range(12):
        engine.step()
    machine, slots, rows = engine.machine, engine.slots, engine._running
    machine.forget()
    frame, parts = machine.frame(8), machine.parts
    machine.hand_over(frame, rows, [row.step for row in rows], [False] * len(rows)).send(frame)
    machine.ops.begin(frame)
    asked = ((Measure.softmax, 0), (Measure.state, 0))
    executed = torch.full_like(frame.layers, 1).expand(8).contiguous()
    verbs: dict[str, Callable[[TorchOps], object]] = {
        "layer": lambda ops: ops.layer(2, frame, True),
        "confide": lambda ops: ops.confide(2, frame, asked, True),
        "backfill": lambda ops: ops.backfill(frame, executed),
        "words": lambda ops: frame.said[0].copy_(ops.words(frame)),
    }
    state = {"hidden": frame.hidden, "confidence": frame.confidence, "keys": slots.keys, "values": slots.values}
    errors: dict[str, float] = {}
    for verb, act in verbs.items():
        before = {name: tensor.clone() for name, tensor in state.items()}
        results = []
        for ops in (TorchOps(parts), machine.ops):
            act(ops)
            results.append({name: _of_rows(name, tensor, len(rows)) for name, tensor in state.items()})
            for name, tensor in state.items():
                tensor.copy_(before[name])
        worst = max(_error(results[1][name], right) for name, right in results[0].items())
        errors[verb] = worst
    return errors


def _of_rows(name: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """A copy of what belongs to rows that are there."""
    return (tensor[:, :-1] if name in ("keys", "values") else tensor[:count]).float().clone()


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Distance by size, numbers that are none left out on both sides."""
    numbers = right.isfinite() & found.isfinite()
    if not torch.equal(right.isfinite(), found.isfinite()):
        return float("inf")
    size = right[numbers].norm()
    return float((found[numbers] - right[numbers]).norm() / size) if float(size) > 0 else 0.0


def correctness(asked: Asked) -> Record:
    """Row-exact rules against decode_one in fp32, by every way of stepping; and how many tokens bf16 changes.

    Branches that cannot be made here are told under ``impossible``.
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
    for stepping, rule in product(steppings(device), (BatchRule.own, BatchRule.compact)):
        name = f"{stepping.value} {rule.value}"
        try:
            counts[name] = _compared(_engine(device, torch.float32, rule, stepping), rows, policies, told)
        except CalmError as error:
            if stepping is not Stepping.branches:
                raise
            impossible[name] = str(error)
    twins = _engine(device, torch.float32, BatchRule.own, Stepping.whole)
    twins.machine.ops = TorchOps(twins.machine.parts)  # tells a fault of the kernels from one of the capture
    counts["twins whole own"] = _compared(twins, rows, policies, told)
    changed = _changed_by_bf16(device, rows, policies)
    wrong = sum(each["different"] for each in counts.values())
    if wrong:
        raise CalmError(f"{wrong} answers differ from decode_one's and no near-tie excuses them: {counts}")
    return {"rows": len(rows) * len(policies), "ways": counts, "impossible": impossible, "bf16_changed": changed}


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


def steppings(device: str) -> list[Stepping]:
    """Those that this torch and device have."""
    found = [Stepping.whole, Stepping.segments]
    return [*found, Stepping.branches] if device == "cuda" and can_branch() else found


def _engine(device: str, dtype: torch.dtype, rule: BatchRule, stepping: Stepping) -> Engine:
    from serve.model import served

    from .shapes import random_model

    there = random_model("tiny", 32, LENGTH).to(device, dtype)
    there.classifier.float()
    return Engine(
        served(there), rule=rule, runner=RunnerName.graph, stepping=stepping, max_batch=16, buckets=(16,),
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
    engines = [_engine(device, dtype, BatchRule.own, Stepping.whole) for dtype in (torch.float32, torch.bfloat16)]
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
