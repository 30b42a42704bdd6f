"""An engine's native half: packed weights, slots, and where each row stands, behind a handle of the library."""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calm.config import Head
from calm.models.base import DecoderSpec

from ..accounting import Clock
from ..exits import Exits
from .build import Handle, library
from .slots import NativeSlots
from .views import BF16, FP32, NO_MEMORY, PLACES, STANDS, DraftView, MatrixView, ModelView, WaveView
from .weights import ACTIVATIONS, Packed, address, bias_by_distance

if TYPE_CHECKING:
    from ..model import ServedModel
    from .bench import NativeBench

HEADS = {Head.full: 0, Head.candidates: 1, Head.screened: 2}


class NativeMachine:
    """What every native wave of an engine is made with.

    Attributes:
        measured: sizes that a cost table is measured at.
        step, token: by slot; set before a wave or a round starts. Behind the slots ``step`` has those of the lanes.
        confidences: (slots, L), where they are recorded.
    """

    one_piece = overlap = False

    def __init__(
        self,
        model: "ServedModel",
        packed: Packed,
        slots: NativeSlots,
        exits: Exits,
        head: Head,
        head_k: int,
        record: bool,
        measured: tuple[int, ...],
        clock: Clock,
    ) -> None:
        spec: DecoderSpec = model.spec
        self.spec, self.packed, self.slots, self.exits = spec, packed, slots, exits
        self.record, self.measured, self.clock = record, measured, clock
        self.spare: list[Any] = []  # memory of waves that have spoken
        self.num_layers = spec.num_layers
        rows, k = slots.count + 1, min(head_k, spec.vocab_size)
        places = rows * (1 + PLACES)
        self.step, self.token = (ctypes.c_int32 * places)(), (ctypes.c_int32 * rows)()
        self._home = torch.cat([torch.arange(rows), torch.arange(rows).repeat_interleave(PLACES)]).int()
        self._hidden, self._previous = (torch.zeros(places, spec.d_model) for _ in range(2))
        self._ints = torch.zeros((len(STANDS), rows), dtype=torch.int32)
        self._candidates = torch.full((rows, k), -1, dtype=torch.int32)
        self.confidences = torch.full((rows, spec.num_layers), float("nan"))
        self._bias = bias_by_distance(spec, slots.max_target)
        self._checked = torch.zeros(spec.num_layers + 1, dtype=torch.uint8)
        self._checked[list(model.exit_layers)] = 1
        weight, bias = model.classifier_weights or (torch.zeros(spec.d_model), 0.0)
        self._classifier = weight.float().contiguous()
        # behind an int8 screen there are exact words: the full head of the rows that it leaves open is of their kind
        head_numbers = packed.word_numbers if head is Head.screened else packed.kind
        self._words = packed.words if head is not Head.full else torch.zeros(0)
        screen, self._doubt = packed.screen if head is Head.screened else (MatrixView(), torch.zeros(0))
        view = ModelView(
            layers=spec.num_layers,
            heads=spec.num_heads,
            d_model=spec.d_model,
            d_kv=spec.d_kv,
            d_ff=spec.d_ff,
            vocabulary=spec.vocab_size,
            kind=packed.kind,
            cache_kind=slots.cache_kind,
            cross_kind=slots.cross_kind,
            activation=ACTIVATIONS[spec.activation],
            gated=spec.gated,
            eps=spec.norm_eps,
            classifier_bias=bias,
            layer=ctypes.addressof(packed.layers),
            head=packed.head(head_numbers),
            embed=address(packed.embed),
            embed_kind=BF16 if packed.embed.dtype is torch.bfloat16 else FP32,
            head_kind=HEADS[head],
            head_k=k,
            head_numbers=head_numbers,
            word_numbers=packed.word_numbers,
            words=address(self._words),
            screen=screen,
            doubt=address(self._doubt),
            bias=address(self._bias),
            classifier=address(self._classifier),
            checked=address(self._checked),
            slots=rows,
            positions=slots.max_target,
            sources=slots.max_source,
            record=record,
            step=ctypes.addressof(self.step),
            home=address(self._home),
            token=ctypes.addressof(self.token),
            hidden=address(self._hidden),
            previous=address(self._previous),
            candidates=address(self._candidates),
            confidences=address(self.confidences),
        )
        for name in ("keys", "values", "cross_keys", "cross_values", "coarse", "source_length"):
            setattr(view, name, address(getattr(slots, name)))
        for name in ("thresholds", "depths", "measures", "run_lengths", "fills"):
            setattr(view, name, address(getattr(exits, name)))
        for name, row in zip(STANDS, self._ints, strict=True):
            setattr(view, name, address(row))
        functions = library()
        self._start, self._climb, self._speak = functions.calm_start, functions.calm_climb, functions.calm_speak
        self._speculate = functions.calm_speculate
        kept = [
            self.step,
            self._home,
            self.token,
            self._hidden,
            self._previous,
            self._ints,
            self._candidates,
            self.confidences,
        ]
        kept += [self._bias, self._checked, self._classifier, self._words, self._doubt]
        self._owner = Handle("engine", view, packed, exits, *kept)
        self._handle = self._owner.address
        slots.attach(self._owner)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Sizes that a layer runs at: every one."""
        return tuple(range(1, self.slots.count + 1))

    def bench(self, max_source: int | None = None) -> "NativeBench":
        """What a cost table is measured on."""
        from .bench import NativeBench

        return NativeBench(self, max_source)

    def bucket(self, rows: int) -> int:
        return rows

    def checks(self, layer: int) -> bool:
        """Whether rows may leave after this layer."""
        return bool(self._checked[layer])

    def start(self, wave: WaveView) -> None:
        self._start(self._handle, ctypes.byref(wave))

    def climb(self, wave: WaveView) -> int:
        """A Status. Raises MemoryError."""
        status = int(self._climb(self._handle, ctypes.byref(wave)))
        if status == NO_MEMORY:
            raise MemoryError("no memory left for a step of this batch")
        return status

    def speak(self, wave: WaveView) -> None:
        """Raise MemoryError."""
        if self._speak(self._handle, ctypes.byref(wave)) == NO_MEMORY:
            raise MemoryError("no memory left for the words of this batch")

    def follow(self, wave: WaveView, layers: Sequence[int]) -> None:
        """Raise MemoryError."""
        chosen = (ctypes.c_int32 * len(layers))(*layers)
        if library().calm_follow(self._handle, ctypes.byref(wave), ctypes.addressof(chosen), len(layers)) == NO_MEMORY:
            raise MemoryError("no memory left for a band of this batch")

    def speculate(self, draft: DraftView) -> None:
        """Raise MemoryError."""
        if self._speculate(self._handle, ctypes.byref(draft)) == NO_MEMORY:
            raise MemoryError("no memory left for a round of this batch")

    def states(self, slots: Sequence[int]) -> Tensor:
        """(rows, d_model) hidden states of these slots, fp32."""
        return self._hidden[list(slots)]

    def logits(self, slots: Sequence[int]) -> Tensor:
        """(rows, V) of these slots' hidden states, fp32."""
        out = torch.empty((len(slots), self.spec.vocab_size))
        library().calm_logits(self._handle, (ctypes.c_int32 * len(slots))(*slots), len(slots), address(out))
        return out
