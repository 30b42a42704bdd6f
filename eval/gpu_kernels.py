"""Do the kernels compute what plain torch does? The part of eval.gpu_check that walks one step verb by verb."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import product

import torch
from torch import Tensor

from calm.confidence import HEAD_MEASURES
from calm.config import BatchRule, Measure, RunnerName, Weights
from calm.errors import CalmError
from calm.policies import Confident
from calm.rules import Rule
from calm.thresholds import ThresholdSchedule
from serve.engine import Engine
from serve.graph.frame import Frame
from serve.graph.ops import TorchOps
from serve.graph.stepping import called
from serve.requests import one_line

from .gpu_asked import SOURCE, Asked, Record

BUCKET, ROWS = 8, 7  # one row of the bucket is nobody
BEFORE = 12  # steps that the rows have behind them
RULES = [
    Rule(BatchRule.own),
    Rule(BatchRule.compact),
    Rule(BatchRule.sync),
    Rule(BatchRule.quantile, share=0.4),
    Rule(BatchRule.lockstep),
]
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of an error, by what is compared
SURE = 5e-2  # of a confidence, by itself: two logits that nearly tie leave the margin between them few digits
OF_RUNNING = ("previous", "confidence", "words", "run")  # nobody reads those of other rows
UNTOUCHED_BY = {"begin": ("previous", "confidence", "words", "confidences")}  # set by the first layer and its check
Verb = Callable[[TorchOps], object]
WRONG = float("inf")


@torch.inference_mode()
def kernels(asked: Asked) -> Record:
    """What the device runs, verb by verb, beside plain torch on the same numbers: tiny and the small shape.

    The relative error of each; ``failed`` where one is out of bounds, with all of them.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    errors: dict[str, float] = {}
    wrong: dict[str, float] = {}
    for shape, dtype, cross in product(dict.fromkeys(("tiny", asked.shapes[0])), BOUNDS, Weights):
        kind = f"{shape} {str(dtype).removeprefix('torch.')}{' int8 cross' if cross is Weights.int8 else ''}"
        for verb, told in Walk(shape, dtype, asked.device, cross).steps():
            worst = errors.get(f"{kind} {verb}", 0.0)
            errors[f"{kind} {verb}"] = worst if told.error <= worst else told.error  # what is no number stays
            if not told.error <= told.bound:
                wrong[f"{kind} {verb}: {told.name}"] = told.error
        asked.keep({"relative_errors": errors, "wrong": wrong})
    found: Record = {"relative_errors": errors, "wrong": wrong}
    if wrong:
        return {**found, "status": "failed", "why": f"off by more than rounding: {', '.join(wrong)}"}
    return found


@dataclass
class Compared:
    """How far a verb's result is from the twin's: by what, how far, and what would be too far."""

    name: str
    error: float
    bound: float


Found = Iterator[tuple[str, Compared]]  # each with its verb


class Walk:
    """One step of rows in the middle of their answers, each by a measure of its own.

    Each verb is done by the twin and by the machine's own from the same numbers; on goes the twin's. The rows came
    where they are by the twin, uncaptured: a kernel at fault is met where it is compared.
    """

    def __init__(self, shape: str, dtype: torch.dtype, device: str, cross: Weights) -> None:
        from .shapes import random_sources, served_shape

        model = served_shape(shape, dtype, SOURCE, 128, 0, device)
        self.engine = Engine(
            model, runner=RunnerName.graph, max_batch=BUCKET, buckets=(BUCKET,), cross_cache_rows=0, cross_kv=cross
        )
        measures = [*Measure, Measure.state]
        for number, ids in enumerate(random_sources(model.spec.vocab_size, ROWS, 100)):
            policy = Confident(measures[number % len(measures)], ThresholdSchedule(0.9999, length=128), 3)
            self.engine.add_request(ids, policy=policy, ignore_eos=True, max_tokens=64)
        machine = self.machine = self.engine.machine
        own, capture, self.twin = machine.ops, machine.capture, TorchOps(machine.parts)
        machine.ops, machine.capture = self.twin, called
        for _ in range(BEFORE):
            for answer in self.engine.step().answers:
                raise CalmError(answer.error)
        machine.forget()
        machine.ops, machine.capture = own, capture
        rows = self.engine._running
        if len(rows) != ROWS:
            raise CalmError(f"{len(rows)} rows run where {ROWS} should")
        self.bound = BOUNDS[dtype]
        self.exact = dtype is torch.float32
        self.frame: Frame = machine.frame(BUCKET)
        chained = [number % 2 == 0 for number in range(ROWS)]
        machine.hand_over(self.frame, rows, [row.step for row in rows], chained).send(self.frame)
        slots = self.engine.slots
        self.state = {each.name: getattr(self.frame, each.name) for each in fields(self.frame)} | {
            name: getattr(slots, name) for name in ("keys", "values", "position", "token")
        }

    def steps(self) -> Found:
        """Through a step: once where all rows go on, once where some leave."""
        before = {name: tensor.clone() for name, tensor in self.state.items()}
        for carry in (Rule(BatchRule.own), Rule(BatchRule.compact)):
            for name, tensor in self.state.items():
                tensor.copy_(before[name])
            yield from self._step(carry)

    def _step(self, carry: Rule) -> Found:
        """Half of the layers, then every way to end it."""
        frame, layers = self.frame, self.machine.num_layers
        asked = tuple(sorted(self.machine.parts.exits.present))
        yield from self._verb("begin", lambda ops: ops.begin(frame))
        for layer in range(1, layers // 2 + 1):
            yield from self._layer(layer, carry)
            yield from self._verb("confide", lambda ops, at=layer: ops.confide(at, frame, asked, carry.holds))  # type: ignore[misc]
            self._some_leave()
            for rule in RULES:
                if rule != carry:
                    yield from self._settle(layer, rule, on=False)
            yield from self._settle(layer, carry)
        frame.layers.fill_(layers // 2)
        executed = (torch.arange(BUCKET, device=frame.hidden.device) % (layers + 1)).contiguous()
        yield from self._words()
        everything = list(range(1, layers + 1))
        yield from self._verb("backfill", lambda ops: ops.backfill(frame, executed), layers=everything, on=False)
        fills = self.machine.parts.exits.fills
        fills[frame.slots[:2]] = False  # of these nobody reads what is above their depth
        for rule in RULES:
            name = f"speak {rule.name.value}"
            yield from self._verb(name, lambda ops, by=rule: ops.speak(frame, by), layers=everything, on=False)  # type: ignore[misc]
        fills.fill_(True)

    def _layer(self, layer: int, carry: Rule) -> Found:
        def act(ops: TorchOps) -> None:
            ops.layer(layer, self.frame, carry.holds)

        yield from self._verb("layer", act, layers=[layer])

    def _some_leave(self) -> None:
        """Of random weights no row would: every third check reaches its threshold."""
        rows = torch.arange(BUCKET, device=self.frame.hidden.device)
        reached = (rows % 3 == self.frame.layers % 3)[:, None]
        self.frame.thresholds.copy_(torch.where(reached, 0.0, 2.0).expand_as(self.frame.thresholds))

    def _settle(self, layer: int, rule: Rule, *, on: bool = True) -> Found:
        def act(ops: TorchOps) -> None:
            ops.settle(layer, self.frame, rule, True)

        yield from self._verb(f"settle {rule.name.value}", act, on=on)

    def _words(self) -> Found:
        """Another word is as good where its logit is as large but for rounding."""
        logits = self.twin.logits(self.frame.hidden).float()[:ROWS]
        try:
            mine = self.machine.ops.words(self.frame)[:ROWS]
        except Exception as error:
            yield "words", _raised(error)
            return
        if bool((mine < 0).any()):
            yield "words", Compared("words", WRONG, self.bound)
            return
        short = logits.amax(1) - logits.gather(1, mine[:, None])[:, 0]
        yield "words", Compared("words", float((short / logits.abs().amax(1)).max()), self.bound)

    def _verb(self, verb: str, act: Verb, *, layers: list[int] | None = None, on: bool = True) -> Found:
        """``layers``: whose K and V it may write; ``on``: go on from what it left."""
        before = {name: tensor.clone() for name, tensor in self.state.items()}
        raised = None
        try:
            act(self.machine.ops)
        except Exception as error:  # of a kernel that does not compile, say; the others have their say
            raised = _raised(error)
        mine = {name: tensor.clone() for name, tensor in self.state.items()}
        for name, tensor in self.state.items():
            tensor.copy_(before[name])
        act(self.twin)
        right = {name: tensor.clone() for name, tensor in self.state.items()}
        if not on:
            for name, tensor in self.state.items():
                tensor.copy_(before[name])
        if raised is not None:
            yield verb, raised
            return
        everyone = torch.arange(BUCKET, device=self.frame.runs.device) < ROWS
        runs, active = everyone if verb == "begin" else before["runs"], int(right["active"])
        for name in self.state:
            if name in UNTOUCHED_BY.get(verb, ()):
                continue
            for compared in self._beside(name, mine[name], right[name], before[name], runs, active, layers or []):
                yield verb, compared

    def _beside(
        self, name: str, mine: Tensor, right: Tensor, before: Tensor, runs: Tensor, active: int, layers: list[int]
    ) -> Iterator[Compared]:
        nobody = self.engine.slots.padding
        if name in ("keys", "values"):
            yield from self._caches(name, mine, right, before, layers)
        elif name in ("position", "token"):
            if name == "position" or self.exact:
                yield self._numbers(name, mine[:nobody], right[:nobody])
        elif name == "order":
            yield self._numbers(name, mine[:active], right[:active])
        elif name == "said":
            first = 0 if self.exact else 1  # in bf16 words are compared by their logits
            yield self._numbers(name, mine[first:, :ROWS], right[first:, :ROWS])
        elif name == "given":
            yield self._numbers(name, mine, right)
        elif name in ("confidence", "confidences"):
            yield self._confidences(name, mine, right, runs)
        elif mine.dim() == 0:
            yield self._numbers(name, mine, right)
        else:
            if name in ("words", "run") and not self.exact:  # of bf16's logits many are equal
                return
            kept = runs if name in OF_RUNNING else slice(0, ROWS)
            yield self._numbers(name, mine[kept], right[kept])

    def _caches(self, name: str, mine: Tensor, right: Tensor, before: Tensor, layers: list[int]) -> Iterator[Compared]:
        """By row, layer and head at the rows' positions; everything else must be as it was."""
        slots, steps = self.frame.slots[:ROWS], self.frame.steps[:ROWS]
        yield self._numbers(name, mine[:, slots, :, steps], right[:, slots, :, steps])
        rest = mine.clone()
        for layer in layers:
            rest[layer - 1, slots, :, steps] = before[layer - 1, slots, :, steps]
        nobody = self.engine.slots.padding
        same = torch.equal(rest[:, :nobody].nan_to_num(), before[:, :nobody].nan_to_num())
        yield Compared(f"{name} elsewhere", 0.0 if same else WRONG, 0.0)

    def _confidences(self, name: str, mine: Tensor, right: Tensor, runs: Tensor) -> Compared:
        """Each by its own size. In bf16 those of the head are left out: another rounding of a logit moves them."""
        from serve.exits import MEASURES

        if not self.exact:
            head = torch.tensor([MEASURES.index(each) for each in HEAD_MEASURES], device=runs.device)
            runs = runs & ~torch.isin(self.frame.measures, head)
        mine, right = mine[runs], right[runs]
        numbers = right.isfinite()
        if not torch.equal(mine.isfinite(), numbers):
            return Compared(name, WRONG, SURE)
        off = (mine - right).abs()[numbers] / right.abs()[numbers].clamp(min=1e-9)
        return Compared(name, float(off.max()) if off.numel() else 0.0, SURE)

    def _numbers(self, name: str, mine: Tensor, right: Tensor) -> Compared:
        """Whole numbers and flags exactly; others by the size of their last dimension."""
        if not right.is_floating_point():
            return Compared(name, 0.0 if torch.equal(mine, right) else WRONG, 0.0)
        mine, right = mine.float(), right.float()
        if not torch.equal(mine.isfinite(), right.isfinite()):
            return Compared(name, WRONG, self.bound)
        off, size = ((tensor.nan_to_num(0.0, 0.0, 0.0)).norm(dim=-1) for tensor in (mine - right, right))
        share = torch.where(off > 0, off / size, 0.0)
        return Compared(name, float(share.max()) if share.numel() else 0.0, self.bound)


def _raised(error: Exception) -> Compared:
    return Compared(f"raised {type(error).__name__}: {one_line(error)[:200]}", WRONG, 0.0)
