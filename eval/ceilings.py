"""What this machine can do at most, and how near a decode step comes to it.

The machine: how fast one thread reads memory and the last-level cache, and how fast products are. The step: the bytes
and multiply-accumulates that it cannot do without. A step that reads weights from memory cannot be faster than its
bytes by the memory's rate; a small model's int8 weights may stay in the cache, whose rate is another. So both floors
are told, and which of them counts: what fits into the cache and what does not.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.config import Head, Measure

if TYPE_CHECKING:
    from calm.models.base import DecoderSpec
    from serve.engine import Engine

MEMORY_BYTES = 1 << 29
CACHE_GUESS = 32 << 20  # of a machine that does not say
WIDTHS = {"fp32": 4, "bf16": 2, "int8": 1}
PRODUCT = (1024, 4096)  # inputs, outputs: in bf16 small enough for the cache
PRODUCT_ROWS = (1, 8, 32, 256)
Now = Callable[[], float]


@dataclass(frozen=True)
class Ceilings:
    """Rates of this machine, or of its device.

    Attributes:
        memory, cache: bytes a second read from memory and from the last-level cache.
        cache_bytes: its size.
        macs: multiply-accumulates a second by arithmetic and rows; what torch or the runner cannot do is left out.
        threads: of the products; the bytes were read by as many. Of a GPU: 1.
    """

    memory: float
    cache: float
    cache_bytes: int
    macs: Mapping[str, Mapping[int, float]]
    threads: int

    def fastest(self, arithmetic: str) -> float | None:
        """The best rate of an arithmetic by whoever was measured; None where nobody was."""
        rates = [rate for name, rows in self.macs.items() if name.split()[0] == arithmetic for rate in rows.values()]
        return max(rates, default=None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Ceilings":
        """What ``to_json`` gave, after it was a file: its rows are numbers again."""
        macs = {name: {int(rows): rate for rows, rate in rates.items()} for name, rates in values["macs"].items()}
        return cls(**{**values, "macs": macs})


def probe(
    repeats: int = 5, memory_bytes: int = MEMORY_BYTES, now: Now = time.perf_counter, device: str = "cpu"
) -> Ceilings:
    """Measure this machine: some seconds. The best of ``repeats`` counts, for a ceiling is what nothing disturbs."""
    import torch

    on_gpu = device != "cpu"
    size = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else cache_bytes()
    with torch.inference_mode():
        return Ceilings(
            memory=reading_rate(
                max(memory_bytes, 8 * size) if memory_bytes == MEMORY_BYTES else memory_bytes, repeats, now, device
            ),
            cache=reading_rate(size // 4, 4 * repeats, now, device),
            cache_bytes=size,
            macs=product_rates(repeats, now, device),
            threads=1 if on_gpu else torch.get_num_threads(),
        )


def reading_rate(size: int, repeats: int, now: Now = time.perf_counter, device: str = "cpu") -> float:
    """Bytes a second of the fastest pass over a buffer of ``size`` bytes; the first pass only brings it in."""
    import torch

    buffer = torch.ones(size // 4, device=device)
    best = min(_best(_done(kind, device), repeats, now) for kind in (buffer.sum, buffer.amax)) / _times(device)
    return buffer.numel() * 4 / best


def product_rates(repeats: int, now: Now = time.perf_counter, device: str = "cpu") -> dict[str, dict[int, float]]:
    """Multiply-accumulates a second of torch's products, by arithmetic and rows."""
    import torch

    inputs, outputs = PRODUCT
    rates: dict[str, dict[int, float]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.int8)):
        for rows in PRODUCT_ROWS:
            left = torch.ones((rows, inputs), device=device).to(dtype)
            right = torch.ones((outputs, inputs), device=device).to(dtype).t()
            product = torch._int_mm if dtype is torch.int8 else torch.mm
            try:
                seconds = _best(_done(lambda: product(left, right), device), repeats, now) / _times(device)  # noqa: B023
            except (RuntimeError, NotImplementedError):  # this torch has no such product, or not of so few rows
                continue
            rates.setdefault(name, {})[rows] = rows * inputs * outputs / seconds
    return rates


def packed_rates(
    engine: "Engine", rows: Sequence[int], repeats: int = 5, now: Now = time.perf_counter
) -> dict[int, float]:
    """Of the native runner's own packed product, by rows: the head of this engine's model."""
    spec = engine.model.spec
    rates = {}
    for count in rows:
        if count <= engine.options.max_batch:
            seconds = _best(lambda: engine.machine.logits(list(range(count))), repeats, now)  # noqa: B023
            rates[count] = count * spec.d_model * spec.vocab_size / seconds
    return rates


def _times(device: str) -> int:
    """Calls between two readings of the clock: a device is told of many before it is waited for."""
    return 1 if device == "cpu" else 20


def _done(run: Callable[[], object], device: str) -> Callable[[], object]:
    """The calls, and the wait until the device is through with them: one graph, for each takes less than its launch."""
    if device == "cpu":
        return run
    import torch

    run()  # what cannot be done raises here, not in the capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_times(device)):
            run()

    def through() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return through


def _best(run: Callable[[], object], repeats: int, now: Now) -> float:
    run()
    best = float("inf")
    for _ in range(repeats):
        began = now()
        run()
        best = min(best, now() - began)
    return max(best, 1e-9)


def cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the last-level cache."""
    found: list[tuple[int, int]] = []
    for folder in root.glob("index*"):
        try:
            if (folder / "type").read_text().strip() == "Instruction":
                continue
            text = (folder / "size").read_text().strip()
            unit = {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)
            found.append((int((folder / "level").read_text()), int(text.rstrip("KMG")) << unit))
        except (OSError, ValueError, IndexError):
            continue
    return max(found)[1] if found else CACHE_GUESS


@dataclass(frozen=True)
class Sizes:
    """Bytes of weights that are read at once: a whole layer, the head, K and V of one layer's backfill."""

    layer: int
    head: int
    kv: int

    @classmethod
    def of(cls, spec: "DecoderSpec", arithmetic: str) -> "Sizes":
        """As they are without packing."""
        from calm.cost import backfill_work, head_work, layer_work

        width = WIDTHS[arithmetic]
        works = (layer_work(spec, width=width), head_work(spec, width), backfill_work(spec, width))
        return cls(*(work.weight_bytes for work in works))


@dataclass(frozen=True)
class Need:
    """What a step cannot do without: bytes of weights, of rows' K and V, and multiply-accumulates."""

    weights: float = 0.0
    rows: float = 0.0
    macs: float = 0.0

    @property
    def bytes(self) -> float:  # noqa: A003
        return self.weights + self.rows

    def __add__(self, other: "Need") -> "Need":
        return Need(self.weights + other.weights, self.rows + other.rows, self.macs + other.macs)

    def over(self, count: int) -> "Need":
        return Need(self.weights / count, self.rows / count, self.macs / count)


def step_need(
    spec: "DecoderSpec",
    sizes: Sizes,
    depths: Sequence[int],
    keys: int,
    source: int,
    cache_width: int,
    measure: Measure | None = None,
    head: Head = Head.full,
    cross_width: int | None = None,
) -> Need:
    """One step of rows that leave at these depths.

    A layer's weights are read once if any row needs it; the head once for each check that reads words, and once for
    the rows that speak without such a check; above the last layer that runs, K and V of every layer.

    Args:
        keys: self-attention positions that each row has; ``source``: tokens of its source.
        cache_width: bytes of a number of K and V; ``cross_width``: of those of the source, where they differ.
    """
    from calm.confidence import HEAD_MEASURES
    from calm.cost import backfill_work, head_work, layer_work

    last, top, low = spec.num_layers, max(depths), min(depths)
    layer, words, fill = layer_work(spec, keys, source, cache_width), head_work(spec), backfill_work(spec)
    row_bytes = layer_work(spec, keys, 0, cache_width).row_bytes
    row_bytes += layer_work(spec, 0, source, cross_width or cache_width).row_bytes
    asks = measure in HEAD_MEASURES
    need = Need()
    for number in range(1, top + 1):
        rows = sum(depth >= number for depth in depths)
        need += Need(sizes.layer, rows * row_bytes, rows * layer.macs)
        if asks and number < last and (head is not Head.candidates or number == 1):
            need += Need(sizes.head, 0.0, rows * words.macs)
    speaking = sum(depth == last for depth in depths) if asks else len(depths)  # a check has seen the others' words
    if speaking:
        need += Need(sizes.head, 0.0, speaking * words.macs)
    skipped = sum(last - depth for depth in depths)
    return need + Need((last - top) * sizes.kv if low < last else 0.0, 0.0, skipped * fill.macs)


def floors(need: Need, seconds: float, ceilings: Ceilings, arithmetic: str, held: float) -> dict[str, Any]:
    """What a step must move, the seconds that this takes at the ceilings, and the share that was reached.

    Args:
        need: of a step; ``seconds``: what one took.
        held: bytes that a step after step run reads: they fit into the cache or do not.
    """
    rate = ceilings.fastest(arithmetic)
    compute = need.macs / rate if rate else 0.0
    memory, cache = max(need.bytes / ceilings.memory, compute), max(need.bytes / ceilings.cache, compute)
    return {
        "weight_bytes": need.weights,
        "row_bytes": need.rows,
        "macs": need.macs,
        "seconds": seconds,
        "from_memory_s": memory,
        "from_cache_s": cache,
        "compute_s": compute,
        "share_of_memory": memory / seconds if seconds > 0 else None,
        "share_of_cache": cache / seconds if seconds > 0 else None,
        "held_bytes": held,
        "fits_cache": held <= ceilings.cache_bytes,
    }
