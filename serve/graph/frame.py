"""Where the rows of a step stand, in tensors that keep their places: what a captured step reads and writes.

One frame a bucket. Row i of every tensor is row i of the batch; rows that are none (``live`` is False) point at the
slot that is nobody's.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calm.models.base import DecoderSpec

from .slots import GraphSlots

SAID = ("tokens", "crossing", "emission", "executed", "involuntary")  # rows of ``said``
GIVEN = ("slots", "steps", "tokens", "chained", "live")  # rows of ``given``


@dataclass(frozen=True)
class Frame:
    """Tensors of a bucket of B rows.

    Attributes:
        given: what the host hands over, a line each of GIVEN. ``chained`` rows go on from where the step before left
            their slot; the others decode ``tokens`` at ``steps``.
        slots, steps, tokens, live: of this step.
        thresholds: what a confidence must reach after each layer at this position.
        depths: fixed depth at this position, 0 where confidences decide.
        measures, run_lengths: index into MEASURES (-1: none), and k of ``agreement``.
        hidden, previous: residual stream after the last layer that ran, and before it where ``state`` compares them.
        crossed, crossing: whether and where.
        runs: rows that the next layer runs on.
        order, active: the same as a list: the first ``active`` rows of ``order``.
        words, run: of ``agreement``: the last check's word, and how many checks in a row said it.
        confidence: of the layer that was checked last; ``confidences``: of each layer, where they are recorded.
        stopped, layers: whether the batch rule has ended the step, and after which layer.
        said: what the rows said, a line each of SAID.
    """

    given: Int[Tensor, "given batch"]
    slots: Int[Tensor, " batch"]
    steps: Int[Tensor, " batch"]
    tokens: Int[Tensor, " batch"]
    live: Bool[Tensor, " batch"]
    thresholds: Float[Tensor, "batch layers"]
    depths: Int[Tensor, " batch"]
    measures: Int[Tensor, " batch"]
    run_lengths: Int[Tensor, " batch"]
    hidden: Float[Tensor, "batch d_model"]
    previous: Float[Tensor, "batch d_model"]
    crossed: Bool[Tensor, " batch"]
    crossing: Int[Tensor, " batch"]
    runs: Bool[Tensor, " batch"]
    order: Int[Tensor, " batch"]
    active: Int[Tensor, ""]
    words: Int[Tensor, " batch"]
    run: Int[Tensor, " batch"]
    confidence: Float[Tensor, " batch"]
    confidences: Float[Tensor, "batch recorded"]
    stopped: Bool[Tensor, ""]
    layers: Int[Tensor, ""]
    said: Int[Tensor, "said batch"]

    @property
    def size(self) -> int:
        return self.slots.shape[0]

    @classmethod
    def of(cls, bucket: int, spec: DecoderSpec, slots: GraphSlots, record: bool) -> "Frame":
        """Of so many rows, none of which is live."""
        device, dtype = slots.keys.device, spec.tensors["embed"].dtype

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        def flags(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.bool, device=device)

        def real(*shape: int, like: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=like, device=device)

        given = whole(len(GIVEN), bucket)
        given[GIVEN.index("slots")] = slots.padding
        return cls(
            given=given,
            slots=torch.full((bucket,), slots.padding, device=device),
            steps=whole(bucket),
            tokens=whole(bucket),
            live=flags(bucket),
            thresholds=real(bucket, spec.num_layers),
            depths=whole(bucket),
            measures=whole(bucket),
            run_lengths=whole(bucket),
            hidden=real(bucket, spec.d_model, like=dtype),
            previous=real(bucket, spec.d_model, like=dtype),
            crossed=flags(bucket),
            crossing=whole(bucket),
            runs=flags(bucket),
            order=torch.arange(bucket, dtype=torch.int32, device=device),
            active=torch.zeros((), dtype=torch.int32, device=device),
            words=whole(bucket),
            run=whole(bucket),
            confidence=real(bucket),
            confidences=real(bucket, spec.num_layers if record else 0),
            stopped=flags(),
            layers=whole(),
            said=whole(len(SAID), bucket),
        )
