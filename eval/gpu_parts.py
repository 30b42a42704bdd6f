"""The parts of eval.gpu_check: each takes a device, the shapes that are timed and a folder, and returns its record."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from calm.config import BatchRule, Measure, RunnerName, Stepping, TraceKind
from calm.engine_config import ServingConfig
from calm.errors import CalmError
from calm.near_ties import Reference, Told, parts_at
from calm.policies import Confident, Full, Policy, Static
from calm.records import Example
from calm.thresholds import ThresholdSchedule
from serve.engine import Engine
from serve.graph.frame import GIVEN
from serve.graph.machine import GraphMachine
from serve.graph.ops import TorchOps
from serve.graph.stepping import branches

Record = dict[str, Any]
Part = Callable[[str, Sequence[str], Path], Record]
ROWS, LENGTH = 64, 12  # of what is checked
SOURCE = 512
SAME, NEAR = "same", "near-tie"


@torch.inference_mode()
def kernels(device: str, shapes: Sequence[str], out: Path) -> Record:
    """What the device runs, verb by verb, beside plain torch on the same numbers: tiny and the small shape."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found: Record = {}
    for shape in dict.fromkeys(("tiny", shapes[0])):
        for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
            for verb, error in _beside(shape, dtype, device).items():
                name = f"{shape} {str(dtype).removeprefix('torch.')} {verb}"
                found[name] = error
                if not error <= bound:
                    raise CalmError(f"{name}: off by {error:.2g} of its size, more than {bound:g} ({found})")
    return {"relative_errors": found}


def _beside(shape: str, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Relative error of each verb's results, over rows that run, in the middle of an answer."""
    from .shapes import random_sources, served_shape

    model = served_shape(shape, dtype, SOURCE, 128, 0, device)
    engine = Engine(model, runner=RunnerName.graph, max_batch=8, buckets=(8,), cross_cache_rows=0)
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


def correctness(device: str, shapes: Sequence[str], out: Path) -> Record:
    """Row-exact rules against decode_one in fp32, by every way of stepping; and how many tokens bf16 changes."""
    from .shapes import random_model

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model, rows = random_model("tiny", 32, LENGTH), _rows(200)
    policies = dict(_policies(model, rows))
    decoder = Reference(model, record_confidences=True)
    told = {name: [decoder.tell(row, policy) for row in rows] for name, policy in policies.items()}
    counts: dict[str, dict[str, int]] = {}
    for stepping in _steppings(device):
        for rule in (BatchRule.own, BatchRule.compact):
            engine = _engine(device, torch.float32, rule, stepping)
            counts[f"{stepping.value} {rule.value}"] = _compared(engine, rows, policies, told)
    twins = _engine(device, torch.float32, BatchRule.own, Stepping.whole)
    twins.machine.ops = TorchOps(twins.machine.parts)  # tells a fault of the kernels from one of the capture
    counts["twins whole own"] = _compared(twins, rows, policies, told)
    changed = _changed_by_bf16(device, rows, policies)
    wrong = sum(each["different"] for each in counts.values())
    if wrong:
        raise CalmError(f"{wrong} answers differ from decode_one's and no near-tie excuses them: {counts}")
    return {"rows": len(rows) * len(policies), "ways": counts, "bf16_changed": changed}


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


def _steppings(device: str) -> list[Stepping]:
    found = [Stepping.whole, Stepping.segments]
    return [*found, Stepping.branches] if device == "cuda" and branches() else found


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
    """How many answers are the reference's, how many a near-tie excuses, and how many are neither."""
    counts = {SAME: 0, NEAR: 0, "different": 0}
    for name, policy in policies.items():
        answers = engine.generate([row.source for row in rows], policy=policy)
        for answer, right in zip(answers, told[name], strict=True):
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


def ceilings(device: str, shapes: Sequence[str], out: Path) -> Record:
    """What the card can do at most, and what a launch and a wait cost."""
    from .ceilings import probe

    found: Record = probe(device=device).to_json()
    if device == "cuda":
        source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = timed(lambda: target.copy_(source), device, 20)
        found["copy_bytes_per_s"] = 2 * source.numel() / seconds
        small = torch.zeros(1, device=device)
        found["launch_s"] = timed(lambda: small.add_(1), device, 200)
        graph = torch.cuda.CUDAGraph()
        small.add_(1)
        with torch.cuda.graph(graph):
            for _ in range(200):
                small.add_(1)
        found["graph_node_s"] = timed(graph.replay, device, 20) / 200
        began = time.perf_counter()
        for _ in range(50):
            torch.cuda.synchronize()
        found["synchronize_s"] = (time.perf_counter() - began) / 50
    return found


def timed(act: Callable[[], object], device: str, times: int) -> float:
    """Seconds of one call: the median of five goes of ``times`` calls each, the first of six not counted."""
    found = []
    for _ in range(6):
        began = time.perf_counter()
        for _ in range(times):
            act()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / times)
    return statistics.median(found[1:])


def core(device: str, shapes: Sequence[str], out: Path) -> Record:
    """Full depth and early exit at the sizes that goals are about, with floors and predictions."""
    small, large = shapes
    batches = [1, 64] if device == "cuda" else [1, 2]
    found: Record = {}
    for shape in (small, large):
        found[shape if shape not in found else f"{shape} again"] = _serving(device, shape, batches, out, "core")
    return found


def matrix(device: str, shapes: Sequence[str], out: Path) -> Record:
    """Every measure, rule and trace of both shapes: Figures 1 and 2."""
    batches = [1, 8, 32] if device == "cuda" else [1, 2]
    measures = [Measure.softmax, Measure.state, Measure.classifier]
    rules = [BatchRule.own, BatchRule.compact, BatchRule.sync]
    traces = [TraceKind.tight, TraceKind.wide]
    return {
        shape: _serving(device, shape, batches, out, "matrix", measures, rules, traces)
        for shape in dict.fromkeys(shapes)
    }


def _serving(
    device: str,
    shape: str,
    batches: list[int],
    out: Path,
    kind: str,
    measures: Sequence[Measure] = (Measure.state,),
    rules: Sequence[BatchRule] = (BatchRule.own, BatchRule.compact, BatchRule.sync),
    traces: Sequence[TraceKind] = (TraceKind.tight,),
) -> Record:
    """eval.throughput's own run, and Figures 1 and 2 of it where they can be drawn."""
    from .common import plain
    from .serving_figures import LATENCY, THROUGHPUT, draw_figure
    from .serving_run import measured
    from .workload import shape_workload

    config = ServingConfig(
        shape=shape, source_tokens=[SOURCE if device == "cuda" else 16], batches=batches, measures=list(measures),
        rules=list(rules), traces=list(traces), dtype="bf16", runner=RunnerName.graph, device=_device(device),
        repeats=5 if device == "cuda" else 2, few=8, many=72 if device == "cuda" else 12, attempts=1, allow_noisy=True,
    )  # fmt: skip
    folder = out / kind / shape
    folder.mkdir(parents=True, exist_ok=True)
    found = {"config": plain(config), **measured(shape_workload(config, shape), folder)}
    figures = [name for drawn in (THROUGHPUT, LATENCY) for name in draw_figure(found, drawn, folder)]
    return {**found, "figures": figures}


def _device(device: str) -> Any:
    from calm.config import Device

    return Device(device)


@torch.inference_mode()
def gaps(device: str, shapes: Sequence[str], out: Path) -> Record:
    """Of a step at batch 1: how much of it the device works, and how many kernels a layer is."""
    from calm.rules import Rule

    from .shapes import random_sources, served_shape

    found: Record = {}
    acts: dict[str, Callable[[], object]] = {}
    for shape in dict.fromkeys(shapes):
        model = served_shape(shape, torch.bfloat16, SOURCE, 128, 0, device)
        for stepping in _steppings(device):
            engine = Engine(model, runner=RunnerName.graph, stepping=stepping, max_batch=1, buckets=(1,))
            engine.add_request(
                random_sources(model.spec.vocab_size, 1, 64)[0], policy=Full(), max_tokens=128, ignore_eos=True
            )
            for _ in range(8):
                engine.step()
            machine: GraphMachine = engine.machine
            act = machine.stepped(Rule(BatchRule.own), 1)
            began, steps = time.perf_counter(), 0
            while engine.has_work:
                engine.step()
                steps += 1
            whole = (time.perf_counter() - began) / steps
            machine.frame(1).given[GIVEN.index("chained")] = 0  # the same position again and again
            busy = timed(act, device, 50)
            found[f"{shape} {stepping.value}"] = {
                "step_s": whole,
                "device_s": busy,
                "gap_share": max(0.0, 1.0 - busy / whole),
                "num_layers": model.spec.num_layers,
            }
            acts[f"{shape} {stepping.value}"] = act
    for name, counted in acts.items():  # once a profiler has begun, everything is slower
        found[name]["kernels"] = kernels_of(counted, device)
    return found


def kernels_of(act: Callable[[], object], device: str) -> int | None:
    """Kernels that one call runs on the device; None where nobody counts them."""
    if device != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        act()
        torch.cuda.synchronize()
    return sum(int(event.count) for event in seen.key_averages() if str(event.device_type).endswith("CUDA"))


def transformers(device: str, shapes: Sequence[str], out: Path) -> Record:
    """Hugging Face's generate at batch 1, eager and compiled with a static cache, on the weights of ``core``."""
    from transformers import CompileConfig

    from .shapes import random_model, random_sources

    found: Record = {}
    few, many = (8, 72) if device == "cuda" else (2, 6)
    source = SOURCE if device == "cuda" else 16
    for shape in dict.fromkeys(shapes):
        model = random_model(shape, SOURCE, 128).hf.to(device, torch.bfloat16)
        ids = torch.tensor(random_sources(model.config.vocab_size, 1, source), device=device)
        for name, extra in (
            ("eager", {}),
            ("compiled", {"cache_implementation": "static", "compile_config": CompileConfig()}),
        ):

            def call(tokens: int, extra: dict[str, Any] = extra, model: Any = model, ids: Any = ids) -> None:
                model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **extra)

            try:
                # the longer one first: its cache serves both, and one compilation
                seconds = {n: timed(lambda n=n, go=call: go(n), device, 1) for n in (many, few)}  # type: ignore[misc]
            except Exception as error:
                found[f"{shape} {name}"] = {"why": f"{type(error).__name__}: {str(error)[:200]}"}
                continue
            found[f"{shape} {name}"] = {"decode_s": (seconds[many] - seconds[few]) / (many - few)}
    return found


def training(device: str, shapes: Sequence[str], out: Path) -> Record:
    """A finetuning step of the small shape in bf16, exits included: tokens a second, and the share of a product's rate.

    A plain step counts as six operations a weight and token of its side (forward and backward), heads of exits and
    attention left out.
    """
    from calm.config import StepShape, TrainStepConfig

    from .train_step import CASES, build, measure

    kind = StepShape.small if device == "cuda" else StepShape.tiny
    config = TrainStepConfig(shapes=[kind], batch_size=32 if device == "cuda" else 2, repeats=3, warmup=1, memory=False)
    low = torch.bfloat16 if device == "cuda" else None
    records = measure(config, torch.device(device), low)
    model = build(CASES[kind], torch.device("cpu"), 0).hf
    sides = {name: sum(p.numel() for p in getattr(model, name).parameters()) for name in ("encoder", "decoder")}
    sides["encoder"] -= model.shared.weight.numel()  # looked up, not multiplied
    sides["decoder"] += model.lm_head.weight.numel() - model.shared.weight.numel()
    peak = product_flops(device, low or torch.float32)
    for record in records:
        work = 6.0 * (sides["encoder"] * record["source_tokens"] + sides["decoder"] * record["target_tokens"])
        record["share_of_peak"] = work / statistics.median(record["seconds"]) / peak
    return {"records": records, "product_flops": peak}


def product_flops(device: str, dtype: torch.dtype) -> float:
    """Operations a second of a large square product."""
    size = 8192 if device == "cuda" else 512
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / timed(lambda: left @ right, device, 10)


PARTS: dict[str, Part] = {
    "kernels": kernels,
    "correctness": correctness,
    "ceilings": ceilings,
    "core": core,
    "matrix": matrix,
    "gaps": gaps,
    "training": training,
    "transformers": transformers,
}


def _share(shape: str, batch: int) -> Callable[[Record], float | None]:
    """Of the floor that full depth reaches."""

    def of(part: Record) -> float | None:
        for cell in part[shape]["cells"]:
            if cell["batch"] == batch:
                full = next(entry for entry in cell["entries"] if entry["name"] == "full")
                share: float | None = full["ceiling"]["share_of_memory"]
                return share
        return None

    return of


def _ratio(shape: str, batch: int, rule: str, over_predicted: bool = False) -> Callable[[Record], float | None]:
    """Early exit by ``state`` on tight traces over own full depth, by a decode step."""

    def of(part: Record) -> float | None:
        for row in part[shape]["ratios"]:
            wanted = (row["batch"], row["rule"], row["measure"], row["trace"], row["against"], row["clock"])
            if wanted == (batch, rule, "state", "tight", "own-full", "decode"):
                ratio: float = row["ratio"]
                if over_predicted:
                    return ratio / row["predicted"] if row["predicted"] else None
                return ratio
        return None

    return of


GOALS: dict[str, tuple[str, float, Callable[[Record], float | None]]] = {
    "base, batch 64: share of the floor": ("core", 0.5, _share("base", 64)),
    "small, batch 64: share of the floor": ("core", 0.35, _share("small", 64)),
    "base, batch 1: share of the floor": ("core", 0.25, _share("base", 1)),
    "small, batch 1: share of the floor": ("core", 0.12, _share("small", 1)),
    "base, batch 1: early exit over full": ("core", 1.3, _ratio("base", 1, "own")),
    "base, batch 32 compact: early exit over full": ("matrix", 1.4, _ratio("base", 32, "compact")),
    "base, batch 8 sync: early exit over full": ("matrix", 1.25, _ratio("base", 8, "sync")),
    "base, batch 1: early exit by its prediction": ("core", 0.9, _ratio("base", 1, "own", True)),
    "small, batch 1: 1 - gaps of a step": ("gaps", 0.85, lambda part: 1 - part["small whole"]["gap_share"]),
}
