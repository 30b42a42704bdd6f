"""Who is timed against whom: the workers of every peer, the cases, and what of ours runs in each."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calm.config import Head, TraceKind
from calm.engine_config import PeersConfig

from .common import asked_of

WORKERS = Path(__file__).parent / "peer_workers"
OURS = "ours"
REFERENCE = "transformers-fp32"  # whose tokens the others are compared with


@dataclass(frozen=True)
class WorkerPlan:
    """One process.

    Attributes:
        name: of the worker.
        against: the peer that it stands for in the table of ratios; the faster of several counts.
        module: in eval/peer_workers.
        dtype: of its arithmetic or weights, as the table calls it.
        environment: folder under ``environments=`` whose interpreter runs it; None is ours.
        settings: handed to it.
    """

    name: str
    against: str
    module: str
    dtype: str
    environment: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def command(self, environments: Path) -> list[str]:
        """Starts it: as a module in our environment, by path in another one."""
        if self.environment is None:
            return [sys.executable, "-m", f"{__package__}.peer_workers", self.module]
        return [str(self.interpreter(environments)), str(WORKERS), self.module]

    def interpreter(self, environments: Path) -> Path:
        assert self.environment is not None
        return (environments / self.environment / "bin" / "python").absolute()


def _transformers(dtype: str, torch_dtype: str, compiled: bool) -> WorkerPlan:
    against = "transformers-compiled" if compiled else "transformers"
    return WorkerPlan(f"{against}-{dtype}", against, "hf", dtype, None, {"dtype": torch_dtype, "compiled": compiled})


def _ctranslate2(dtype: str, compute_type: str) -> WorkerPlan:
    name = f"ctranslate2-{dtype}"
    return WorkerPlan(name, name, "ct2", dtype, None, {"compute_type": compute_type})


def _openvino(weights: str) -> WorkerPlan:
    return WorkerPlan(f"openvino-{weights}", "openvino", "ov", weights, "openvino", {"weights": weights})


ALL_WORKERS = (
    _transformers("fp32", "float32", False),
    _transformers("bf16", "bfloat16", False),
    _transformers("fp32", "float32", True),
    _transformers("bf16", "bfloat16", True),
    _ctranslate2("fp32", "float32"),
    _ctranslate2("int8", "int8"),
    _openvino("fp32"),
    _openvino("int8"),
    WorkerPlan("onnxruntime-fp32", "onnxruntime", "ort", "fp32", "onnxruntime"),
)


def peer_workers(config: PeersConfig) -> list[WorkerPlan]:
    return [plan for plan in ALL_WORKERS if plan.against in config.peers]


def our_workers(config: PeersConfig) -> list[WorkerPlan]:
    """One per dtype, in processes like the peers'."""
    runner = {"runner": config.runner.value, "cross_kv": config.cross_kv.value}
    dtypes = dict.fromkeys([*config.dtypes, *config.exit_dtypes])
    return [WorkerPlan(f"{OURS}-{name}", OURS, "ours", name, None, {"dtype": name, **runner}) for name in dtypes]


@dataclass(frozen=True)
class Case:
    """One model, source length and batch.

    Attributes:
        shape: of random weights, or the name of a trained model's folder.
        source: tokens of every source; 0: the articles as they are.
    """

    shape: str
    source: int
    batch: int
    threads: int

    def key(self, config: PeersConfig) -> str:
        """Name of its record: another one where anything is asked that changes what is measured."""
        told = json.dumps(asked_of(config, UNIMPORTANT), sort_keys=True).encode()
        length = f"s{self.source}" if self.source else "articles"
        return f"{self.shape}-{length}-b{self.batch}-t{self.threads}-{hashlib.sha256(told).hexdigest()[:8]}"


# what does not change one case's measurement: which others there are, where things lie, how long one waits
UNIMPORTANT = (
    "shapes", "sources", "batches", "base_sources", "base_batches", "environments", "work", "load_timeout",
    "call_timeout", "allow_noisy", "attempts", "n",
)  # fmt: skip


def cases(config: PeersConfig, trained: str | None = None) -> list[Case]:
    """All that are asked for, model by model; of a trained model at every batch size."""
    if trained is not None:
        return [Case(trained, 0, batch, config.threads) for batch in config.batches]
    found = []
    for shape in config.shapes:
        base = shape == "base"
        sources = config.base_sources if base else config.sources
        batches = config.base_batches if base else config.batches
        found += [Case(shape, source, batch, config.threads) for source in sources for batch in batches]
    return found


@dataclass(frozen=True)
class Entrant:
    """One contender of a case: what a worker does under the name ``variant``.

    Attributes:
        against: the peer it stands for; ``ours`` of ours.
        role: peer, full, static or exit.
        layer: of a static depth.
    """

    name: str
    worker: str
    variant: str
    against: str
    dtype: str
    role: str
    head: str | None = None
    measure: str | None = None
    rule: str | None = None
    trace: str | None = None
    layer: int | None = None


def peer_entrant(plan: WorkerPlan) -> Entrant:
    return Entrant(plan.name, plan.name, "full", plan.against, plan.dtype, "peer")


def _ours(dtype: str, variant: str, role: str, **labels: Any) -> Entrant:
    worker = f"{OURS}-{dtype}"
    return Entrant(f"{worker}-{variant}", worker, variant, OURS, dtype, role, **labels)


@dataclass(frozen=True)
class Depths:
    """What a trace asks of a case: depths per row and token, and their means over the tokens that a clock sees.

    Attributes:
        decode, call: mean over the tokens ``few`` to ``many``, and over all ``many``.
    """

    trace: TraceKind
    measure: str
    rows: tuple[tuple[int, ...], ...]
    decode: float
    call: float


def our_entrants(config: PeersConfig, depths: Sequence[Depths], num_layers: int) -> list[Entrant]:
    """Full depth in every dtype and head; exits, and the static depths around their means."""
    found = [
        _ours(dtype, f"full-{head.value}", "full", head=head.value, rule="own")
        for dtype in dict.fromkeys([*config.dtypes, *config.exit_dtypes])
        for head in _full_heads(config)
    ]
    for dtype in config.exit_dtypes:
        for head in config.exit_heads:
            for asked in depths:
                labels = {"head": head.value, "measure": asked.measure, "trace": asked.trace.value}
                for rule in config.rules:
                    name = f"{rule.value}-{asked.trace.value}-{asked.measure}-{head.value}"
                    found.append(_ours(dtype, name, "exit", rule=rule.value, **labels))
            for layer in static_layers(depths, num_layers):
                name = f"static-{layer}-{_speaking(head)}"
                found.append(_ours(dtype, name, "static", head=_speaking(head), rule="own", layer=layer))
    return list(dict.fromkeys(found))


def _full_heads(config: PeersConfig) -> list[Head]:
    """Of full and static depths: the heads of exits beside them, save candidates, which only a check has."""
    heads = [*config.heads, *config.exit_heads]
    return list(dict.fromkeys(Head(_speaking(head)) for head in heads))


def _speaking(head: Head) -> str:
    """The head that says a token of a row which asks no confidence."""
    return Head.full.value if head is Head.candidates else head.value


def speaking(entrant: Entrant) -> str:
    """The head of the full and static depths that an exit is held against."""
    assert entrant.head is not None
    return _speaking(Head(entrant.head))


def static_layers(depths: Sequence[Depths], num_layers: int) -> list[int]:
    """Whole depths on both sides of the means, without the full one."""
    around = {layer for each in depths for mean in (each.decode, each.call) for layer in neighbours(mean)}
    return sorted(layer for layer in around if layer < num_layers)


def neighbours(mean: float) -> tuple[int, ...]:
    """The whole depth, or the two that it lies between."""
    low = int(mean)
    return (low,) if low == mean else (low, low + 1)


def variant_settings(entrant: Entrant, depths: Sequence[Depths]) -> dict[str, Any]:
    """What its worker is told about a variant of ours."""
    policy: dict[str, Any] = {"kind": entrant.role}
    if entrant.role == "static":
        policy["layer"] = entrant.layer
    elif entrant.role == "exit":
        asked = next(d for d in depths if (d.trace.value, d.measure) == (entrant.trace, entrant.measure))
        policy = {"kind": "replay", "layers": [list(row) for row in asked.rows], "measure": asked.measure}
    return {"rule": entrant.rule, "head": entrant.head, "policy": policy}
