"""The batch-coupled rules against plain transcriptions, one Python loop over rows and layers.

``sync`` is Algorithm 1 of arXiv 2407.20272: run layers until every live row has crossed; tokens and the K/V above come
from the last executed layer for every row; finished rows count as crossed. Rows are those of decode_one: Hugging Face's
modules, one sequence each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from calm.confidence import CONFIDENCE, LayerView
from calm.config import BatchRule, Measure
from calm.data.text import encode_source
from calm.decode import layer_view
from calm.models.t5_adapter import RowState, T5Adapter
from calm.policies import Confident, Policy, Static, fixed_depth
from serve.requests import Status

from .models import LENGTH, confident, engine_of, mixed_policies, texts, tiny, usual

pytestmark = pytest.mark.usefixtures("each_runner")

MODEL = tiny()
LAYERS = MODEL.num_layers
SHARE = 0.6


@dataclass
class PlainRow:
    """A row of the transcription."""

    state: RowState
    policy: Policy
    adapter: T5Adapter
    tokens: list[int] = field(default_factory=list)
    emission: list[int] = field(default_factory=list)
    involuntary: int = 0
    layer: int = 0
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    previous: Tensor = field(default_factory=lambda: torch.empty(0))
    before: LayerView | None = None

    @property
    def over(self) -> bool:
        return len(self.tokens) == LENGTH or self.tokens[-1:] == [self.adapter.eos_token_id]

    def begin(self) -> None:
        token = self.tokens[-1] if self.tokens else self.adapter.start_token_id
        self.hidden, self.before, self.layer = self.adapter.embed(token, len(self.tokens)), None, 0

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
        self.before = layer_view(MODEL, self.layer, self.hidden[0], self.previous[0], self.before, self.policy)
        confidence = float(CONFIDENCE[self.policy.measure](self.before))
        return confidence >= self.policy.schedule.at(step, self.layer)

    def speak(self) -> None:
        """Token and K/V of the layers above, from the layer that the row has reached."""
        step = len(self.tokens)
        for layer in range(self.layer + 1, LAYERS + 1):
            self.adapter.write_kv(layer, self.state, step, *self.adapter.kv(layer, self.hidden))
        self.tokens.append(int(self.adapter.logits(self.hidden).argmax()))
        self.emission.append(self.layer)


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
def plain(rule: BatchRule, sources: list[str], policies: list[Policy], arrivals: list[int]) -> list[PlainRow]:
    adapter = T5Adapter(MODEL)
    rows = [
        PlainRow(adapter.prefill(encode_source(MODEL.tokenizer, source, MODEL.settings)), policy, adapter)
        for source, policy in zip(sources, policies, strict=True)
    ]
    for now in range(max(arrivals) + LENGTH):
        live = [row for row, arrival in zip(rows, arrivals, strict=True) if arrival <= now and not row.over]
        for row in live:
            row.begin()
        if live:
            PLAIN[rule](live)
        for row in live:
            row.speak()
    return rows


def same_as_plain(rule: BatchRule, policies: list[Policy], arrivals: list[int]) -> None:
    sources = texts(len(policies))
    engine = engine_of(rule, quantile=SHARE, max_batch=len(sources), prefill_calls=len(sources))
    answers = {}
    for now in range(max(arrivals) + LENGTH):
        for number, arrival in enumerate(arrivals):
            if arrival == now:
                engine.add_request(sources[number], policy=policies[number], name=str(number))
        answers.update({int(answer.id): answer for answer in engine.step().answers})
    assert not engine.has_work
    expected = plain(rule, sources, policies, arrivals)
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


@pytest.mark.parametrize("measure", [Measure.softmax, Measure.classifier, Measure.entropy])
@pytest.mark.parametrize("rule", PLAIN, ids=lambda rule: rule.value)
def test_one_policy_for_all(rule: BatchRule, measure: Measure) -> None:
    below = 0.7 if rule is BatchRule.quantile else 0.4
    same_as_plain(rule, [confident(measure, usual(measure, below=below))] * 4, [0, 0, 0, 0])


@pytest.mark.parametrize("rule", PLAIN, ids=lambda rule: rule.value)
def test_rows_that_come_and_go_with_policies_of_their_own(rule: BatchRule) -> None:
    easy = confident(Measure.softmax, usual(Measure.softmax, below=0.2))
    policies = [easy, Static(2), mixed_policies()["decaying"], easy, mixed_policies()["agreement-2"], Static(1)]
    same_as_plain(rule, policies, [0, 0, 1, 3, 3, 12])


def test_finished_rows_count_as_crossed() -> None:
    """A deep row holds a shallow one up exactly as long as it lives."""
    engine = engine_of(BatchRule.sync, max_batch=2)
    engine.add_request(texts()[0], policy=Static(1), name="shallow")
    engine.add_request(texts()[1], max_tokens=3, name="deep")
    found = {}
    while engine.has_work:
        found.update({answer.id: answer for answer in engine.step().answers})
    assert len(found["deep"].tokens) == 3
    assert found["shallow"].emission_layers == (4, 4, 4, *[1] * 7)
    assert found["shallow"].crossing_layers == (1,) * 10
