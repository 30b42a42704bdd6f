"""Batches that the engine really decodes, beside those drawn from records: under ``sync`` the words and depths of a row
change with its mates, and what ``lockstep`` asks (all confident after one layer, without memory) no record tells."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from calm.config import BatchRule
from calm.errors import CalmError
from calm.experiment_config import SlowestRowConfig
from calm.metrics import with_ratio

from .recorded import Recorded, policy_of, recorded_articles
from .shallow_ways import engine_of

if TYPE_CHECKING:
    from calm.models.speaking import SpeakingModel
    from calm.policies import Policy
    from serve.model import ServedModel

RULES = (BatchRule.sync, BatchRule.lockstep)


@dataclass
class Decoded:
    """The recorded model on the first ``n`` recorded articles."""

    config: SlowestRowConfig
    recorded: Recorded

    @cached_property
    def _loaded(self) -> "SpeakingModel":
        from calm.models.folder import load

        assert self.recorded.model_folder is not None
        return load(self.recorded.model_folder)

    @cached_property
    def model(self) -> "ServedModel":
        from serve.model import served

        return served(self._loaded, folder=self.recorded.model_folder)

    @cached_property
    def sources(self) -> list[str]:
        """Raise DataError where the corpus lacks one of the recorded articles."""
        _, articles = recorded_articles(self.recorded, self._loaded)
        return [each.source for each in articles[: self.config.n]]

    def policy(self, name: str) -> "Policy":
        entry = next(row for row in self.recorded.summary["table1"] if row["row"] == name)
        return policy_of(entry, self.model.max_target)

    def row(self, name: str, batch: int, rule: BatchRule) -> dict[str, Any]:
        """Batches that begin together, one after the other: means over tokens, intervals over articles.

        Raises:
            CalmError: there are fewer articles than a batch has rows, or an answer failed.
        """
        if len(self.sources) < batch:
            raise CalmError(f"a batch of {batch} needs {batch} articles of {len(self.sources)}")
        engine, policy = engine_of(self.model, rule, "fp32", batch, batch), self.policy(name)
        answers = []
        for begin in range(0, len(self.sources) - batch + 1, batch):
            answers += engine.generate(self.sources[begin : begin + batch], policy=policy)
        failed = next((each for each in answers if each.error), None)
        if failed is not None:
            raise CalmError(f"{failed.id}: {failed.error}")
        tokens = np.array([len(each.tokens) for each in answers])
        last, found = self.recorded.num_layers, dict[str, Any]()
        layers = np.array([sum(each.emission_layers) for each in answers])
        early = np.array([sum(layer < last for layer in each.emission_layers) for each in answers])
        for key, sums in (("layers", layers), ("stops_early", early)):
            found |= with_ratio(key, sums, tokens, self.config.seed, self.config.bootstrap)
        return {"rule": rule.value, "decoded": True, "articles": len(answers), **found}
