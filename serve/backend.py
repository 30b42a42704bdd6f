"""Which runner an engine decodes with, and what comes with it: slots, exits, waves.

``eager`` is plain torch and works everywhere; ``native`` is compiled for this CPU (serve/native); ``graph`` keeps a
step on a GPU (serve/graph), and runs anywhere. All keep every promise of the batch rules that they offer; an engine
knows only what is named here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from calm.calibration.identity import ModelIdentity, arithmetic
from calm.config import BatchRule, Head, RunnerName, Stepping, Weights
from calm.errors import ConfigError
from calm.layer_math import cross_kv
from calm.models.base import DecoderSpec
from calm.rules import Rule

from .accounting import Clock
from .bands import Bands, EagerBands
from .causal_runner import CausalRunner
from .exits import Exits
from .graph.branches import can_branch, prepare
from .graph.machine import GraphMachine
from .graph.ops import Parts, TorchOps
from .graph.slots import GraphSlots
from .graph.stepping import CudaCapture, called
from .graph.wave import GraphWave
from .heads import make_head
from .model import ServedModel
from .native.bands import NativeBands
from .native.build import NativeError, available, instructions, kernels, library
from .native.encoder import NativePrefill
from .native.machine import NativeMachine
from .native.rounds import NativeRounds
from .native.slots import NativeSlots
from .native.views import INT8, PLACES
from .native.wave import NativeWave
from .native.weights import KINDS, check_served
from .options import EngineOptions
from .paged import PagedSlots, Pages
from .prefill import Prefill
from .prompts import PromptPrefill
from .requests import Row
from .rounds import EagerRounds, Rounds
from .runner import EagerRunner
from .slots import Slots
from .wave import EngineWave, Machine

INT8_RUNNERS = {"weights": (RunnerName.native,), "cross_kv": (RunnerName.native, RunnerName.graph)}  # who offers int8
LAUNCHED_AHEAD = False  # kernels of a step on a GPU, while the one before runs; off until one has shown what it brings
MakeWave = Callable[[Rule, Sequence[Row], int | None], Any]


@dataclass
class Backend:
    """What an engine runs its waves on.

    Attributes:
        name: eager, native or graph.
        slots, exits: where rows' K/V and policies are.
        prefill: sources -> cross K/V.
        machine: what waves are made with.
        wave: (rule, rows, bucket or None) -> a wave at layer 0; a native one has no bucket.
        rounds: of rows that draft; None: nobody can.
        most_drafted: words in one round.
        bands: of rows with a schedule of layers; None: nobody can have one.
    """

    name: RunnerName
    slots: Any
    exits: Exits
    prefill: Any
    machine: Any
    wave: MakeWave
    rounds: Rounds | None = None
    most_drafted: int = 0
    bands: Bands | None = None


def pick(runner: RunnerName, device: str, spec: DecoderSpec | None = None, *, decoder_only: bool = False) -> RunnerName:
    """``auto`` is graph for a GPU, native for a CPU with AVX-512 that can compile it, and else eager.

    Decoder-only models have the eager runner alone.

    Args:
        spec: whether the compiled step knows this decoder is asked too.
        decoder_only: of the model.

    Raises:
        NativeError: native was asked for and cannot be had.
    """
    if runner in (RunnerName.eager, RunnerName.graph):
        return runner
    if runner is RunnerName.auto and decoder_only:
        return RunnerName.eager
    if runner is RunnerName.auto and device == "cuda":
        return RunnerName.graph
    try:
        if device != "cpu":
            raise NativeError(f"runner=native is for CPUs, and the device is {device}; use runner=eager")
        if spec is not None:
            check_served(spec)
        if runner is RunnerName.native:
            library()
        elif available() is not None or not instructions().startswith("avx512"):
            return RunnerName.eager  # its code for other processors is right, but no faster than torch
    except NativeError:
        if runner is RunnerName.native:
            raise
        return RunnerName.eager
    return RunnerName.native


def chosen(model: ServedModel, options: EngineOptions) -> RunnerName:
    """The runner of an engine.

    Raises:
        ConfigError: int8 of a runner without it; what the graph runner does not offer; a paged cache's options where
            there is none.
        NativeError: as ``pick``.
    """
    name = pick(options.runner, model.device.type, model.spec, decoder_only=not model.spec.cross_attention)
    for what, offer in INT8_RUNNERS.items():
        if name not in offer and getattr(options, what) is Weights.int8:
            asked = " or ".join(each.value for each in offer)
            raise ConfigError(f"{what}=int8 needs runner={asked}, and this engine's is {name.value}")
    for what in ("block_size", "cache_blocks", "preempt"):
        if model.spec.cross_attention and getattr(options, what) != getattr(EngineOptions, what):
            raise ConfigError(
                f"{what} is for decoder-only models, and this one has an encoder: its cache is slots, max_batch of "
                f"them; leave {what} out"
            )
    if name is RunnerName.graph:
        if not model.spec.cross_attention:
            raise ConfigError("runner=graph has no decoder without cross-attention; use runner=eager")
        if options.rule is BatchRule.rebatch:
            raise ConfigError("rule=rebatch parks rows between layers, which runner=graph cannot; choose rule=compact")
        if options.head is not Head.full:
            raise ConfigError(f"head={options.head.value} needs runner=native or eager; runner=graph asks every word")
        if options.stepping is Stepping.branches and not (model.device.type == "cuda" and can_branch()):
            raise ConfigError(
                "stepping=branches needs a GPU, and torch 2.12 or cuda-bindings 13; choose whole or segments"
            )
    return name


def make_backend(model: ServedModel, options: EngineOptions, clock: Clock) -> Backend:
    """Raises what ``chosen`` raises."""
    exits = Exits(
        model.spec,
        list(model.exit_layers),
        options.max_batch,
        model.max_target,
        model.device,
        options.record_confidences,
    )
    make = {RunnerName.native: _native, RunnerName.graph: _graph, RunnerName.eager: _eager}
    return make[chosen(model, options)](model, options, exits, clock)


def decoding_identity(model: ServedModel, options: EngineOptions) -> ModelIdentity | None:
    """What an engine with these options decodes as; None of a model without a folder. Raises what ``chosen`` raises."""
    if model.identity is None:
        return None
    runner = chosen(model, options)
    numbers = arithmetic(
        str(model.dtype).removeprefix("torch."),
        runner,
        options.weights,
        options.cross_kv,
        options.head,
        runner_kernels(runner, model.device.type),
    )
    return model.identity.served_by(options.head, options.head_k, numbers)


def _eager(model: ServedModel, options: EngineOptions, exits: Exits, clock: Clock) -> Backend:
    slots, runner = _eager_memory(model, options)
    machine = Machine(
        runner=runner,
        exits=exits,
        head=make_head(options.head, options.head_k, runner),
        buckets=options.ladder,
        checked=frozenset(model.exit_layers),
        classifier=model.classifier or _no_classifier,
        record=options.record_confidences,
        clock=clock,
    )
    return Backend(
        RunnerName.eager,
        slots,
        exits,
        _torch_prefill(model, options),
        machine,
        lambda rule, rows, bucket: EngineWave(machine, rule, rows, bucket),
        EagerRounds(machine, model.spec.eos_token_id),
        most_drafted=PLACES - 1,
        bands=EagerBands(machine),
    )


def _eager_memory(model: ServedModel, options: EngineOptions) -> tuple[Slots | PagedSlots, EagerRunner | CausalRunner]:
    """Whole slots for a decoder that reads an encoder; a decoder-only model's cache is paged."""
    spec, count, lengths = model.spec, options.max_batch, (model.max_target, model.max_source)
    if spec.cross_attention:
        slots = Slots(spec, count, *lengths, model.device, options.poison)
        return slots, EagerRunner(spec, slots)
    pages = Pages(options.block_size, options.cache_blocks)
    paged = PagedSlots(spec, count, *lengths, model.device, pages, options.poison)
    return paged, CausalRunner(spec, paged)


def _native(model: ServedModel, options: EngineOptions, exits: Exits, clock: Clock) -> Backend:
    kind = INT8 if options.weights is Weights.int8 else KINDS[model.dtype]
    packed = model.packed(kind)
    slots = NativeSlots(
        model.spec,
        options.max_batch,
        model.max_target,
        model.max_source,
        kind,
        options.poison,
        options.cross_kv is Weights.int8,
    )
    machine = NativeMachine(
        model, packed, slots, exits, options.head, options.head_k, options.record_confidences, options.ladder, clock
    )
    return Backend(
        RunnerName.native,
        slots,
        exits,
        _native_prefill(model, options, kind),
        machine,
        lambda rule, rows, bucket: NativeWave(machine, rows),
        NativeRounds(machine, model.spec.eos_token_id, options.max_batch),
        most_drafted=PLACES - 1,
        bands=NativeBands(machine),
    )


def _graph(model: ServedModel, options: EngineOptions, exits: Exits, clock: Clock) -> Backend:
    slots = GraphSlots(
        model.spec,
        options.max_batch,
        model.max_target,
        model.max_source,
        model.device,
        options.poison,
        options.cross_kv is Weights.int8,
    )
    on_gpu = model.device.type == "cuda"
    if options.stepping is Stepping.branches:
        prepare(model.device)
    parts = Parts(
        spec=model.spec,
        slots=slots,
        exits=exits,
        checked=frozenset(model.exit_layers),
        classifier=model.classifier or _no_classifier,
        classifier_weights=model.classifier_weights,
        record=options.record_confidences,
    )
    machine = GraphMachine(
        _step_ops(parts, options.max_batch, options.stepping),
        options.ladder,
        CudaCapture(model.device) if on_gpu else called,
        options.stepping,
        on_gpu if options.overlap is None else options.overlap,
        clock,
    )
    return Backend(
        RunnerName.graph,
        slots,
        exits,
        _torch_prefill(model, options),
        machine,
        lambda rule, rows, bucket: GraphWave(machine, rows, bucket),
    )


def runner_kernels(runner: RunnerName, device: str) -> str:
    """What a runner's products are made of, as a certificate of coarser numbers than fp32 names it."""
    if runner is RunnerName.native:
        return kernels()
    return step_kernels(device) if runner is RunnerName.graph else ""


def step_kernels(device: str) -> str:
    """What the graph runner computes with: triton on a GPU where it is there; else torch."""
    return "triton" if device.startswith("cuda") and find_spec("triton") is not None else "torch"


def _step_ops(parts: Parts, most: int, stepping: Stepping) -> TorchOps:
    if step_kernels(parts.slots.keys.device.type) == "torch":
        return TorchOps(parts)
    from .graph.triton_ops import TritonOps

    return TritonOps(parts, most, ahead=LAUNCHED_AHEAD and stepping is not Stepping.branches)


def _torch_prefill(model: ServedModel, options: EngineOptions) -> Prefill | PromptPrefill:
    rest = options.prefill_rows, options.source_multiple, model.max_source, model.device
    if model.read is not None:
        return PromptPrefill(model.read, *rest)
    assert model.encode is not None
    return Prefill(model.encode, partial(cross_kv, model.spec), *rest)


def _native_prefill(model: ServedModel, options: EngineOptions, kind: int) -> Prefill | PromptPrefill | NativePrefill:
    """A model that brings no more than a function to call is encoded by that."""
    packed = model.packed_encoder(kind)
    if packed is None:
        return _torch_prefill(model, options)
    return NativePrefill(packed, options.prefill_rows, options.source_multiple, model.max_source)


def _no_classifier(hidden: Tensor) -> Tensor:
    raise ConfigError("the model has no exit classifier")
