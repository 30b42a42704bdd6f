"""The engine as a decoder like the others: ``decode(examples, policy) -> list[DecodeTrace]``.

So calibration and Table 1 take it too (``decoder=engine``), and what is served can be certified as it is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calm.config import Backfill
from calm.decode_batch import BatchDecoder
from calm.errors import CalmError, ConfigError
from calm.policies import Oracle, Policy
from calm.records import DecodeTrace, Example

from .engine import Engine
from .requests import Answer, Status

if TYPE_CHECKING:
    from calm.decode_spec import Decode, DecodeSpec
    from calm.models.speaking import SpeakingModel


class EngineDecoder:
    """Decodes examples through an engine of its own; answers come in the order asked.

    The oracle, which needs every layer of every token and which no engine serves, is left to ``decode_batch``.

    Raises ConfigError for another backfill than ``project``.
    """

    def __init__(self, model: SpeakingModel, spec: DecodeSpec) -> None:
        if spec.backfill is not Backfill.project:
            raise ConfigError(
                f"decoder=engine fills by 'project' only, not by {spec.backfill.value!r}; use decoder=batch"
            )
        self.engine = Engine(
            model,
            rule=spec.rule,
            quantile=spec.quantile,
            max_batch=spec.batch_size,
            head=spec.head,
            head_k=spec.head_k,
            runner=spec.runner,
            weights=spec.weights,
            cross_kv=spec.cross_kv,
            record_confidences=spec.record_confidences,
        )
        self._oracle = BatchDecoder(model, batch_size=spec.batch_size)

    def __call__(self, examples: Sequence[Example], policy: Policy) -> list[DecodeTrace]:
        if isinstance(policy, Oracle):
            return self._oracle(examples, policy)
        names = [example.id for example in examples]
        answers = self.engine.generate([example.source for example in examples], names=names, policy=policy)
        return [trace_of(answer) for answer in answers]


def trace_of(answer: Answer) -> DecodeTrace:
    """The record of a finished answer. Raises CalmError for one that failed."""
    if answer.status is not Status.finished:
        raise CalmError(f"{answer.id}: {answer.error or answer.status.value}")
    return DecodeTrace(
        id=answer.id,
        tokens=answer.tokens,
        text=answer.text,
        crossing_layers=answer.crossing_layers,
        emission_layers=answer.emission_layers,
        executed_layers=answer.executed_layers,
        backfilled_layers=answer.backfilled_layers,
        confidences=answer.confidences,
        finished=answer.reason.value == "eos",
        rounds=answer.rounds,
        drafted=answer.drafted,
        accepted=answer.accepted,
    )


def engine_decoder(model: SpeakingModel, spec: DecodeSpec) -> Decode:
    """What a DecodeSpec with ``decoder=engine`` is given to make its decoder with."""
    return EngineDecoder(model, spec)
