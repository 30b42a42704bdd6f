"""The verbs of a step as Triton kernels; what a kernel does not do is left to torch (ops.py)."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
import triton
from torch import Tensor

from calm.confidence import HEAD_MEASURES
from calm.config import BatchRule, Measure
from calm.rules import Rule

from ..exits import MEASURES
from .frame import Frame
from .kernels.attention import attention_kernel
from .kernels.products import backfill_kernel, inner_kernel, linear_kernel, qkv_kernel
from .kernels.rows import begin_kernel, settle_kernel, speak_kernel, states_kernel
from .kernels.vocabulary import STATS, choose_kernel, words_kernel
from .ops import Asked, Parts, TorchOps
from .packing import Packed
from .tiles import Tile, Tiles

STOPS = {BatchRule.quantile: "quantile", BatchRule.lockstep: "lockstep"}


class TritonOps(TorchOps):
    """Buffers between the kernels of a step hold ``most`` rows and keep their places.

    Args:
        ahead: each kernel is launched while the one before still runs (kernels/ahead.py). Not for branches in a graph:
            what a branch begins with does not follow the kernel before it.
    """

    def __init__(self, parts: Parts, most: int, tiles: Tiles | None = None, ahead: bool = False) -> None:
        super().__init__(parts)
        self._turn: dict[str, bool] = {"AHEAD": True, "launch_pdl": True} if ahead else {"AHEAD": False}
        spec, device = parts.spec, parts.slots.keys.device
        self._packed, self._tiles = Packed.of(spec, parts.slots.max_target), tiles or Tiles()
        dtype, heads = spec.tensors["embed"].dtype, spec.num_heads * spec.d_kv
        self._queries = torch.zeros(most, heads, dtype=dtype, device=device)
        self._mixed = torch.zeros(most, heads, dtype=dtype, device=device)
        self._inner = torch.zeros(most, spec.d_ff, dtype=spec.tensors["1.ffn_down"].dtype, device=device)
        counts = [rows * triton.cdiv(spec.vocab_size, self._words(rows).n) for rows in range(1, most + 1)]
        self._stats = torch.zeros(STATS * max(counts), device=device)
        self._chosen = torch.zeros(most, dtype=torch.long, device=device)
        self._executed = torch.zeros(most, dtype=torch.long, device=device)
        self._live = torch.zeros((), dtype=torch.int32, device=device)
        self._everyone = torch.arange(most, dtype=torch.int32, device=device)
        weight, bias = parts.classifier_weights or (torch.zeros(spec.d_model), 0.0)
        self._weight, self._offset = weight.float().to(device).contiguous(), float(bias)

    def begin(self, frame: Frame) -> None:
        spec, slots, exits = self.parts.spec, self.parts.slots, self.parts.exits
        begin_kernel[(frame.size,)](
            frame.given, slots.position, slots.token, exits.thresholds, exits.depths, exits.measures,
            exits.run_lengths, spec.tensors["embed"], frame.slots, frame.steps, frame.tokens, frame.live,
            frame.thresholds, frame.depths, frame.measures, frame.run_lengths, frame.hidden, frame.crossed,
            frame.crossing, frame.runs, frame.run, frame.stopped, frame.layers, frame.order, frame.active, self._live,
            frame.size, slots.max_target, spec.num_layers, spec.d_model,
            LAYERS=triton.next_power_of_2(spec.num_layers), BLOCK=min(1024, triton.next_power_of_2(spec.d_model)),
            ROWS=max(32, triton.next_power_of_2(frame.size)), **self._turn,
        )  # fmt: skip
        if self.parts.record:
            frame.confidences.fill_(float("nan"))

    def speak(self, frame: Frame, rule: Rule) -> None:
        slots = self.parts.slots
        self.words(frame)
        speak_kernel[(1,)](
            self._chosen, frame.crossed, frame.crossing, frame.layers, frame.live, frame.slots, frame.steps,
            frame.said, self._executed, self.parts.exits.fills, slots.position, slots.token, frame.size,
            self.parts.spec.num_layers,
            HOLDS=rule.holds, LEAVES=rule.leaves, EXACT=rule.row_exact,
            BLOCK=max(32, triton.next_power_of_2(frame.size)), **self._turn,
        )  # fmt: skip
        self.backfill(frame, self._executed[: frame.size])

    def layer(self, layer: int, frame: Frame, holds: bool, keeps: bool = True) -> None:
        spec, slots, packed = self.parts.spec, self.parts.slots, self._packed
        tensors, one = spec.tensors, spec.num_heads * spec.d_kv
        which = layer - 1
        tile = self._product(frame, packed.qkv[which])
        qkv_kernel[_grid(tile, frame.size, 3 * one)](
            frame.hidden, packed.qkv[which], self._queries, slots.keys[which],
            slots.values[which], frame.previous, frame.slots, frame.steps, frame.order, frame.active, spec.num_heads,
            slots.max_target, spec.d_model, spec.norm_eps,
            KEEPS=keeps, WIDTH=spec.d_kv, **_cut(tile), **self._turn,
        )  # fmt: skip
        self._attend(frame, slots.keys[which], slots.values[which], frame.steps)
        self._linear(frame, self._mixed, tensors[f"{layer}.self_o"], frame.hidden, holds)
        self._linear(frame, frame.hidden, packed.cross_q[which], self._queries, False)
        steps = slots.key_steps[which], slots.value_steps[which]
        self._attend(frame, slots.cross_keys[which], slots.cross_values[which], slots.source_length, steps)
        self._linear(frame, self._mixed, tensors[f"{layer}.cross_o"], frame.hidden, holds)
        inner = packed.inner[which]
        tile = self._product(frame, inner)
        inner_kernel[_grid(tile, frame.size, inner.shape[0])](
            frame.hidden, inner, self._inner, frame.order, frame.active, inner.shape[0], spec.d_model, spec.norm_eps,
            GATED=spec.gated, ACTIVATION=spec.activation, **_cut(tile), **self._turn,
        )  # fmt: skip
        self._linear(frame, self._inner, tensors[f"{layer}.ffn_down"], frame.hidden, holds)

    def _linear(self, frame: Frame, x: Tensor, weight: Tensor, out: Tensor, holds: bool) -> None:
        """``x`` or ``out`` is the residual stream, which is normed or added to; the other is a buffer."""
        (n, k), tile = weight.shape, self._product(frame, weight)
        linear_kernel[_grid(tile, frame.size, n)](
            x, weight, out, frame.crossed, frame.order, frame.active, n, k, self.parts.spec.norm_eps,
            NORMED=x is frame.hidden, ADDS=out is frame.hidden, HOLDS=holds, **_cut(tile), **self._turn,
        )  # fmt: skip

    def _product(self, frame: Frame, weight: Tensor) -> Tile:
        n, k = weight.shape
        return self._tiles.product(frame.size, n, k, weight.dtype)

    def _words(self, rows: int) -> Tile:
        n, k = self._packed.head.shape
        return self._tiles.words(rows, n, k, self._packed.head.dtype)

    def _attend(
        self, frame: Frame, keys: Tensor, values: Tensor, lengths: Tensor, steps: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Over a row's own positions with their bias; with ``steps`` over its source."""
        spec, bias = self.parts.spec, self._packed.bias
        key_steps, value_steps = steps or (bias, bias)
        block = self._tiles.keys(frame.size, keys.dtype)
        attention_kernel[(frame.size, spec.num_heads)](
            self._queries, keys, values, lengths, bias, key_steps, value_steps, frame.slots, frame.order, frame.active,
            self._mixed, spec.num_heads, keys.shape[2], spec.attention_scale,
            BIASED=steps is None, COARSE=keys.dtype is torch.int8, WIDTH=spec.d_kv,
            WIDE=triton.next_power_of_2(spec.d_kv), BLOCK=block.keys, STAGES=block.stages, num_warps=block.warps,
            **self._turn,
        )  # fmt: skip

    def confide(self, layer: int, frame: Frame, asked: Asked, holds: bool) -> None:
        spec, measures = self.parts.spec, {measure for measure, _ in asked}
        by_head = measures & set(HEAD_MEASURES)
        if by_head:
            self._look(frame, frame.order, frame.active, by_head, layer == self._first)
        state, classifier = _indices(measures, Measure.state, Measure.classifier)
        if max(state, classifier) >= 0:
            states_kernel[(frame.size,)](
                frame.hidden, frame.previous, self._weight, self._offset, frame.measures, frame.confidence,
                frame.order, frame.active, spec.d_model,
                STATE=state, CLASSIFIER=classifier, FIRST=layer == 1, ALONE=not by_head,
                BLOCK=min(1024, triton.next_power_of_2(spec.d_model)), **self._turn,
            )  # fmt: skip
        if self.parts.record:
            self.note(layer, frame, holds)

    def _look(
        self,
        frame: Frame,
        order: Tensor,
        active: Tensor,
        measures: Collection[Measure] = (),
        first: bool = False,
    ) -> None:
        """The best words of these rows; where measures are asked, their confidences, and NaN for rows of others.

        ``first``: ``agreement`` has seen no check before this one.
        """
        spec, tile = self.parts.spec, self._words(frame.size)
        grid = _grid(tile, frame.size, spec.vocab_size)
        words_kernel[grid](
            frame.hidden, self._packed.head, self._stats, order, active, frame.size, grid[1], spec.vocab_size,
            spec.d_model, spec.norm_eps, spec.head_scale, **_cut(tile), **self._turn,
        )  # fmt: skip
        softmax, max_prob, entropy, agreement = _indices(
            measures, Measure.softmax, Measure.max_prob, Measure.entropy, Measure.agreement
        )
        choose_kernel[(frame.size,)](
            self._stats, order, active, self._chosen, frame.measures, frame.run_lengths, frame.words, frame.run,
            frame.confidence, frame.size, grid[1], math.log(spec.vocab_size),
            CONFIDES=bool(measures), SOFTMAX=softmax, MAX_PROB=max_prob, ENTROPY=entropy, AGREEMENT=agreement,
            FIRST=first, BLOCK=triton.next_power_of_2(grid[1]), num_warps=8 if grid[1] > 512 else 4, **self._turn,
        )  # fmt: skip

    def settle(self, layer: int, frame: Frame, rule: Rule, confident: bool) -> None:
        settle_kernel[(1,)](
            frame.live, frame.runs, frame.crossed, frame.crossing, frame.depths, frame.confidence, frame.thresholds,
            frame.stopped, frame.layers, frame.order, frame.active, frame.size, self.parts.spec.num_layers,
            rule.share, layer,
            CONFIDENT=confident, LEAVES=rule.leaves, RULE=STOPS.get(rule.name, "all"),
            BLOCK=max(32, triton.next_power_of_2(frame.size)), **self._turn,
        )  # fmt: skip

    def words(self, frame: Frame) -> Tensor:
        self._look(frame, self._everyone, self._live)
        return self._chosen[: frame.size]

    def backfill(self, frame: Frame, executed: Tensor) -> None:
        spec, slots = self.parts.spec, self.parts.slots
        one = spec.num_heads * spec.d_kv
        tile = self._tiles.product(frame.size, 2 * one * spec.num_layers, spec.d_model, frame.hidden.dtype)
        backfill_kernel[(*_grid(tile, frame.size, 2 * one), spec.num_layers)](
            frame.hidden, self._packed.qkv, slots.keys, slots.values, frame.slots, frame.steps,
            executed.contiguous(), self._live, slots.count + 1, spec.num_heads, slots.max_target, spec.d_model,
            spec.norm_eps,
            WIDTH=spec.d_kv, **_cut(tile), **self._turn,
        )  # fmt: skip


def _indices(measures: Collection[Measure], *each: Measure) -> list[int]:
    """In MEASURES; -1 for what is not asked."""
    return [MEASURES.index(measure) if measure in measures else -1 for measure in each]


def _grid(tile: Tile, rows: int, n: int) -> tuple[int, int]:
    return triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.n)


def _cut(tile: Tile) -> dict[str, int]:
    """What a kernel and its compiler are told."""
    return {
        "ROWS": tile.rows, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "STAGES": tile.stages, "num_warps": tile.warps,
    }  # fmt: skip
