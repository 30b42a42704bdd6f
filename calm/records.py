"""The nouns that cross borders: Example, DecodeTrace, RunRecord.

They know no model, no file format and no library but the standard one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a corpus: the source text, its reference and the family that keeps splits apart."""

    id: str
    family: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class DecodeTrace:
    """What one row did: its tokens and, per token, the layers of design.md section 3.

    All per-token sequences have the length of ``tokens``. Layers are counts, 1..L.

    Attributes:
        id: id of the Example.
        tokens: emitted ids, EOS included when it was emitted, never the start token.
        text: ``tokens`` decoded without special tokens.
        crossing_layers: first checked layer with confidence >= threshold, else L.
        emission_layers: layer whose hidden gave the token (= exit layer).
        executed_layers: layers that ran with the row in them.
        backfilled_layers: layers whose K and V were projected from the exit hidden.
        confidences: per token the confidence after every layer 1..L; NaN where it was not computed.
        finished: True when EOS was emitted, False when the row ended at N tokens.
        rounds, drafted, accepted: of speculative decoding, over the answer: passes of the upper layers, words that the
            lower ones drafted, and those of them that the full model said too.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    crossing_layers: tuple[int, ...]
    emission_layers: tuple[int, ...]
    executed_layers: tuple[int, ...]
    backfilled_layers: tuple[int, ...]
    confidences: tuple[tuple[float, ...], ...] = ()
    finished: bool = True
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        lengths = {
            len(self.tokens),
            len(self.crossing_layers),
            len(self.emission_layers),
            len(self.executed_layers),
            len(self.backfilled_layers),
        }
        if len(lengths) != 1:
            raise ValueError(f"trace {self.id!r}: per-token sequences differ in length: {sorted(lengths)}")

    @property
    def own_layers(self) -> tuple[int, ...]:
        """Layers that gave each token: up to its emission, less those that a schedule passed over.

        Layers that ran for a row's mates, or ahead for an oracle, lie above its emission and do not count.
        """
        return tuple(map(min, self.emission_layers, self.executed_layers))


def mean_layers(traces: Sequence[DecodeTrace]) -> float:
    """Mean of the layers that gave a token, over all emitted tokens (EOS included) of all traces; NaN without tokens.

    That is the mean emission layer, unless a schedule left out layers below it.
    """
    layers = [layer for trace in traces for layer in trace.own_layers]
    return sum(layers) / len(layers) if layers else float("nan")


def layers_skipped(traces: Sequence[DecodeTrace], num_layers: int) -> float:
    """1 - mean_layers/L over emitted tokens, EOS included: mean(emission_layer)/L wherever exits leave out the rest."""
    return 1.0 - mean_layers(traces) / num_layers


def layers_not_run(traces: Sequence[DecodeTrace], num_layers: int) -> float:
    """1 - mean(executed_layers)/L over emitted tokens, EOS included."""
    layers = [layer for trace in traces for layer in trace.executed_layers]
    return 1.0 - sum(layers) / len(layers) / num_layers if layers else float("nan")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Where a number comes from: the program, its resolved settings and the machine."""

    program: str
    config: dict[str, Any]
    environment: dict[str, Any]
    started: str
    wall_s: float
    argv: list[str] = field(default_factory=list)
