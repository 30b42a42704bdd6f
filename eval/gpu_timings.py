"""How fast is it, and how near to the card? The parts of eval.gpu_check that time."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from calm.config import BatchRule, Device, Measure, RunnerName, Stepping, TraceKind, Weights
from calm.engine_config import ServingConfig
from calm.errors import CalmError
from calm.policies import Full, Policy, Static
from serve.engine import Engine
from serve.graph.frame import GIVEN
from serve.graph.machine import GraphMachine
from serve.model import ServedModel

from .gpu_answers import Way, ways
from .gpu_asked import MEASURES, RULES, SOURCE, TRACES, Asked, Record

LONGEST = 128  # tokens of the answers that gaps are read in


@torch.inference_mode()
def ceilings(asked: Asked) -> Record:
    """What the card can do at most, and what a launch and a wait cost."""
    from .ceilings import probe

    device = asked.device
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


def core(asked: Asked) -> Record:
    """Full depth and early exit at the sizes that goals are about, with floors and predictions."""
    device = asked.device
    small, large = asked.shapes
    batches = [1, 64] if device == "cuda" else [1, 2]
    found: Record = {}
    for shape in (small, large):
        found[shape if shape not in found else f"{shape} again"] = _serving(device, shape, batches, asked.out, "core")
        asked.keep(found)
    found[f"{large} int8 cross"] = _serving(device, large, batches, asked.out, "core_int8_cross", cross_kv=Weights.int8)
    return found


def matrix(asked: Asked) -> Record:
    """Every measure, rule and trace of both shapes: Figures 1 and 2."""
    device = asked.device
    batches = [1, 8, 32] if device == "cuda" else [1, 2]
    found: Record = {}
    for shape in reversed(dict.fromkeys(asked.shapes)):  # the larger one first: goals are about it
        found[shape] = _serving(device, shape, batches, asked.out, "matrix", MEASURES, RULES, TRACES)
        asked.keep(found)
    return found


def _serving(
    device: str,
    shape: str,
    batches: list[int],
    out: Path,
    kind: str,
    measures: Sequence[Measure] = (Measure.state,),
    rules: Sequence[BatchRule] = tuple(RULES),
    traces: Sequence[TraceKind] = (TraceKind.tight,),
    cross_kv: Weights = Weights.model,
) -> Record:
    """eval.throughput's own run, and Figures 1 and 2 of it where they can be drawn."""
    from .common import plain
    from .serving_figures import LATENCY, THROUGHPUT, draw_figure
    from .serving_run import measured
    from .workload import shape_workload

    config = ServingConfig(
        shape=shape, source_tokens=[SOURCE if device == "cuda" else 16], batches=batches, measures=list(measures),
        rules=list(rules), traces=list(traces), dtype="bf16", runner=RunnerName.graph, device=Device(device),
        cross_kv=cross_kv,
        repeats=5 if device == "cuda" else 2, few=8, many=72 if device == "cuda" else 12, attempts=1, allow_noisy=True,
    )  # fmt: skip
    folder = out / kind / shape
    folder.mkdir(parents=True, exist_ok=True)
    found = {"config": plain(config), **measured(shape_workload(config, shape), folder)}
    figures = [name for drawn in (THROUGHPUT, LATENCY) for name in draw_figure(found, drawn, folder)]
    return {**found, "figures": figures}


@torch.inference_mode()
def gaps(asked: Asked) -> Record:
    """Of a step at batch 1, by every way of ending it early: how much of it the device works, and how many kernels run.

    At full depth, and (``early``) where the row leaves after a quarter of the layers; ``ahead``: each kernel is
    launched while the one before runs. What cannot be had here leaves the reason.
    """
    from .shapes import served_shape

    found: Record = {}
    acts: dict[str, Callable[[], object]] = {}
    for way, shape in product(ways(asked.device), dict.fromkeys(asked.shapes)):
        model = served_shape(shape, torch.bfloat16, SOURCE, LONGEST, 0, asked.device)
        depths: list[tuple[str, Policy]] = [("", Full()), (" early", Static(max(1, model.spec.num_layers // 4)))]
        for kind, policy in depths:
            name = f"{shape} {way.name}{kind}"
            try:
                engine = running(model, way, policy)
                found[name] = gap_of(engine, asked.device)
                acts[name] = step_again(engine)
            except Exception as error:
                if way.plain:
                    raise
                found[name] = {"why": f"{type(error).__name__}: {error}"}
            asked.keep(found)
    for name, act in acts.items():  # once a profiler has begun, everything is slower
        if Stepping.branches.value not in name:  # CUPTI 13.0 may bring the process down over conditional nodes
            found[name] |= kernels_of(act, asked.device)
            asked.keep(found)
    return found


def running(model: ServedModel, way: Way, policy: Policy) -> Engine:
    """An engine with one row, some steps into its answer. Raises CalmError where the row fails."""
    from .shapes import random_sources

    with way.taken():
        engine = Engine(model, runner=RunnerName.graph, stepping=way.stepping, max_batch=1, buckets=(1,))
    source = random_sources(model.spec.vocab_size, 1, 64)[0]
    engine.add_request(source, policy=policy, max_tokens=LONGEST, ignore_eos=True)
    for _ in range(8):
        for answer in engine.step().answers:
            raise CalmError(answer.error)
    return engine


def gap_of(engine: Engine, device: str) -> Record:
    """Of the row's next steps; it goes on running, so that its exits stay.

    ``device_s``: of the same step sent again and again without a word of the host in between, but for segments', whose
    host waits for each layer's flag: of them it is no share of the device.
    """
    began, steps = time.perf_counter(), LONGEST // 2
    for _ in range(steps):
        engine.step()
    whole = (time.perf_counter() - began) / steps
    busy = timed(step_again(engine), device, 50)
    return {
        "step_s": whole,
        "device_s": busy,
        "gap_share": max(0.0, 1.0 - busy / whole),
        "layers": int(engine.machine.frame(1).layers),
        "num_layers": engine.model.spec.num_layers,
    }


def step_again(engine: Engine) -> Callable[[], object]:
    """The row's last step on the device, the same position again and again."""
    from calm.rules import Rule

    machine: GraphMachine = engine.machine
    machine.forget()
    machine.frame(1).given[GIVEN.index("chained")] = 0
    return machine.stepped(Rule(BatchRule.own), 1)


def kernels_of(act: Callable[[], object], device: str) -> Record:
    """``kernels``: what one call runs on the device, copies and fills included; None where nobody counts, and why."""
    if device != "cuda":
        return {"kernels": None, "uncounted": "no CUDA device"}
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            act()
            torch.cuda.synchronize()
        count = sum(int(event.count) for event in seen.key_averages() if str(event.device_type).endswith("CUDA"))
    except Exception as error:
        return {"kernels": None, "uncounted": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"kernels": count} if count else {"kernels": None, "uncounted": "the profiler saw none"}


def transformers(asked: Asked) -> Record:
    """Hugging Face's generate at batch 1, eager and compiled with a static cache, and beside it our full depth."""
    from transformers import CompileConfig

    from .shapes import random_model, random_sources, served_shape

    device = asked.device
    found: Record = {}
    source = SOURCE if device == "cuda" else 16
    for shape in dict.fromkeys(asked.shapes):
        ours = served_shape(shape, torch.bfloat16, SOURCE, LONGEST, 0, device)
        engine = Engine(ours, runner=RunnerName.graph, max_batch=1, buckets=(1,), cross_cache_rows=0)
        drawn = random_sources(ours.spec.vocab_size, 1, source)

        def decode(tokens: int, engine: Engine = engine, drawn: list[list[int]] = drawn) -> None:
            engine.generate(drawn, policy=Full(), max_tokens=tokens, ignore_eos=True)

        found[f"{shape} ours"] = {"decode_s": decode_seconds(decode, device)}
        del engine, decode  # its graphs were captured in inference mode, which theirs would not stand beside
        gc.collect()
        model = random_model(shape, SOURCE, LONGEST).hf.to(device, torch.bfloat16)
        ids = torch.tensor(drawn, device=device)
        for name, extra in (
            ("eager", {}),
            ("compiled", {"cache_implementation": "static", "compile_config": CompileConfig()}),
        ):

            def call(tokens: int, extra: dict[str, Any] = extra, model: Any = model, ids: Any = ids) -> None:
                model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **extra)

            graphs = compiled_graphs()
            try:
                timed_s = decode_seconds(call, device)
                if extra and compiled_graphs() == graphs:
                    found[f"{shape} {name}"] = {"why": "transformers compiled nothing", "uncompiled_decode_s": timed_s}
                else:
                    found[f"{shape} {name}"] = {"decode_s": timed_s}
            except Exception as error:
                found[f"{shape} {name}"] = {"why": f"{type(error).__name__}: {str(error)[:200]}"}
            asked.keep(found)
    return found


def compiled_graphs() -> int:
    """That torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def decode_seconds(call: Callable[[int], object], device: str) -> float:
    """Of a token, between answers of few and of many; ``call`` makes one of so many tokens."""
    few, many = (8, 72) if device == "cuda" else (2, 6)
    # the longer one first: of a compiled model its cache serves both, and one compilation
    seconds = {tokens: timed(partial(call, tokens), device, 1) for tokens in (many, few)}
    return (seconds[many] - seconds[few]) / (many - few)


def training(asked: Asked) -> Record:
    """A finetuning step of the small shape in bf16, exits included: tokens a second, and the share of a product's rate.

    What a token costs is ``operations``'s, without the heads of exits.
    """
    from calm.config import StepShape, TrainStepConfig

    from .train_step import CASES, build, measure

    device = asked.device
    kind = StepShape.small if device == "cuda" else StepShape.tiny
    config = TrainStepConfig(shapes=[kind], batch_size=32 if device == "cuda" else 2, repeats=3, warmup=1, memory=False)
    low = torch.bfloat16 if device == "cuda" else None
    records = measure(config, torch.device(device), low)
    source, target = operations(build(CASES[kind], torch.device("cpu"), 0).hf)
    peak = product_flops(device, low or torch.float32)
    for record in records:
        work = source * record["source_tokens"] + target * record["target_tokens"]
        record["share_of_peak"] = work / statistics.median(record["seconds"]) / peak
    return {"records": records, "product_flops": peak}


def operations(hf: Any) -> tuple[float, float]:
    """Of a plain training step of a T5, for each source and each target token: six a weight of its side (forward and
    backward), the head's once. Attention is left out, and what is looked up and not multiplied.
    """
    sides = {name: sum(p.numel() for p in getattr(hf, name).parameters()) for name in ("encoder", "decoder")}
    table = hf.shared.weight.numel()
    return 6.0 * (sides["encoder"] - table), 6.0 * (sides["decoder"] - table + hf.lm_head.weight.numel())


def product_flops(device: str, dtype: torch.dtype) -> float:
    """Operations a second of a large square product."""
    size = 8192 if device == "cuda" else 512
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / timed(lambda: left @ right, device, 10)
