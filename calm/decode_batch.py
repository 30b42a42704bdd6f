"""decode_batch: plain eager torch over a padded batch, row-exact, proven equal to ``decode_one``.

Rows share kernels, never attention. A crossed row stays in the batch with its residual *held* at the crossing:
each later layer that its mates run then writes exactly the row's backfill, and its output for the held row is
dropped. Finished rows are dropped from the batch once they are half of it. Under a schedule of layers a batch is one
band of positions: its rows begin together, so that each step's layers are the same for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .architectures import layers_over, spec_of
from .batch_layers import BatchCaches
from .confidence import CONFIDENCE, LayerView
from .config import Backfill
from .data.collate import pad
from .data.text import encode_source
from .decode import NAN, TraceBuilder, depth_of, layer_cosine, layer_view
from .decode_checks import check_lengths, check_policy
from .models.speaking import SpeakingModel
from .policies import Budgeted, Confident, Oracle, Policy, SkipSchedule, exits_of, scheduled_layers
from .records import DecodeTrace, Example


@dataclass
class StepResult:
    """One step of a batch: token, crossing layer and, where recorded, confidences of each row.

    ``fills``: the layers above a crossing got K and V.
    """

    tokens: Int[Tensor, " rows"]
    crossing: Int[Tensor, " rows"]
    executed: int
    confidences: Float[Tensor, "rows layers"]
    fills: bool


class BatchDecoder:
    """Greedy decoding in batches of ``batch_size``, sorted by source length; answers come in the order asked.

    ``executed_layers`` of a row counts the layers that ran with the row in them: in a batch that is the depth of
    the slowest row that is still decoding. With ``ignore_eos`` every answer has ``max_new_tokens``: for a clock.
    """

    def __init__(
        self,
        model: SpeakingModel,
        *,
        batch_size: int = 64,
        backfill: Backfill = Backfill.project,
        max_new_tokens: int | None = None,
        record_confidences: bool = False,
        ignore_eos: bool = False,
    ) -> None:
        self.model = model
        self.spec = spec_of(model)
        self.batch_size = batch_size
        self.backfill = backfill
        self.max_new_tokens = max_new_tokens or model.settings.max_target_tokens
        check_lengths(model, self.max_new_tokens)
        self.record_confidences = record_confidences
        self.ignore_eos = ignore_eos

    @torch.inference_mode()
    def __call__(self, examples: Sequence[Example], policy: Policy) -> list[DecodeTrace]:
        check_policy(self.model, policy, self.backfill)
        sources = [encode_source(self.model.tokenizer, e.source, self.model.settings) for e in examples]
        order = sorted(range(len(examples)), key=lambda i: len(sources[i]))
        traces: dict[int, DecodeTrace] = {}
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            rows = [TraceBuilder(examples[i], self.model.num_layers) for i in chosen]
            self._decode([sources[i] for i in chosen], rows, policy)
            traces.update((i, row.build(self.model)) for i, row in zip(chosen, rows, strict=True))
        return [traces[i] for i in range(len(examples))]

    def _decode(self, sources: list[list[int]], rows: list[TraceBuilder], policy: Policy) -> None:
        ids, mask = (tensor.to(self.model.device) for tensor in pad(sources))
        layers = layers_over(self.model, self.spec, ids, mask, self.max_new_tokens)
        live = list(rows)
        tokens = torch.full((len(live),), self.spec.start_token_id, device=ids.device)
        for step in range(self.max_new_tokens):
            if step == 0 and layers.prompt_hidden is not None:
                result = self._said_by_the_prompts(layers, layers.prompt_hidden)
            elif isinstance(policy, SkipSchedule):
                result = self._scheduled(layers, tokens, step, policy)
            else:
                result = self._step(layers, tokens, step, live, policy)
            tokens = result.tokens
            self._record(result, live)
            keep = [i for i, row in enumerate(live) if not row.finished]
            if not keep:
                return
            if 2 * len(keep) <= len(live):
                index = torch.tensor(keep, device=ids.device)
                layers.select(index)
                tokens, live = tokens[index], [live[i] for i in keep]

    def _said_by_the_prompts(self, layers: BatchCaches, hidden: Tensor) -> StepResult:
        """The first tokens of a decoder-only model, whatever the policy: its prompts were read at full depth."""
        rows, num_layers = hidden.shape[0], self.spec.num_layers
        tokens = layers.logits(hidden).float().argmax(dim=-1)
        nothing = torch.full((rows, num_layers), NAN, device=hidden.device)
        return StepResult(tokens, torch.full_like(tokens, num_layers), num_layers, nothing, fills=True)

    def _step(
        self, layers: BatchCaches, tokens: Tensor, step: int, live: list[TraceBuilder], policy: Policy
    ) -> StepResult:
        """Run layers until every live row has crossed, then backfill what is left."""
        num_layers = self.spec.num_layers
        depth = self._depths(live, step, policy)  # (B,), 0 where confidences decide
        exits = exits_of(policy)
        crossing = torch.full_like(tokens, num_layers)
        crossed = torch.tensor([row.finished for row in live], device=tokens.device)
        confidences = torch.full((len(live), num_layers), NAN, device=tokens.device)
        cosine = torch.ones(len(live), device=tokens.device)  # at each row's crossing, where a budget asks
        hidden = layers.embed(tokens, step)  # (B, D); held at the crossing once a row has crossed
        real = hidden  # goes on through every layer for `true` backfill and the oracle
        goes_on = self.backfill is Backfill.true or isinstance(policy, Oracle)
        before: LayerView | None = None
        reals: list[Tensor] = []
        executed = num_layers
        for layer in range(1, num_layers + 1):
            previous = hidden
            real = layers.run(layer, real if goes_on else hidden, step)
            reals.append(real)
            hidden = torch.where(crossed[:, None], hidden, real)
            newly = ~crossed & (depth == layer)
            if isinstance(exits, Confident) and layer in self.model.settings.exit_layers:
                before = layer_view(self.model, layer, hidden, previous, before, exits)
                confidence = CONFIDENCE[exits.measure](before)
                # a row whose threshold is >= 1 has a fixed depth: its confidence may be recorded, never asked
                confidences[:, layer - 1] = torch.where(crossed, confidences[:, layer - 1], confidence)
                newly |= ~crossed & (depth == 0) & (confidence >= exits.schedule.at(step, layer))
            if isinstance(policy, Budgeted):
                cosine = torch.where(newly, layer_cosine(hidden, previous), cosine)
            crossing = torch.where(newly, layer, crossing)
            crossed = crossed | newly
            if not goes_on and bool(crossed.all()):
                executed = layer
                break
        if isinstance(policy, Oracle):
            hidden, crossing = self._oracle(reals)
            executed_as_held = 0  # the lookahead wrote real K/V everywhere
        else:
            executed_as_held = executed
        self._fill_above(layers, crossing, hidden, executed_as_held, step)
        if isinstance(policy, Budgeted):
            for row, layer, seen in zip(live, crossing.tolist(), cosine.tolist(), strict=True):
                row.spent = policy.spend(row.spent, layer, num_layers, seen)
        answers = layers.logits(hidden).float().argmax(dim=-1)
        return StepResult(answers, crossing, executed, confidences, self.backfill is not Backfill.true)

    def _scheduled(self, layers: BatchCaches, tokens: Tensor, step: int, policy: SkipSchedule) -> StepResult:
        """A schedule's layers and no others, for the whole batch at once: its rows all stand at this position."""
        chosen = scheduled_layers(policy, step, self.spec.num_layers)
        hidden = layers.embed(tokens, step)
        for layer in chosen:
            hidden = layers.run(layer, hidden, step)
        crossing = torch.full_like(tokens, chosen[-1])
        confidences = torch.full((len(tokens), self.spec.num_layers), NAN, device=tokens.device)
        return StepResult(layers.logits(hidden).float().argmax(dim=-1), crossing, len(chosen), confidences, False)

    def _depths(self, live: list[TraceBuilder], step: int, policy: Policy) -> Int[Tensor, " rows"]:
        depths = [depth_of(policy, row, step) or 0 for row in live]
        return torch.tensor(depths, device=self.model.device)

    def _oracle(self, reals: list[Tensor]) -> tuple[Float[Tensor, "rows d_model"], Int[Tensor, " rows"]]:
        """Per row the first layer that may exit and agrees with the full stack, and its hidden."""
        answers = torch.stack([self.model.logits(real).float().argmax(dim=-1) for real in reals])  # (L, B)
        agrees: Bool[Tensor, "layers rows"] = answers == answers[-1]
        allowed = torch.zeros(len(reals), dtype=torch.bool, device=answers.device)
        allowed[[layer - 1 for layer in self.model.settings.exit_layers] + [len(reals) - 1]] = True
        first = (agrees & allowed[:, None]).float().argmax(dim=0)  # (B,)
        rows = torch.arange(answers.shape[1], device=answers.device)
        return torch.stack(reals)[first, rows], first + 1

    def _fill_above(self, layers: BatchCaches, crossing: Tensor, hidden: Tensor, written: int, step: int) -> None:
        """Backfill; layers up to ``written`` already hold it, from the held residual."""
        match self.backfill:
            case Backfill.project:
                for layer in range(written + 1, self.spec.num_layers + 1):
                    layers.write(layer, hidden, step, crossing < layer)
            case Backfill.copy:
                layers.copy_up(crossing, step)
            case Backfill.mask:
                layers.punch(crossing, step)
            case Backfill.true:
                pass

    def _record(self, result: StepResult, live: list[TraceBuilder]) -> None:
        tokens, crossing = result.tokens.tolist(), result.crossing.tolist()
        confidences = result.confidences.tolist() if self.record_confidences else None
        num_layers = self.spec.num_layers
        for i, row in enumerate(live):
            if row.finished:
                continue
            row.tokens.append(tokens[i])
            row.crossing.append(crossing[i])
            row.executed.append(result.executed)
            row.backfilled.append(num_layers - crossing[i] if result.fills else 0)
            if confidences is not None:
                row.confidences.append(tuple(confidences[i]))
            row.finished = tokens[i] == self.spec.eos_token_id and not self.ignore_eos
