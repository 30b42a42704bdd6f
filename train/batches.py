"""Which rows at which step: order is a function of (seed, epoch), position is a saved counter.

A batch is the rows of one optimizer step over all processes and micro-batches. Rows are tokenised when they are
needed: a corpus of any size starts at once, and lengths in characters are good enough for bucketing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from calm.data.collate import length_batches, pad
from calm.data.text import encode_source, encode_target
from calm.losses import IGNORED
from calm.models.speaking import SpeakingModel
from calm.records import Example

SOURCE_MULTIPLE, TARGET_MULTIPLE = 8, 4


@dataclass(frozen=True)
class Batch:
    """Tensors of one micro-batch.

    Attributes:
        decoder_ids: the target moved right by one, start token first.
        labels: target ids, EOS last, -100 on padding.
        counted: False for a filler, whose loss is multiplied by 0.
    """

    source_ids: Int[Tensor, "batch source"]
    source_mask: Bool[Tensor, "batch source"]
    decoder_ids: Int[Tensor, "batch target"]
    labels: Int[Tensor, "batch target"]
    counted: bool = True


@dataclass
class Position:
    """Where in the data a run stands: ``batch`` batches of ``epoch`` are done."""

    epoch: int = 0
    batch: int = 0


class Feed:
    """Batches of a training split, each epoch every row exactly once, or one row of every family."""

    def __init__(
        self,
        model: SpeakingModel,
        examples: Sequence[Example],
        batch_size: int,
        seed: int,
        one_per_family: bool = False,
    ) -> None:
        self._model, self._examples, self._batch_size, self._seed = model, examples, batch_size, seed
        self._lengths = [len(example.source) + len(example.target) for example in examples]
        self._families = [example.family for example in examples] if one_per_family else None
        self._epoch, self._plan = -1, [[0]][:0]

    def next(self, position: Position) -> list[int]:
        """Indices of the batch at ``position``, which moves on by one."""
        plan = self._plan_of(position.epoch)
        if position.batch >= len(plan):
            position.epoch, position.batch = position.epoch + 1, 0
            plan = self._plan_of(position.epoch)
        rows = plan[position.batch]
        position.batch += 1
        return rows

    def _plan_of(self, epoch: int) -> list[list[int]]:
        if epoch != self._epoch:
            self._plan = length_batches(self._lengths, self._batch_size, self._seed, epoch, families=self._families)
            self._epoch = epoch
        return self._plan

    def ids(self, rows: Sequence[int]) -> list[str]:
        return [self._examples[row].id for row in rows]

    def targets(self, rows: Sequence[int]) -> list[list[int]]:
        """Target ids, EOS last. Their summed length is the number of tokens that the step's mean is taken over."""
        limit = self._model.settings.max_target_tokens
        return [encode_target(self._model.tokenizer, self._examples[row].target, limit) for row in rows]

    def batch(self, rows: Sequence[int], targets: Sequence[Sequence[int]], counted: bool = True) -> Batch:
        """Tensors of these rows; their targets were made before, to count the tokens of the whole step."""
        settings, tokenizer = self._model.settings, self._model.tokenizer
        sources = [encode_source(tokenizer, self._examples[row].source, settings) for row in rows]
        source_ids, source_mask = pad(sources, SOURCE_MULTIPLE)
        decoder_ids, _ = pad([[self._model.start_token_id, *target[:-1]] for target in targets], TARGET_MULTIPLE)
        labels, kept = pad(targets, TARGET_MULTIPLE)
        device = self._model.device
        return Batch(
            source_ids.to(device),
            source_mask.to(device),
            decoder_ids.to(device),
            labels.masked_fill(~kept, IGNORED).to(device),
            counted,
        )


@dataclass(frozen=True)
class Share:
    """What one process does of a step: micro-batches as positions into the step's rows."""

    rank: int
    world: int
    accumulation: int

    def micro_batches(self, rows: int) -> list[list[int]]:
        """Rows are dealt in turn, so that all parts hold like lengths. A part may be empty in an epoch's last batch."""
        parts = self.world * self.accumulation
        return [list(range(micro * self.world + self.rank, rows, parts)) for micro in range(self.accumulation)]
