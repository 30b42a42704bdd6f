"""Self-speculative decoding on the reference side: the specification, and a batch proven equal to it.

A round of a row whose pending token stands at step t (calm.drafting): the draft's layers run on it and on what they
draft, one position after the other; the layers above run on all these positions; of the drafted words those are kept
that the full model says, and its next word. What was read behind them is forgotten. So an answer is full depth's greedy
one, and nothing is ever backfilled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .architectures import adapter_of, layers_over, spec_of
from .confidence import CONFIDENCE, LayerView
from .data.collate import pad
from .data.text import encode_source
from .decode import TraceBuilder
from .decode_checks import check_lengths
from .drafting import Draft, accepted, said
from .models.base import DecoderAdapter
from .models.speaking import SpeakingModel
from .records import DecodeTrace, Example
from .wide_layers import WideLayers


def check_draft(model: SpeakingModel, draft: Draft) -> None:
    """Raise ConfigError where the draft asks for what the model does not have."""
    draft.check_depth(model.num_layers)
    draft.check_classifier(model.settings.has_classifier)


def confidences(model: SpeakingModel, draft: Draft, hidden: Tensor, previous: Tensor) -> Float[Tensor, " rows"]:
    """Of the draft's measure, after its layer; (rows, d_model) each, ``previous`` one layer earlier."""
    assert draft.measure is not None
    before = previous if draft.layer > 1 else None
    return CONFIDENCE[draft.measure](LayerView(draft.layer, hidden, before, model.logits, model.classifier))


def note_round(row: TraceBuilder, drafted: Sequence[int], words: Sequence[int], eos_token_id: int) -> tuple[int, ...]:
    """Write a round's end into a row; returns what it says."""
    spoken = said(drafted, words, eos_token_id)
    row.rounds += 1
    row.drafted += len(drafted)
    row.accepted += accepted(drafted, words)
    note_words(row, spoken, eos_token_id)
    return spoken


def note_words(row: TraceBuilder, words: Sequence[int], eos_token_id: int) -> None:
    """Write the full model's words into a row."""
    row.tokens += words
    row.crossing += [row.num_layers] * len(words)
    row.executed += [row.num_layers] * len(words)
    row.backfilled += [0] * len(words)
    row.finished = eos_token_id in words


class SpeculativeOne:
    """The specification: each example by itself, one position of one layer at a time.

    Args:
        model: in eval mode.
        max_new_tokens: N; default is the model's own.

    Raises:
        ConfigError: the draft does not fit the model.
    """

    def __init__(self, model: SpeakingModel, draft: Draft, *, max_new_tokens: int | None = None) -> None:
        check_draft(model, draft)
        self.model, self.draft = model, draft
        self.adapter: DecoderAdapter = adapter_of(model)
        self.max_new_tokens = max_new_tokens or model.settings.max_target_tokens
        check_lengths(model, self.max_new_tokens)

    @torch.inference_mode()
    def __call__(self, examples: Sequence[Example]) -> list[DecodeTrace]:
        return [self._decode(example) for example in examples]

    def _decode(self, example: Example) -> DecodeTrace:
        source = encode_source(self.model.tokenizer, example.source, self.model.settings)
        state = self.adapter.prefill(source)
        row = TraceBuilder(example, self.model.num_layers)
        token, prompted = self.adapter.start_token_id, self.adapter.prompt_hidden(state)
        if prompted is not None:  # the whole prompt was read at full depth, so nothing of its word is drafted
            token = self._argmax(prompted)
            note_words(row, [token], self.adapter.eos_token_id)
        while not row.finished and len(row.tokens) < self.max_new_tokens:
            drafted, hiddens = self._drafted(token, len(row.tokens), state)
            words = self._checked(hiddens, len(row.tokens), state)
            token = note_round(row, drafted, words, self.adapter.eos_token_id)[-1]
            self.adapter.forget(state, len(row.tokens))
        return row.build(self.model)

    def _drafted(self, token: int, step: int, state: Any) -> tuple[list[int], list[Tensor]]:
        """Words drafted from the token at ``step`` on, and the draft layer's hidden at every position it has read."""
        draft, words, hiddens = self.draft, list[int](), list[Tensor]()
        while True:
            at = step + len(hiddens)
            hidden = previous = self.adapter.embed(token, at, state)
            for layer in range(1, draft.layer + 1):
                previous, hidden = hidden, self.adapter.layer(layer, hidden, state, at)
            hiddens.append(hidden)
            if len(words) == draft.length or at + 1 == self.max_new_tokens:
                return words, hiddens
            if draft.measure is not None:
                confidence = float(confidences(self.model, draft, hidden[0], previous[0]))
                if not confidence >= draft.threshold:
                    return words, hiddens
            token = self._argmax(hidden)
            words.append(token)
            if token == self.adapter.eos_token_id:
                return words, hiddens

    def _checked(self, hiddens: Sequence[Tensor], step: int, state: Any) -> list[int]:
        """The full model's word at each of these positions, the first of which is ``step``."""
        words = []
        for at, hidden in enumerate(hiddens, start=step):
            for layer in range(self.draft.layer + 1, self.adapter.num_layers + 1):
                hidden = self.adapter.layer(layer, hidden, state, at)
            words.append(self._argmax(hidden))
        return words

    def _argmax(self, hidden: Tensor) -> int:
        return int(self.adapter.logits(hidden).float().argmax())


@dataclass
class Drafted:
    """What a batch has drafted in a round.

    Attributes:
        words: of each row.
        hidden: the draft layer's, at every position that the rows have read.
        steps: of these positions. A row that has read fewer than another repeats its last one.
    """

    words: list[list[int]]
    hidden: Float[Tensor, "batch length d_model"]
    steps: Int[Tensor, "batch length"]


class SpeculativeBatch:
    """The same in batches of ``batch_size``, every row at a position of its own; proven equal to ``SpeculativeOne``.

    Answers come in the order asked. Arguments and errors are those of ``SpeculativeOne``.
    """

    def __init__(
        self, model: SpeakingModel, draft: Draft, *, batch_size: int = 64, max_new_tokens: int | None = None
    ) -> None:
        check_draft(model, draft)
        self.model, self.draft, self.batch_size = model, draft, batch_size
        self.spec = spec_of(model)
        self.max_new_tokens = max_new_tokens or model.settings.max_target_tokens
        check_lengths(model, self.max_new_tokens)

    @torch.inference_mode()
    def __call__(self, examples: Sequence[Example]) -> list[DecodeTrace]:
        sources = [encode_source(self.model.tokenizer, each.source, self.model.settings) for each in examples]
        order = sorted(range(len(examples)), key=lambda i: len(sources[i]))
        rows = [TraceBuilder(each, self.model.num_layers) for each in examples]
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            self._decode([sources[i] for i in chosen], [rows[i] for i in chosen])
        return [row.build(self.model) for row in rows]

    def _decode(self, sources: list[list[int]], live: list[TraceBuilder]) -> None:
        ids, mask = (tensor.to(self.model.device) for tensor in pad(sources))
        layers = WideLayers(layers_over(self.model, self.spec, ids, mask, self.max_new_tokens))
        pending = [self.spec.start_token_id] * len(live)
        if (prompted := layers.caches.prompt_hidden) is not None:
            pending = self._argmax(layers, prompted).tolist()
            for row, word in zip(live, pending, strict=True):
                note_words(row, [word], self.spec.eos_token_id)
        while True:
            keep = [i for i, row in enumerate(live) if not row.finished and len(row.tokens) < self.max_new_tokens]
            if not keep:
                return
            if len(keep) < len(live):
                layers.caches.select(torch.tensor(keep, device=ids.device))
                pending, live = [pending[i] for i in keep], [live[i] for i in keep]
            drafted = self._drafted(layers, pending, [len(row.tokens) for row in live])
            words = self._checked(layers, drafted).tolist()
            for i, row in enumerate(live):
                pending[i] = note_round(row, drafted.words[i], words[i], self.spec.eos_token_id)[-1]

    def _drafted(self, layers: WideLayers, pending: list[int], steps: list[int]) -> Drafted:
        """A row that has ended its draft reads its last position again, and writes there what it wrote before."""
        draft, device = self.draft, self.model.device
        words: list[list[int]] = [[] for _ in steps]
        tokens, at, drafting = list(pending), list(steps), set(range(len(steps)))
        hiddens, places = list[Tensor](), list[Tensor]()
        while True:
            places.append(torch.tensor(at, device=device)[:, None])
            hidden = previous = layers.embed(torch.tensor(tokens, device=device)[:, None], places[-1])
            for layer in range(1, draft.layer + 1):
                previous, hidden = hidden, layers.run(layer, hidden, places[-1])
            hiddens.append(hidden)
            drafting = {i for i in drafting if len(words[i]) < draft.length and at[i] + 1 < self.max_new_tokens}
            if draft.measure is not None:
                seen = confidences(self.model, draft, hidden[:, 0], previous[:, 0]).tolist()
                drafting = {i for i in drafting if seen[i] >= draft.threshold}
            found = self._argmax(layers, hidden[:, 0]).tolist()
            for i in drafting:
                words[i].append(found[i])
            drafting = {i for i in drafting if found[i] != self.spec.eos_token_id}
            if not drafting:
                return Drafted(words, torch.cat(hiddens, dim=1), torch.cat(places, dim=1))
            for i in drafting:
                tokens[i], at[i] = found[i], at[i] + 1

    def _checked(self, layers: WideLayers, drafted: Drafted) -> Int[Tensor, "batch length"]:
        """The full model's words at all positions of the drafts, in one pass of the layers above."""
        hidden = drafted.hidden
        for layer in range(self.draft.layer + 1, self.spec.num_layers + 1):
            hidden = layers.run(layer, hidden, drafted.steps)
        return self._argmax(layers, hidden)

    def _argmax(self, layers: WideLayers, hidden: Float[Tensor, "*rows d_model"]) -> Int[Tensor, "*rows"]:
        return layers.caches.logits(hidden.flatten(0, -2)).float().argmax(dim=-1).view(hidden.shape[:-1])
