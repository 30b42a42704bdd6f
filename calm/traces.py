"""Exit depths to time an engine by where no weights say them: drawn per token, independent over rows and steps.

Three kinds of one mean, and a constant. ``tight``: 2 + Binomial(L - 2, p). ``wide``: geometric, cut to 2..L.
``measured``: what a measure was recorded to do. ``static``: the same depth for every token. An engine replays them
(calm.policies.Replay) and computes the measure beside them, so that a replay costs what the measure would have cost.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .config import Measure, TraceKind
from .errors import ConfigError, DataError
from .papers import given_thresholds, paper_row
from .policies import Replay

LOWEST = 2  # of the drawn kinds: no measure speaks before it has seen two layers
PAPER_CORPUS, PAPER_MODEL = "cnn_dailymail", "t5-v1_1-small"


@dataclass(frozen=True)
class Traces:
    """Depths of many requests.

    Attributes:
        num_layers: L of the model they are for.
        wanted: mean depth that was asked for; of a recording, its own.
        parameter: p of the binomial, ratio of neighbours' probabilities of the geometric; 0 of the other kinds.
        depths: per request the depth of each of its tokens, 1..L.
        source: of a recording: its file and row.
    """

    kind: TraceKind
    num_layers: int
    wanted: float
    parameter: float
    seed: int
    depths: tuple[tuple[int, ...], ...]
    source: str = ""

    def __post_init__(self) -> None:
        for row in self.depths:
            for depth in row:
                if not 1 <= depth <= self.num_layers:
                    raise ConfigError(f"trace: depth {depth} lies outside 1..{self.num_layers}")

    def mean(self, first: int = 0, last: int | None = None, rows: int | None = None) -> float:
        """Of the tokens ``first`` to ``last`` (excluded) of the first ``rows`` requests."""
        picked = [depth for row in self.depths[:rows] for depth in row[first:last]]
        if not picked:
            raise ConfigError(f"the traces have no token from {first} to {last}")
        return sum(picked) / len(picked)

    def replay(self, names: Sequence[str], measure: Measure | None) -> Replay:
        """The policy under which these requests do as recorded, and pay for the measure."""
        if len(names) > len(self.depths):
            raise ConfigError(f"{len(names)} requests, but traces of {len(self.depths)}; draw more rows")
        return Replay(dict(zip(names, self.depths, strict=False)), measure)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "kind": self.kind.value})

    @classmethod
    def from_json(cls, text: str) -> "Traces":
        """Raise DataError where ``text`` is none."""
        try:
            values: dict[str, Any] = json.loads(text)
            depths = tuple(tuple(int(depth) for depth in row) for row in values.pop("depths"))
            return cls(kind=TraceKind(values.pop("kind")), depths=depths, **values)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise DataError(f"these are no traces ({type(error).__name__}: {error}); draw them anew") from None


def draw(kind: TraceKind, num_layers: int, mean: int | float, rows: int, steps: int, seed: int) -> Traces:
    """Depths of ``rows`` requests of ``steps`` tokens; any two of them are independent.

    Args:
        mean: expected depth; of ``static`` the depth itself.

    Raises:
        ConfigError: a mean that the kind cannot have, or the kind ``measured``, which is read and not drawn.
    """
    if rows < 1 or steps < 1:
        raise ConfigError(f"traces need at least one row and one step, got {rows} and {steps}")
    if kind is TraceKind.static:
        return static(num_layers, mean, rows, steps, seed)
    if kind is TraceKind.measured:
        raise ConfigError("measured traces are read from a records.parquet, not drawn")
    if not LOWEST < mean < num_layers:  # NaN neither
        raise ConfigError(
            f"{kind.value} traces of mean depth {mean:g}: it must lie between {LOWEST} and {num_layers}, the model's "
            "layers; choose another mean or trace"
        )
    generator = np.random.default_rng(seed)
    if kind is TraceKind.tight:
        parameter = (mean - LOWEST) / (num_layers - LOWEST)
        drawn = LOWEST + generator.binomial(num_layers - LOWEST, parameter, (rows, steps))
    else:
        parameter = geometric_ratio(num_layers, mean)
        drawn = generator.choice(np.arange(LOWEST, num_layers + 1), (rows, steps), p=_geometric(num_layers, parameter))
    return Traces(kind, num_layers, float(mean), float(parameter), seed, _as_tuples(drawn))


def static(num_layers: int, depth: int | float, rows: int, steps: int, seed: int = 0) -> Traces:
    """The same depth everywhere. Raises ConfigError unless it is a whole one of 1..L."""
    if depth != int(depth) or not 1 <= depth <= num_layers:
        raise ConfigError(f"a static depth must be one of 1..{num_layers}, got {depth:g}")
    row = (int(depth),) * steps
    return Traces(TraceKind.static, num_layers, float(depth), 0.0, seed, (row,) * rows)


def measured(records: Path, row: str, num_layers: int, rows: int, steps: int, seed: int) -> Traces:
    """Depths at which a row of Table 1 crossed, from the ``records.parquet`` of eval.table1.

    Each request goes through recorded answers in an order of its own, one after the other, until it has its tokens.

    Raises:
        DataError: no such file, row or crossing in it, or recorded on a model of another depth.
    """
    import pyarrow.parquet as pq

    columns = ["row", "crossing_layers", "emission_layers", "backfilled_layers"]
    try:
        table = pq.read_table(records, columns=columns).to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{records} cannot be read as records of eval.table1: {error}") from None
    there = sorted({str(each["row"]) for each in table})
    answers = [each for each in table if each["row"] == row and each["crossing_layers"]]
    if not answers:
        raise DataError(f"{records} has no layers of a row {row!r}; it has {', '.join(there)}")
    layers = {
        a + b for each in answers for a, b in zip(each["emission_layers"], each["backfilled_layers"], strict=True)
    }
    if layers != {num_layers}:
        raise DataError(
            f"{records} was recorded on a model of {max(layers)} decoder layers, and these traces are for one of "
            f"{num_layers}; choose trace tight or wide, or that model's records"
        )
    recorded = [each["crossing_layers"] for each in answers]
    generator = np.random.default_rng(seed)
    strung = []
    for _ in range(rows):
        picked: list[int] = []
        while len(picked) < steps:
            picked += recorded[int(generator.integers(len(recorded)))]
        strung.append(tuple(picked[:steps]))
    mean = sum(map(sum, recorded)) / sum(map(len, recorded))
    return Traces(TraceKind.measured, num_layers, mean, 0.0, seed, tuple(strung), f"{records.name}:{row}")


def table1_depth(model: str, measure: Measure, num_layers: int) -> float:
    """Mean depth of a measure in Table 1 of arXiv 2407.20272, by its share of layers skipped.

    Args:
        model: as the paper names it; the shares of T5-small serve any other.

    Raises:
        ConfigError: the paper did not run the measure.
    """
    for name in (model, PAPER_MODEL):
        threshold = given_thresholds(PAPER_CORPUS, name).get(measure.value)
        row = paper_row(PAPER_CORPUS, name, measure.value, threshold=threshold)
        if row is not None and row.layers_skipped is not None:
            return (1.0 - row.layers_skipped) * num_layers
    raise ConfigError(f"the paper's Table 1 has no row of {measure.value}; choose softmax, state or classifier")


def geometric_ratio(num_layers: int, mean: int | float) -> float:
    """Ratio of neighbouring probabilities of the geometric distribution on 2..L with this mean; 1 is uniform."""
    low, high = 0.0, 1.0
    while _geometric_mean(num_layers, high) < mean:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if _geometric_mean(num_layers, middle) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _geometric(num_layers: int, ratio: float) -> Any:
    """Probabilities of the depths 2..L."""
    steps = np.arange(num_layers - LOWEST + 1)
    logs = steps * math.log(ratio) if ratio > 0 else np.where(steps == 0, 0.0, -np.inf)
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


def _geometric_mean(num_layers: int, ratio: float) -> float:
    return float(_geometric(num_layers, ratio) @ np.arange(LOWEST, num_layers + 1))


def _as_tuples(drawn: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(depth) for depth in row) for row in drawn)
