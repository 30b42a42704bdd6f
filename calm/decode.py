"""The executable specification: one sequence, one visible loop over layers, no cleverness.

``OneDecoder`` defines what is right; ``calm.decode_batch.BatchDecoder`` and the engine are proven equal to it.
Both are callables ``decode(examples, policy) -> list[DecodeTrace]``. CALM, sections 3.2, 3.3 and 3.3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .architectures import adapter_of
from .confidence import CONFIDENCE, LayerView
from .config import Backfill
from .data.text import decode_ids, encode_source
from .decode_checks import check_lengths, check_policy
from .models.base import DecoderAdapter
from .models.speaking import SpeakingModel
from .policies import Budgeted, Confident, Oracle, Policy, SkipSchedule, exits_of, fixed_depth, scheduled_layers
from .records import DecodeTrace, Example

NAN = float("nan")


@dataclass
class TraceBuilder:
    """Collects a row's tokens and layers until it ends; ``finished`` is True once EOS was emitted.

    ``spent``: of the budget of a policy that has one.
    """

    example: Example
    num_layers: int
    tokens: list[int] = field(default_factory=list)
    crossing: list[int] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    backfilled: list[int] = field(default_factory=list)
    confidences: list[tuple[float, ...]] = field(default_factory=list)
    finished: bool = False
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    spent: float = 0.0

    def build(self, model: SpeakingModel) -> DecodeTrace:
        return DecodeTrace(
            id=self.example.id,
            tokens=tuple(self.tokens),
            text=decode_ids(model.tokenizer, self.tokens),
            crossing_layers=tuple(self.crossing),
            emission_layers=tuple(self.crossing),  # row-exact: a row speaks from where it crossed
            executed_layers=tuple(self.executed),
            backfilled_layers=tuple(self.backfilled),
            confidences=tuple(self.confidences),
            finished=self.finished,
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
        )


def depth_of(policy: Policy, row: TraceBuilder, step: int) -> int | None:
    """The depth that the policy fixes for a row's next token; None where confidences decide."""
    if isinstance(policy, Budgeted) and policy.is_spent(row.spent):
        return row.num_layers
    return fixed_depth(exits_of(policy), row.example.id, step, row.num_layers)


def layer_cosine(hidden: Tensor, previous: Tensor) -> Tensor:
    """Of the residual after a layer with the one before it, (rows, d_model) each, in fp32: what a budget asks."""
    return torch.nn.functional.cosine_similarity(hidden.float(), previous.float(), dim=-1)


def layer_view(
    model: SpeakingModel, layer: int, hidden: Tensor, previous: Tensor, before: LayerView | None, policy: Confident
) -> LayerView:
    """What a measure sees of rows after ``layer`` and one layer earlier, (rows, d_model) each."""
    return LayerView(
        layer=layer,
        hidden=hidden,
        previous=previous if layer > 1 else None,
        head=model.logits,
        classifier=model.classifier,
        before=before,
        agreement_k=policy.agreement_k,
    )


class OneDecoder:
    """decode_one: greedy decoding of each example by itself.

    Args:
        model: in eval mode.
        backfill: what the layers above an exit keep for that position.
        max_new_tokens: N; default is the model's own.
        record_confidences: keep the confidence of every checked layer in the trace.
    """

    def __init__(
        self,
        model: SpeakingModel,
        *,
        backfill: Backfill = Backfill.project,
        max_new_tokens: int | None = None,
        record_confidences: bool = False,
    ) -> None:
        self.model = model
        self.adapter: DecoderAdapter = adapter_of(model)
        self.backfill = backfill
        self.max_new_tokens = max_new_tokens or model.settings.max_target_tokens
        check_lengths(model, self.max_new_tokens)
        self.record_confidences = record_confidences

    @torch.inference_mode()
    def __call__(self, examples: Sequence[Example], policy: Policy) -> list[DecodeTrace]:
        check_policy(self.model, policy, self.backfill)
        return [self._decode(example, policy) for example in examples]

    def _decode(self, example: Example, policy: Policy) -> DecodeTrace:
        source = encode_source(self.model.tokenizer, example.source, self.model.settings)
        state = self.adapter.prefill(source)
        row = TraceBuilder(example, self.model.num_layers)
        token, prompted = self.adapter.start_token_id, self.adapter.prompt_hidden(state)
        for step in range(self.max_new_tokens):
            if step == 0 and prompted is not None:
                token = self._said_by_the_prompt(prompted, row)
            elif isinstance(policy, SkipSchedule):
                token = self._scheduled(token, step, state, row, policy)
            else:
                token = self._step(token, step, state, row, policy)
            row.tokens.append(token)
            if token == self.adapter.eos_token_id:
                row.finished = True
                break
        return row.build(self.model)

    def _said_by_the_prompt(self, hidden: Tensor, row: TraceBuilder) -> int:
        """The first token of a decoder-only model, whatever the policy: its prompt was read at full depth."""
        num_layers = self.adapter.num_layers
        row.crossing.append(num_layers)
        row.executed.append(num_layers)
        row.backfilled.append(0)
        if self.record_confidences:
            row.confidences.append((NAN,) * num_layers)
        return int(self.adapter.logits(hidden).float().argmax())

    def _step(self, token: int, step: int, state: Any, row: TraceBuilder, policy: Policy) -> int:
        """One token: climb until the row crosses, speak there, fill the layers above."""
        num_layers = self.adapter.num_layers
        depth, exits = depth_of(policy, row, step), exits_of(policy)
        hidden = previous = self.adapter.embed(token, step, state)
        confidences = [NAN] * num_layers
        before: LayerView | None = None
        hiddens: list[Tensor] = []
        for layer in range(1, num_layers + 1):
            previous, hidden = hidden, self.adapter.layer(layer, hidden, state, step)
            hiddens.append(hidden)
            if layer == depth:
                break
            asked = depth is None or self.record_confidences  # at a threshold >= 1 recorded, never asked
            if isinstance(exits, Confident) and asked and layer in self.model.settings.exit_layers:
                before = layer_view(self.model, layer, hidden[0], previous[0], before, exits)
                confidence = float(CONFIDENCE[exits.measure](before))
                confidences[layer - 1] = confidence
                if depth is None and confidence >= exits.schedule.at(step, layer):
                    break
        if isinstance(policy, Oracle):
            hiddens = hiddens[: self._oracle_depth(hiddens)]
        crossing = len(hiddens)
        if isinstance(policy, Budgeted):
            row.spent = policy.spend(row.spent, crossing, num_layers, float(layer_cosine(hidden[0], previous[0])))
        answer = int(self.adapter.logits(hiddens[-1]).float().argmax())
        row.crossing.append(crossing)
        row.executed.append(num_layers if isinstance(policy, Oracle) else crossing)
        row.backfilled.append(num_layers - crossing)
        if self.record_confidences:
            row.confidences.append(tuple(confidences))
        self._fill_above(crossing, hiddens[-1], state, step, row)
        return answer

    def _scheduled(self, token: int, step: int, state: Any, row: TraceBuilder, policy: SkipSchedule) -> int:
        """One token of a schedule: its layers and no others; the layers left out keep nothing of this position."""
        num_layers = self.adapter.num_layers
        layers = scheduled_layers(policy, step, num_layers)
        hidden = self.adapter.embed(token, step, state)
        for layer in layers:
            hidden = self.adapter.layer(layer, hidden, state, step)
        row.crossing.append(layers[-1])
        row.executed.append(len(layers))
        row.backfilled.append(0)
        if self.record_confidences:
            row.confidences.append((NAN,) * num_layers)
        return int(self.adapter.logits(hidden).float().argmax())

    def _oracle_depth(self, hiddens: list[Tensor]) -> int:
        """First layer that may exit and agrees with the full stack's argmax, else L."""
        answers = [int(self.adapter.logits(hidden).float().argmax()) for hidden in hiddens]
        allowed = self.model.settings.exit_layers
        return next((layer for layer in allowed if answers[layer - 1] == answers[-1]), len(hiddens))

    def _fill_above(self, crossing: int, hidden: Tensor, state: Any, step: int, row: TraceBuilder) -> None:
        """K and V of the layers above the exit (CALM section 3.3.1): each layer's own norm and projections."""
        num_layers = self.adapter.num_layers
        match self.backfill:
            case Backfill.project:
                for layer in range(crossing + 1, num_layers + 1):
                    self.adapter.write_kv(layer, state, step, *self.adapter.kv(layer, hidden, state, step))
            case Backfill.copy:
                key, value = self.adapter.read_kv(crossing, state, step)
                for layer in range(crossing + 1, num_layers + 1):
                    self.adapter.write_kv(layer, state, step, key, value)
            case Backfill.mask:
                for layer in range(crossing + 1, num_layers + 1):
                    key, value = self.adapter.kv(layer, hidden, state, step)
                    self.adapter.write_kv(layer, state, step, torch.zeros_like(key), torch.zeros_like(value))
                    state.holes.setdefault(layer, []).append(step)
            case Backfill.true:
                row.backfilled[-1] = 0
                for layer in range(row.executed[-1] + 1, num_layers + 1):
                    hidden = self.adapter.layer(layer, hidden, state, step)
                row.executed[-1] = num_layers
