"""The expensive pass: decode every article at every threshold, from 1.0 down, once, and keep what was decoded.

Traces are cached on disk in chunks and keyed by everything that decides them; a run that was interrupted goes on at
the next chunk and ends with bitwise the same numbers. A row whose decisions a smaller threshold leaves alone keeps
its trace (calm/calibration/reuse.py).
"""

import hashlib
import io
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import write_atomic
from ..policies import Policy
from ..records import DecodeTrace, Example
from .consistency import check_rows
from .grid import Threshold
from .identity import code_version
from .reuse import changed_rows

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[Example], Policy], list[DecodeTrace]]
Progress = Callable[[str, int, int], None]  # what, rows done, rows in all
CHUNK_BATCHES = 8  # rows per cached chunk, in batches: large enough to fill batches, small enough to lose
_PER_TOKEN = ("tokens", "crossing_layers", "emission_layers", "executed_layers", "backfilled_layers")


def pack_traces(traces: Sequence[DecodeTrace]) -> bytes:
    """Traces as a sha256 and an npz without pickle; confidences as float32, which is how they are computed."""
    text = json.dumps([[trace.id, trace.text, len(trace.tokens), trace.finished] for trace in traces])
    arrays: dict[str, Any] = {"rows": np.frombuffer(text.encode(), dtype=np.uint8)}
    for name in _PER_TOKEN:
        arrays[name] = np.array([value for trace in traces for value in getattr(trace, name)], dtype=np.int32)
    steps = [step for trace in traces for step in trace.confidences]
    arrays["confidences"] = np.array(steps, dtype=np.float32)  # (all tokens, L), or empty where not recorded
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    data = buffer.getvalue()
    return hashlib.sha256(data).digest() + data


def unpack_traces(packed: bytes) -> list[DecodeTrace]:
    """Inverse of ``pack_traces``; ValueError where the bytes are damaged."""
    digest, data = packed[:32], packed[32:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("sha256 mismatch")
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        rows = json.loads(archive["rows"].tobytes().decode())
        columns = {name: archive[name].tolist() for name in _PER_TOKEN}
        confidences = [tuple(step) for step in archive["confidences"].tolist()]
    traces = []
    start = 0
    for name, text, length, finished in rows:
        here = slice(start, start + length)
        per_token: dict[str, Any] = {column: tuple(values[here]) for column, values in columns.items()}
        traces.append(
            DecodeTrace(id=name, text=text, finished=finished, confidences=tuple(confidences[here]), **per_token)
        )
        start += length
    return traces


class TraceCache:
    """Chunks of traces under one folder, valid for one ``key``; those of another key are deleted, with a warning."""

    def __init__(self, folder: str | Path, key: Mapping[str, Any], chunk_rows: int) -> None:
        self.folder = Path(folder)
        self.chunk_rows = chunk_rows
        wanted = json.loads(json.dumps({**key, "chunk_rows": chunk_rows}))
        path = self.folder / "key.json"
        found = _read_key(path)
        if found is not None and found != wanted:
            changed = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            logger.warning("%s was decoded with another %s: rejected, decoding anew", self.folder, ", ".join(changed))
            shutil.rmtree(self.folder)
        if found != wanted:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(wanted, indent=1) + "\n")

    def decode(
        self, decode: Decode, examples: Sequence[Example], policy: Policy, name: str, progress: Progress | None = None
    ) -> list[DecodeTrace]:
        """Traces of ``examples``, from the cache where a chunk of exactly these rows is there."""
        traces: list[DecodeTrace] = []
        for start in range(0, len(examples), self.chunk_rows):
            chunk = examples[start : start + self.chunk_rows]
            if progress is not None:
                progress(name, start, len(examples))
            traces.extend(self._chunk(decode, chunk, policy, self.folder / f"{name}.{start:06d}.traces"))
        if progress is not None:
            progress(name, len(examples), len(examples))
        return traces

    def _chunk(self, decode: Decode, chunk: Sequence[Example], policy: Policy, path: Path) -> list[DecodeTrace]:
        ids = [example.id for example in chunk]
        if path.is_file():
            try:
                traces = unpack_traces(path.read_bytes())
            except (ValueError, OSError) as error:
                logger.warning("%s is damaged (%s): decoding its rows anew", path, error)
            else:
                if [trace.id for trace in traces] == ids:
                    return traces
                logger.warning("%s holds other rows: decoding anew", path)
        traces = decode(chunk, policy)
        check_rows(traces, chunk, path.stem)
        data = pack_traces(traces)
        write_atomic(path, data)
        return unpack_traces(data)  # what a resumed run will read, to the last bit


def _read_key(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def step_down(
    cache: TraceCache,
    decode: Decode,
    examples: Sequence[Example],
    policy: Any,
    previous: Sequence[DecodeTrace],
    exits: tuple[Sequence[int], int],
    name: str,
    progress: Progress | None = None,
) -> list[DecodeTrace]:
    """Traces at a Confident ``policy``, given those at a less aggressive threshold; only changed rows are decoded.

    Args:
        exits: (exit_layers, num_layers) of the model.
    """
    changed = changed_rows(previous, policy.schedule, *exits)
    fresh = cache.decode(decode, [examples[row] for row in changed], policy, name, progress)
    traces = list(previous)
    for row, trace in zip(changed, fresh, strict=True):
        traces[row] = trace
    return traces


def walk_grid(
    cache: TraceCache,
    decode: Decode,
    examples: Sequence[Example],
    make_policy: Callable[[Threshold], Any],
    grid: Sequence[Threshold],
    full: Sequence[DecodeTrace],
    exits: tuple[Sequence[int], int],
    progress: Progress | None = None,
) -> Iterator[tuple[int, list[DecodeTrace]]]:
    """(index, traces) for every threshold after the first, in order; the caller stops when it has seen enough."""
    previous: Sequence[DecodeTrace] = full
    for index, threshold in enumerate(grid[1:], start=1):
        policy = make_policy(threshold)
        traces = step_down(cache, decode, examples, policy, previous, exits, f"threshold-{index:03d}", progress)
        yield index, traces
        previous = traces


class RiskTable:
    """Articles by thresholds: loss, depth and tokens of each; grows threshold by threshold, saved as Parquet."""

    def __init__(self, ids: Sequence[str], grid: Sequence[Threshold], num_layers: int) -> None:
        self.ids = list(ids)
        self.grid = list(grid)
        self.num_layers = num_layers
        self.losses: list[NDArray[np.float64]] = []
        self._layers: list[list[int]] = []
        self._tokens: list[list[int]] = []
        self._exits: list[NDArray[np.int64]] = []

    def add(self, losses: NDArray[np.float64], traces: Sequence[DecodeTrace]) -> None:
        """The next threshold's losses and traces, rows in the order of ``ids``."""
        self.losses.append(losses)
        self._layers.append([sum(trace.emission_layers) for trace in traces])
        self._tokens.append([len(trace.tokens) for trace in traces])
        exits = [layer for trace in traces for layer in trace.emission_layers]
        self._exits.append(np.bincount(exits, minlength=self.num_layers + 1)[1:])

    @property
    def mean_losses(self) -> list[float]:
        return [float(losses.mean()) for losses in self.losses]

    @property
    def layers_skipped(self) -> list[float]:
        """1 - mean emission layer / L over all emitted tokens, per threshold; 0 where nothing was emitted."""
        pairs = ((sum(layers), sum(tokens)) for layers, tokens in zip(self._layers, self._tokens, strict=True))
        return [1.0 - layers / tokens / self.num_layers if tokens else 0.0 for layers, tokens in pairs]

    @property
    def article_skips(self) -> list[tuple[float, float]]:
        """Per threshold, mean and standard deviation over articles of an article's own share of layers skipped."""
        found = []
        for layers, tokens in zip(self._layers, self._tokens, strict=True):
            shares = [1.0 - a / b / self.num_layers for a, b in zip(layers, tokens, strict=True) if b] or [0.0]
            found.append((float(np.mean(shares)), float(np.std(shares))))
        return found

    @property
    def exit_shares(self) -> list[tuple[float, ...]]:
        """Per threshold, the share of tokens by emission layer 1..L; 0 everywhere where nothing was emitted."""
        return [tuple(float(share) for share in exits / max(1, exits.sum())) for exits in self._exits]

    def save(self, path: str | Path) -> None:
        """One row per article and threshold: id, index, threshold, loss, emission_layers (their sum), tokens."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        decoded, n = len(self.losses), len(self.ids)
        table = pa.table(
            {
                "id": self.ids * decoded,
                "index": np.repeat(np.arange(decoded), n),
                "threshold": [json.dumps(self.grid[k]) for k in range(decoded) for _ in range(n)],
                "loss": np.concatenate(self.losses),
                "emission_layers": np.concatenate(self._layers),
                "tokens": np.concatenate(self._tokens),
            }
        )
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        write_atomic(path, buffer.getvalue())


def cache_key(identity: Mapping[str, Any], examples_hash: str, **rest: Any) -> dict[str, Any]:
    """The key of a TraceCache; ``rest`` names the policy. One level deep, so that a rejection can name what changed."""
    return {**identity, "rows": examples_hash, "code": code_version(), **rest}
