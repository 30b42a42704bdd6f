"""A decoder without a model: what it emits and how sure it is are hashes of the row's own history.

Deeper layers are surer and more often right; a wrong token or an early exit changes all confidences that follow, as
backfilled caches do. Equal inputs give equal traces, whatever the batch.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from calm.calibration import ModelIdentity
from calm.config import Measure
from calm.policies import Confident, Full, Policy
from calm.records import DecodeTrace, Example

WORDS = "copper linen marble quartz velvet timber basalt cotton walnut pewter saffron indigo".split()
EOS, FIRST_WORD, LAYERS, LENGTH = 1, 10, 6, 8
_DECODED: dict[object, DecodeTrace] = {}  # many tests decode the same rows with the same policy


def make_examples(count: int, name: str) -> list[Example]:
    return [
        Example(f"{name}-{i}", f"family-{name}-{i}", f"source {name} {i}", " ".join(_words(f"{name}-{i}")))
        for i in range(count)
    ]


def _words(row: str) -> list[str]:
    generator = random.Random(row)
    return [generator.choice(WORDS) for _ in range(generator.randint(3, LENGTH - 1))]


IDENTITY = ModelIdentity(
    model="a" * 64,
    tokenizer="b" * 64,
    dtype="float32",
    exit_layers=tuple(range(1, LAYERS)),
    num_layers=LAYERS,
    max_target_tokens=LENGTH,
    max_source_tokens=16,
)


@cache
def _thresholds(policy: Confident) -> list[list[float]]:
    """Per step and layer 1..L-1; infinite where exits are off."""
    if policy.schedule.exits_off:
        return [[float("inf")] * LAYERS] * LENGTH
    return [[policy.schedule.at(step, layer) for layer in range(1, LAYERS)] for step in range(LENGTH)]


class FakeDecoder:
    """Callable as the real ones are, with confidences recorded: NaN where none is asked, as at full depth.

    Args:
        skill: how much more often a sure layer is right; 0 is a model whose early layers are always wrong.
        stop_after: raise KeyboardInterrupt instead of the call after so many, as Ctrl-C would.
        watch: called before every decode.
        certainty: None, or one number that every confidence equals.
    """

    def __init__(
        self,
        skill: float = 1.0,
        stop_after: int | None = None,
        watch: Callable[[Sequence[Example], Policy], None] | None = None,
        certainty: float | None = None,
        exit_layers: Sequence[int] = IDENTITY.exit_layers,
    ) -> None:
        self.skill = skill
        self.stop_after = stop_after
        self.watch = watch
        self.certainty = certainty
        self.exit_layers = exit_layers
        self.calls: list[tuple[tuple[str, ...], Policy]] = []

    @property
    def rows(self) -> int:
        return sum(len(ids) for ids, _ in self.calls)

    def __call__(self, examples: Sequence[Example], policy: Policy) -> list[DecodeTrace]:
        if self.watch is not None:
            self.watch(examples, policy)
        if self.stop_after is not None and len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((tuple(example.id for example in examples), policy))
        return [self._decode(example, policy) for example in examples]

    def _decode(self, example: Example, policy: Policy) -> DecodeTrace:
        key = (example.id, policy, self.skill, self.certainty, tuple(self.exit_layers))
        if key not in _DECODED:
            _DECODED[key] = self._climb(example, policy)
        return _DECODED[key]

    def _climb(self, example: Example, policy: Policy) -> DecodeTrace:
        tokens: list[int] = []
        layers: list[int] = []
        confidences: list[tuple[float, ...]] = []
        answer = [FIRST_WORD + WORDS.index(word) for word in _words(example.id)] + [EOS]
        for step, right in enumerate(answer):
            seen, layer, said = self._step(f"{example.id}/{tokens}/{layers}", step, right, policy)
            confidences.append(seen)
            layers.append(layer)
            tokens.append(said)
        text = " ".join(WORDS[token - FIRST_WORD] for token in tokens if token >= FIRST_WORD)
        crossing = tuple(layers)
        below = tuple(LAYERS - layer for layer in layers)
        return DecodeTrace(example.id, tuple(tokens), text, crossing, crossing, crossing, below, tuple(confidences))

    def _step(self, history: str, step: int, right: int, policy: Policy) -> tuple[tuple[float, ...], int, int]:
        seen = [float("nan")] * LAYERS
        generator = random.Random(history)
        ease = generator.random()
        for layer in range(1, LAYERS):
            confidence, correct = self._layer(generator, layer, ease)
            if not isinstance(policy, Confident) or layer not in self.exit_layers:
                continue
            if policy.measure is Measure.state and layer == 1:
                continue
            if policy.measure is Measure.classifier:
                confidence = float(np.float32(confidence * 0.5 + 0.5 * generator.random()))
            seen[layer - 1] = confidence
            if confidence >= _thresholds(policy)[step][layer - 1]:
                wrong = FIRST_WORD + (right - FIRST_WORD + 1) % len(WORDS)
                return tuple(seen), layer, right if correct or right == EOS else wrong
        assert isinstance(policy, Full | Confident)
        return tuple(seen), LAYERS, right

    def _layer(self, generator: random.Random, layer: int, ease: float) -> tuple[float, bool]:
        sure = min(1.0, max(0.0, 0.25 * layer / LAYERS + 0.9 * ease + 0.15 * generator.random()))
        confidence = sure if self.certainty is None else self.certainty
        return float(np.float32(confidence)), generator.random() < self.skill * sure**0.25
