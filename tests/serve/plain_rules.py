"""The batch-coupled rules written out plainly, one Python loop over rows and layers.

``sync`` is Algorithm 1 of arXiv 2407.20272: run layers until every live row has crossed; tokens and the K/V above come
from the last executed layer for every row; finished rows count as crossed. Rows are those of decode_one: Hugging Face's
modules, one sequence each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from calm.architectures import adapter_of
from calm.confidence import CONFIDENCE, LayerView
from calm.config import BatchRule
from calm.data.text import encode_source
from calm.decode import layer_view
from calm.models.base import DecoderAdapter
from calm.models.speaking import SpeakingModel
from calm.policies import Confident, Policy, fixed_depth
from serve.engine import Engine
from serve.requests import Status

LAYERS = 4
SHARE = 0.6


@dataclass
class PlainRow:
    """A row of the transcription."""

    model: SpeakingModel
    state: Any
    policy: Policy
    adapter: DecoderAdapter
    tokens: list[int] = field(default_factory=list)
    emission: list[int] = field(default_factory=list)
    involuntary: int = 0
    layer: int = 0
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    previous: Tensor = field(default_factory=lambda: torch.empty(0))
    before: LayerView | None = None

    @property
    def over(self) -> bool:
        most = self.model.settings.max_target_tokens
        return len(self.tokens) == most or self.tokens[-1:] == [self.adapter.eos_token_id]

    @property
    def prompted(self) -> Tensor | None:
        """What says the next token where that is the prompt."""
        return None if self.tokens else self.adapter.prompt_hidden(self.state)

    def begin(self) -> None:
        token = self.tokens[-1] if self.tokens else self.adapter.start_token_id
        self.hidden, self.before, self.layer = self.adapter.embed(token, len(self.tokens), self.state), None, 0

    def up(self) -> bool:
        """Run the next layer; whether its confidence, or the fixed depth, says that the row may leave."""
        self.layer += 1
        step = len(self.tokens)
        self.previous, self.hidden = self.hidden, self.adapter.layer(self.layer, self.hidden, self.state, step)
        depth = fixed_depth(self.policy, "", step, LAYERS)
        if depth is not None:
            return depth <= self.layer
        assert isinstance(self.policy, Confident)
        if self.layer == LAYERS:
            return False
        self.before = layer_view(self.model, self.layer, self.hidden[0], self.previous[0], self.before, self.policy)
        confidence = float(CONFIDENCE[self.policy.measure](self.before))
        return confidence >= self.policy.schedule.at(step, self.layer)

    def speak(self) -> None:
        """Token and K/V of the layers above, from the layer that the row has reached."""
        step = len(self.tokens)
        for layer in range(self.layer + 1, LAYERS + 1):
            self.adapter.write_kv(layer, self.state, step, *self.adapter.kv(layer, self.hidden, self.state, step))
        self.say(self.hidden, self.layer)

    def say(self, hidden: Tensor, layer: int) -> None:
        self.tokens.append(int(self.adapter.logits(hidden).argmax()))
        self.emission.append(layer)


def sync(live: list[PlainRow]) -> None:
    crossed: set[int] = set()
    for _ in range(LAYERS):
        for number, row in enumerate(live):
            if row.up():
                crossed.add(number)
        if len(crossed) == len(live):
            break


def lockstep(live: list[PlainRow]) -> None:
    for _ in range(LAYERS):
        if all([row.up() for row in live]):  # a list: every row runs
            break


def quantile(live: list[PlainRow]) -> None:
    crossed: set[int] = set()
    for _ in range(LAYERS):
        for number, row in enumerate(live):
            if number not in crossed and row.up():
                crossed.add(number)
        if len(crossed) >= SHARE * len(live):
            break
    for number, row in enumerate(live):
        row.involuntary += number not in crossed and row.layer < LAYERS


PLAIN: dict[BatchRule, Callable[[list[PlainRow]], None]] = {
    BatchRule.sync: sync,
    BatchRule.lockstep: lockstep,
    BatchRule.quantile: quantile,
}


@torch.inference_mode()
def plain(
    model: SpeakingModel, rule: BatchRule, sources: list[str], policies: list[Policy], arrivals: list[int]
) -> list[PlainRow]:
    adapter = adapter_of(model)
    rows = [
        PlainRow(model, adapter.prefill(encode_source(model.tokenizer, source, model.settings)), policy, adapter)
        for source, policy in zip(sources, policies, strict=True)
    ]
    for now in range(max(arrivals) + model.settings.max_target_tokens):
        here = [row for row, arrival in zip(rows, arrivals, strict=True) if arrival <= now and not row.over]
        live = [row for row in here if row.prompted is None]
        for row in live:
            row.begin()
        if live:
            PLAIN[rule](live)
        for row in here:
            if (hidden := row.prompted) is not None:
                row.say(hidden, LAYERS)
        for row in live:
            row.speak()
    return rows


def same_as_plain(
    model: SpeakingModel,
    engine: Engine,
    sources: list[str],
    policies: list[Policy],
    arrivals: list[int],
) -> None:
    """``engine``: with room for all of them from their first step on."""
    answers, rule = {}, engine.options.rule
    for now in range(max(arrivals) + model.settings.max_target_tokens):
        for number, arrival in enumerate(arrivals):
            if arrival == now:
                engine.add_request(sources[number], policy=policies[number], name=str(number))
        answers.update({int(answer.id): answer for answer in engine.step().answers})
    assert not engine.has_work
    expected = plain(model, rule, sources, policies, arrivals)
    found = [answers[number] for number in range(len(sources))]
    assert [list(answer.tokens) for answer in found] == [row.tokens for row in expected]
    assert [list(answer.emission_layers) for answer in found] == [row.emission for row in expected]
    assert [answer.involuntary for answer in found] == [row.involuntary for row in expected]
    assert all(answer.status is Status.finished for answer in found)
    emitted = {layer for answer in found for layer in answer.emission_layers}
    assert len(emitted) >= 3, emitted
    if rule is not BatchRule.quantile:
        assert all(answer.executed_layers == answer.emission_layers for answer in found)
        changed = [answer.emission_layers != answer.crossing_layers for answer in found]
        assert any(changed), "mates must matter"
    else:
        assert any(answer.involuntary for answer in found)
