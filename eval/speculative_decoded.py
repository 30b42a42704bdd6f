"""Drafts that are decoded: whether their answers are full depth's, by the reference and by the engine."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calm.config import RunnerName
from calm.drafting import Draft
from calm.experiment_config import SpeculativeConfig

from .changed_answers import near_ties, parting
from .common import say
from .speculative_simulated import draft_values
from .trials import Row, Trial

if TYPE_CHECKING:
    from calm.models.speaking import SpeakingModel
    from calm.records import DecodeTrace, Example
    from serve.model import ServedModel

REFERENCE, FP32 = "reference", "fp32"


class Compared:
    """Answers of drafts beside those of full depth, of the reference decoders and of an engine in some numbers.

    Args:
        model: in fp32.
        served: by dtype, the model as an engine has it there.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        model: "SpeakingModel",
        articles: "Sequence[Example]",
        served: "Callable[[str], ServedModel]",
    ) -> None:
        self.config, self.model, self.articles, self.served = config, model, articles, served
        self._full: dict[str, list[DecodeTrace]] = {}
        self._runner: RunnerName | None = None  # of the engine that was asked last

    def trials(self, drafts: Sequence[Draft], dtypes: Sequence[str]) -> list[Trial]:
        """One a draft and decoder; ``dtypes`` are the engine's."""
        ways = [(REFERENCE, FP32), *(("engine", dtype) for dtype in dtypes)]
        return [
            Trial(
                {"kind": "decoded", "decoder": decoder, "dtype": dtype, **draft_values(draft)},
                lambda d=draft, by=decoder, kind=dtype: [self.row(d, by, kind)],  # type: ignore[misc]
                label=f"{decoder} {dtype} {draft_values(draft)['way']}",
            )
            for decoder, dtype in ways
            for draft in drafts
        ]

    def row(self, draft: Draft, decoder: str, dtype: str) -> Row:
        """What was drafted, and how many answers differ from full depth's; those that fp32's last bits do not explain
        are ``unexplained`` (calm/near_ties.py). Of the native runner, whose rounds have the bits of steps, all are; of
        torch in coarser numbers nobody can tell.
        """
        from calm.metrics import with_ratio
        from calm.models.causal import CausalModel
        from calm.policies import Full

        key = f"{decoder} {dtype}"
        if key not in self._full:
            self._full[key] = self.decoded(None, decoder, dtype)
        full, traces = self._full[key], self.decoded(draft, decoder, dtype)
        changed = parting(traces, full)
        for number, step in changed.items():
            say(f"{key}, {draft_values(draft)['way']}: {traces[number].id} differs from full depth at token {step + 1}")
        tied = near_ties(self.model, self.articles, Full(), changed) if dtype == FP32 else None
        bits = decoder != REFERENCE and self._runner is RunnerName.native
        unexplained = len(changed) if bits else None if tied is None else len(changed) - tied
        counts = {name: np.array([getattr(t, name) for t in traces]) for name in ("rounds", "drafted", "accepted")}
        tokens = np.array([len(trace.tokens) for trace in traces])
        row: Row = {"articles": len(traces), "tokens": int(tokens.sum()), "changed": len(changed)}
        row |= {"near_ties": tied, "unexplained": unexplained}
        row |= {name: int(values.sum()) for name, values in counts.items()}
        again = (self.config.seed, self.config.bootstrap)
        row |= dict.fromkeys(("acceptance", "acceptance_low", "acceptance_high"))
        if row["drafted"]:
            row |= with_ratio("acceptance", counts["accepted"], counts["drafted"], *again)
        drafted = tokens - int(isinstance(self.model, CausalModel))  # its first words are the prompts'
        return row | with_ratio("words_a_round", drafted, counts["rounds"], *again)

    def decoded(self, draft: Draft | None, decoder: str, dtype: str) -> "list[DecodeTrace]":
        """Answers to all articles; without a draft those of full depth."""
        from calm.decode_batch import BatchDecoder
        from calm.policies import Full
        from calm.speculative import SpeculativeBatch

        from .shallow_ways import engine_of

        size = self.config.batch_size
        if decoder == REFERENCE:
            if draft is None:
                return BatchDecoder(self.model, batch_size=size)(self.articles, Full())
            return SpeculativeBatch(self.model, draft, batch_size=size)(self.articles)
        from serve.decoder import trace_of

        engine = engine_of(self.served(dtype), self.config.rule, dtype, size, len(self.articles))
        self._runner = engine.runner_name
        asked = {"policy": Full()} if draft is None else {"draft": draft}
        names = [each.id for each in self.articles]
        return [trace_of(each) for each in engine.generate([a.source for a in self.articles], names=names, **asked)]
