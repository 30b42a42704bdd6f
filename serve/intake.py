"""What a request may ask for: checked when it is added, so that nothing of it can fail inside a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from calm.config import Measure
from calm.drafting import Draft
from calm.errors import ConfigError, DataError
from calm.layer_schedule import check_monotone
from calm.policies import Confident, Oracle, Policy, Replay, SkipSchedule, fixed_depth

from .model import ServedModel
from .options import RequestOptions

Source = str | Sequence[int]


class Intake:
    """The checks of one model's requests."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    def limit(self, asked: RequestOptions) -> int:
        """Tokens that the answer may have. Raises ConfigError for lengths and stop ids that the model does not have."""
        longest = self.model.max_target
        if (asked.max_tokens or 1) > longest:
            raise ConfigError(f"max_tokens={asked.max_tokens} is above the model's {longest}; give at most {longest}")
        limit = asked.max_tokens or longest
        if asked.min_tokens > limit:
            raise ConfigError(f"min_tokens={asked.min_tokens} is above the {limit} tokens that the answer may have")
        wrong = next((token for token in asked.stop_ids if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise ConfigError(f"stop id {wrong} is none: ids are whole numbers from 0 to {self._vocabulary - 1}")
        return limit

    def check_draft(self, draft: Draft, most: int) -> None:
        """Raise ConfigError for a draft that this model cannot make, or of more than ``most`` words."""
        draft.check_depth(self.model.spec.num_layers)
        draft.check_classifier(self.model.classifier is not None)
        if draft.length > most:
            raise ConfigError(
                f"draft: length {draft.length} is above the {most} words of one round; give at most {most}"
            )

    def check(self, policy: Policy, name: str) -> None:
        """Raise ConfigError for a policy that this model cannot follow for the request ``name``."""
        num_layers = self.model.spec.num_layers
        if isinstance(policy, Oracle):
            raise ConfigError(
                "policy 'oracle' needs every layer of every token, which no engine saves; decode with calm"
            )
        if isinstance(policy, SkipSchedule):
            policy.schedule.check_depth(num_layers)
            check_monotone([policy.schedule.layers(step, num_layers) for step in range(self.model.max_target)])
            return
        for step in range(self.model.max_target if isinstance(policy, Replay) else 1):
            fixed_depth(policy, name, step, num_layers)
        if not isinstance(policy, Confident):
            return
        if policy.measure is Measure.classifier and self.model.classifier is None:
            raise ConfigError(
                "measure 'classifier' needs a trained exit classifier and this model has none; "
                "run python -m train stage=classifier checkpoint=<folder>"
            )
        threshold = policy.schedule.threshold
        if isinstance(threshold, tuple) and len(threshold) != num_layers - 1:
            raise ConfigError(f"{len(threshold)} thresholds for {num_layers} layers; give one or {num_layers - 1}")

    def ids(self, source: Source, truncate: bool = True) -> tuple[int, ...]:
        """Ids of a source. Raises DataError for wrong and too many ids.

        Text is cut to the model's length, or, ``truncate`` being false, refused with a DataError where it is longer.
        """
        if isinstance(source, str):
            read = tuple(self.model.to_ids(source, truncate))
            if not read:
                raise DataError("the text has no tokens: there is nothing to continue; send a longer one")
            return read
        if isinstance(source, bytes) or not isinstance(source, Sequence):
            raise DataError(f"a source is a text or a sequence of ids, got {type(source).__name__}")
        if len(source) > self.model.max_source:
            raise DataError(f"the source has {len(source)} ids, the model takes {self.model.max_source}; shorten it")
        ids = tuple(cast(Sequence[int], source))
        if not ids:
            raise DataError("a source of ids is empty; it needs at least the end-of-sequence id")
        sound = (type(token) is int and 0 <= token < self._vocabulary for token in ids)
        wrong = next((place for place, fits in enumerate(sound) if not fits), None)
        if wrong is not None:  # by place: a number may be too long to be printed
            raise DataError(
                f"the source's id number {wrong} is none of the vocabulary: ids are whole numbers from 0 to "
                f"{self._vocabulary - 1}"
            )
        return ids

    @property
    def _vocabulary(self) -> int:
        return self.model.spec.vocab_size
