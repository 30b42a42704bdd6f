"""What a step is made of, in plain torch: works on every device, reads nothing back to the host.

``TritonOps`` (triton_ops.py) replaces the parts that a GPU spends its time on by kernels; these are their twins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calm.confidence import CONFIDENCE, LayerView, Seen
from calm.config import Measure
from calm.models.base import DecoderSpec
from calm.rules import Flags, Rule

from ..exits import MEASURES, Exits
from ..heads import best
from ..runner import EagerRunner
from .frame import GIVEN, Frame
from .slots import GraphSlots

Asked = Sequence[tuple[Measure, int]]  # measures that some row reads, each with the run length of ``agreement``


@dataclass(frozen=True)
class Parts:
    """What the steps of an engine are made with.

    Attributes:
        checked: layers after which a row may leave.
        classifier: hidden -> P(exit).
        classifier_weights: the same as (d_model,) and a bias, for kernels; None before it is trained.
        record: keep confidences.
    """

    spec: DecoderSpec
    slots: GraphSlots
    exits: Exits
    checked: frozenset[int]
    classifier: Callable[[Tensor], Tensor]
    classifier_weights: tuple[Tensor, float] | None
    record: bool


class TwinRunner(EagerRunner):
    """Reads cross K/V as the kernels do, of whatever kind they are."""

    slots: GraphSlots

    def _cross(self, layer: int, slots: Tensor, prefix: bool) -> tuple[Tensor, Tensor]:
        keys, values = super()._cross(layer, slots, prefix)
        if not self.slots.int8_cross:
            return keys, values
        pools = self.slots.key_steps, self.slots.value_steps
        of_keys, of_values = (self._rows(pool[layer - 1], slots, prefix) for pool in pools)
        dtype = self.slots.keys.dtype
        return (keys * of_keys[..., None]).to(dtype), (values * of_values[:, :, None]).to(dtype)


class TorchOps:
    """The verbs of a step. Layers count from 1; each acts on the rows that a frame says, whatever the others hold."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._runner = TwinRunner(parts.spec, parts.slots)
        self._first = min(parts.checked, default=0)

    def begin(self, frame: Frame) -> None:
        """Who is here, what each row decodes and when it may leave; hidden states of the tokens."""
        slots, exits = self.parts.slots, self.parts.exits
        given = dict(zip(GIVEN, frame.given, strict=True))
        chained = given["chained"] > 0
        frame.slots.copy_(given["slots"])
        frame.live.copy_(given["live"] > 0)
        frame.steps.copy_(torch.where(chained, slots.position[frame.slots], given["steps"]))
        frame.tokens.copy_(torch.where(chained, slots.token[frame.slots], given["tokens"]))
        for mine, found in zip(
            (frame.thresholds, frame.depths, frame.measures, frame.run_lengths),
            exits.at(frame.slots, frame.steps),
            strict=True,
        ):
            mine.copy_(found)
        frame.hidden.copy_(self._runner.embed(frame.tokens, frame.slots, frame.steps))
        frame.previous.copy_(frame.hidden)
        frame.crossing.fill_(self.parts.spec.num_layers)
        frame.confidences.fill_(float("nan"))
        for tensor in (frame.crossed, frame.run, frame.stopped, frame.layers):
            tensor.zero_()
        self.who_runs(frame, frame.live)

    def layer(self, layer: int, frame: Frame, holds: bool, keeps: bool = True) -> None:
        """Run a layer on the rows that run: K and V at their positions, and hidden states but for who is held.

        ``keeps``: ``frame.previous`` takes the hidden states as they were.
        """
        nobody = self.parts.slots.padding
        slots = torch.where(frame.runs, frame.slots, nobody)
        out = self._runner.layer(layer, frame.hidden, slots, frame.steps, False)
        moves = frame.runs & ~frame.crossed if holds else frame.runs
        if keeps:
            frame.previous.copy_(frame.hidden)
        frame.hidden.copy_(torch.where(moves[:, None], out, frame.hidden))

    def confide(self, layer: int, frame: Frame, asked: Asked, holds: bool) -> None:
        """Each row's confidence by its own measure; NaN for rows without one."""
        first = layer == self._first
        before = None if first else Seen(frame.words, frame.run)
        view = LayerView(
            layer,
            frame.hidden,
            frame.previous if layer > 1 else None,
            self._runner.logits,
            self.parts.classifier,
            before,
        )
        result = torch.full_like(frame.confidence, float("nan"))
        for measure, run_length in asked:
            view.agreement_k = run_length
            mine = (frame.measures == MEASURES.index(measure)) & (frame.run_lengths == run_length)
            result = torch.where(mine, CONFIDENCE[measure](view), result)
        if any(measure is Measure.agreement for measure, _ in asked):
            words, run = view.argmax, view.run
            frame.words.copy_(words)
            frame.run.copy_(run)
        frame.confidence.copy_(result)
        if self.parts.record:
            self.note(layer, frame, holds)

    def note(self, layer: int, frame: Frame, holds: bool) -> None:
        """Keep the confidences of the rows that were asked."""
        told = frame.runs & ~frame.crossed if holds else frame.runs
        frame.confidences[:, layer - 1] = torch.where(told, frame.confidence, float("nan"))

    def settle(self, layer: int, frame: Frame, rule: Rule, confident: bool) -> None:
        """Who crosses at this layer, whether the rule ends the step here, and who runs on.

        ``confident``: the confidences of this layer count, not fixed depths alone.
        """
        now = (frame.depths > 0) & (frame.depths <= layer)
        if confident:
            now = now | (frame.confidence >= frame.thresholds[:, layer - 1])
        now = now & frame.runs
        frame.crossing.copy_(torch.where(now & ~frame.crossed, layer, frame.crossing))
        frame.crossed.logical_or_(now)
        frame.layers.copy_(torch.where(frame.stopped, frame.layers, layer))
        frame.stopped.logical_or_(rule.stop(Flags(frame.live, frame.crossed, now)))
        if layer == self.parts.spec.num_layers:
            frame.stopped.fill_(True)
        runs = frame.live & ~frame.stopped
        self.who_runs(frame, runs & ~frame.crossed if rule.leaves else runs)

    def who_runs(self, frame: Frame, runs: Tensor) -> None:
        frame.runs.copy_(runs)
        frame.order.copy_(torch.argsort(~runs, stable=True))
        frame.active.copy_(runs.sum())

    def speak(self, frame: Frame, rule: Rule) -> None:
        """Words of the rows, K and V of the layers that they skipped, and what their slots decode next."""
        slots, layers = self.parts.slots, frame.layers.expand(frame.size)
        emission = torch.minimum(frame.crossing, layers) if rule.holds else layers
        executed = emission if rule.leaves else layers
        tokens = self.words(frame)
        involuntary = ~frame.crossed & (emission < self.parts.spec.num_layers)
        frame.said.copy_(torch.stack([tokens, frame.crossing, emission, executed, involuntary.long()]))
        self.backfill(frame, self.written(frame, executed, rule))
        slots.position[frame.slots] = torch.where(frame.live, frame.steps + 1, 0)
        slots.token[frame.slots] = torch.where(frame.live, tokens.clamp(min=0), 0)

    def written(self, frame: Frame, executed: Tensor, rule: Rule) -> Tensor:
        """Layers whose K and V need no filling: all of them where nobody reads those above a fixed depth."""
        if not rule.row_exact:
            return executed
        return torch.where(self.parts.exits.fills[frame.slots], executed, self.parts.spec.num_layers)

    def words(self, frame: Frame) -> Tensor:
        """Greedy ids of the hidden states; NOTHING where a row has no number."""
        return best(self._runner.logits(frame.hidden).float())

    def logits(self, hidden: Tensor) -> Tensor:
        return self._runner.logits(hidden)

    def backfill(self, frame: Frame, executed: Tensor) -> None:
        """K and V of the layers above ``executed`` from the hidden states."""
        target = torch.where(frame.live, frame.slots, self.parts.slots.padding)
        self._runner.backfill(frame.hidden, target, frame.steps, executed, 0)
