"""What the steps of a shape launch, as Triton would compile it: on meta tensors, so nothing is held and nothing runs.

``python -m tests.serve.graph.launches KIND [ahead] SHAPE ...`` compiles it for sm_90 and prints a JSON line a kernel:
its name, registers, bytes of stack (spilled registers) and of shared memory, and which of the instructions that launch
kernels ahead come before all that touches memory. Not under TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from calm.config import BatchRule, Measure
from calm.models.base import BiasKind, DecoderSpec
from calm.rules import Rule
from eval.shapes import MAX_SOURCE, MAX_TARGET, SHAPES
from serve.exits import Exits
from serve.graph import triton_ops
from serve.graph.frame import Frame
from serve.graph.ops import Parts
from serve.graph.program import Program
from serve.graph.slots import GraphSlots

BUCKETS = (1, 2, 8, 64, 256)
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.bool: "*i1", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
RULES = (Rule(BatchRule.own), Rule(BatchRule.sync), Rule(BatchRule.quantile, share=0.5), Rule(BatchRule.lockstep))
ASKED = [
    (), *(((each, 0),) for each in (Measure.softmax, Measure.state, Measure.classifier)),
    tuple((each, 3 if each is Measure.agreement else 0) for each in Measure),
]  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A kernel as a launch specialises it: argument types, constants, which arguments 16 divides, compiler options."""

    kernel: Any = field(compare=False)
    name: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> "Source":
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        types, constants, divisible = {}, {}, []
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        for number, parameter in enumerate(kernel.params):
            value, name = given[parameter.name], parameter.name
            if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
                types[name], constants[name] = "constexpr", value
            elif isinstance(value, Tensor):
                types[name] = TYPES[value.dtype]
                divisible.append(number)
            elif isinstance(value, float):
                types[name] = "fp32"
            else:
                types[name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    divisible.append(number)
        items = [tuple(sorted(each.items(), key=lambda item: item[0])) for each in (constants, options)]
        return cls(kernel, kernel.__name__, tuple(types.items()), items[0], tuple(divisible), items[1])

    def compiled(self) -> Any:
        attributes = {(number,): [["tt.divisibility", 16]] for number in self.divisible}
        source = ASTSource(self.kernel, dict(self.types), dict(self.constants), attributes)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(self.options))

    def told(self) -> dict[str, Any]:
        """What the compiler makes of it."""
        found = self.compiled()
        registers, stack = usage(found.asm["cubin"])
        before = re.split(r"\b(?:ld|st|atom|red|cp)\.\S*global", found.asm["ptx"])[0]
        flags = {name: value for name, value in self.constants if isinstance(value, int | str)}
        return {
            "name": self.name, "registers": registers, "stack": stack, "shared": found.metadata.shared,
            "warps": found.metadata.num_warps, "stages": found.metadata.num_stages, "constants": flags,
            "waits": "griddepcontrol.wait" in before, "launches": "griddepcontrol.launch_dependents" in before,
            "ahead": "griddepcontrol" in found.asm["ptx"],
        }  # fmt: skip


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    place = Path(triton.knobs.cache.dir or ".") / "looked_at.cubin"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(cubin)
    said = subprocess.run([str(tool), "-res-usage", str(place)], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


class Noted:
    """Stands for a kernel: notes what it is launched with."""

    def __init__(self, kernel: Any, notes: dict[Source, None]) -> None:
        self._kernel, self._notes = kernel, notes

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            assert all(each > 0 for each in grid) and len(grid) <= 3
            self._notes[Source.of(self._kernel, args, named)] = None

        return launch


def spec_of(shape: str, dtype: torch.dtype) -> DecoderSpec:
    """A T5 v1.1 decoder whose tensors have no numbers."""
    sizes = SHAPES[shape]
    d, inner, ff = sizes.d_model, sizes.num_heads * sizes.d_kv, sizes.d_ff
    places: dict[str, tuple[int, ...]] = {"embed": (sizes.vocab_size, d), "head": (sizes.vocab_size, d)}
    places |= {"final_norm": (d,), "bias": (32, sizes.num_heads)}
    for layer in range(1, sizes.num_decoder_layers + 1):
        for kind in ("self", "cross"):
            places |= {f"{layer}.{kind}_{name}": (inner, d) for name in "qkv"} | {f"{layer}.{kind}_o": (d, inner)}
        places |= {f"{layer}.{name}_norm": (d,) for name in ("self", "cross", "ffn")}
        places |= {f"{layer}.ffn_gate": (ff, d), f"{layer}.ffn_up": (ff, d), f"{layer}.ffn_down": (d, ff)}
    return DecoderSpec(
        num_layers=sizes.num_decoder_layers, num_heads=sizes.num_heads, num_kv_heads=sizes.num_heads, d_model=d,
        d_kv=sizes.d_kv, d_ff=ff,
        vocab_size=sizes.vocab_size, norm_eps=1e-6, activation="gelu_new", gated=True,
        bias_kind=BiasKind.relative_buckets, bias_buckets=32, bias_max_distance=128, cross_attention=True,
        attention_scale=1.0, head_scale=1.0, start_token_id=0, eos_token_id=1, pad_token_id=0,
        tensors={name: torch.empty(place, dtype=dtype, device="meta") for name, place in places.items()},
    )  # fmt: skip


def launches(shape: str, dtype: torch.dtype, buckets: tuple[int, ...] = BUCKETS, **options: Any) -> list[Source]:
    """Of whole steps under every rule and several sets of measures, cross K/V of both kinds."""
    notes: dict[Source, None] = {}
    spec, device = spec_of(shape, dtype), torch.device("meta")
    kernels = [name for name in vars(triton_ops) if name.endswith("_kernel")]
    with patch.multiple(triton_ops, **{name: Noted(getattr(triton_ops, name), notes) for name in kernels}):
        for coarse in (False, True):
            slots = GraphSlots(spec, max(buckets), MAX_TARGET, MAX_SOURCE, device, int8_cross=coarse)
            exits = Exits(spec, [1, 2], max(buckets), MAX_TARGET, device)
            parts = Parts(spec, slots, exits, frozenset({1, 2}), lambda hidden: hidden, None, record=False)
            ops = triton_ops.TritonOps(parts, max(buckets), **options)
            for bucket in buckets:
                frame = Frame.of(bucket, spec, slots, record=False)
                for rule in RULES:
                    for asked in ASKED:
                        Program(ops, frame, rule, asked).whole()
    return list(notes)


def report(kind: str, shapes: list[str], **options: Any) -> Iterator[dict[str, Any]]:
    every = dict.fromkeys(each for shape in shapes for each in launches(shape, KINDS[kind], **options))
    for source in every:
        yield source.told()


if __name__ == "__main__":
    kind, *shapes = sys.argv[1:]
    for line in report(kind, [each for each in shapes if each != "ahead"], ahead="ahead" in shapes):
        print(json.dumps(line), flush=True)
