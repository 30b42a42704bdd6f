"""Batches that the engine really decodes, beside those drawn from records: under ``sync`` the words and depths of a row
change with its mates, and what ``lockstep`` asks (all confident after one layer, without memory) no record tells."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calm.config import BatchRule, DataConfig
from calm.errors import CalmError, DataError
from calm.experiment_config import SlowestRowConfig

from .common import articles_of, say
from .grouping_timed import policy_of
from .recorded import Recorded, read_answers
from .shallow_ways import engine_of
from .suitability import spread

if TYPE_CHECKING:
    from calm.policies import Policy
    from serve.model import ServedModel

RULES = (BatchRule.sync, BatchRule.lockstep)


@dataclass
class Decoded:
    """The recorded model on the first ``n`` recorded articles."""

    config: SlowestRowConfig
    recorded: Recorded

    @property
    def folder(self) -> Path | None:
        """Of the model: that beside the records, else the one they name; None, which is said, without both."""
        named = [self.recorded.folder / "model", Path(self.recorded.summary.get("checkpoint", "model"))]
        found = [each for each in named if (each / "early_exit.json").is_file()]
        if not found:
            say(f"the model of {self.recorded.folder} is not there, so no batch is decoded")
        return found[0] if found else None

    @cached_property
    def model(self) -> "ServedModel":
        from calm.models.folder import load
        from serve.model import served

        assert self.folder is not None
        return served(load(self.folder), folder=self.folder)

    @cached_property
    def sources(self) -> list[str]:
        """Raise DataError where the corpus holds other articles than the records."""
        from calm.models.folder import load

        assert self.folder is not None
        data = self.recorded.summary.get("config", {}).get("data")
        corpus, examples = articles_of(None if data is None else DataConfig.from_values(data), load(self.folder))
        by_id = {each.id: each.source for each in examples}
        wanted = read_answers(self.recorded, "full").ids[: self.config.n]
        lacking = [each for each in wanted if each not in by_id]
        if lacking:
            raise DataError(f"{corpus} has no test article {lacking[0]!r} of the records")
        return [by_id[each] for each in wanted]

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
            found |= spread(key, sums, tokens, self.config)
        return {"rule": rule.value, "decoded": True, "articles": len(answers), **found}
