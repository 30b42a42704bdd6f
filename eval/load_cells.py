"""The cells of a load: every rate with every way of decoding, each kept as soon as it is whole.

All ways get the same prompts at the same times. At each rate every way has its turn before the next rate comes, and
another way begins there, so that a machine that slows down slows all alike.

A cell is kept in the run folder if every request got an answer, be it a refusal, and is not measured again. One in
which requests were lost, or none was completed, is told, and measured again by the next run in that folder.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calm.load_config import LoadConfig, early_exit, told_rate

from .clocks import uncollected
from .common import asked_of
from .load_arrivals import arrivals, open_loop
from .load_client import Client, body_of
from .load_metrics import measures
from .load_prompts import Prompt
from .load_samples import Sample, answered, read_samples, write_samples

# what does not change a cell's measurement: which others there are, how it is told, and where the prompts lie
UNIMPORTANT = (
    "rates", "ways", "goodput", "percentiles", "ready_timeout", "served_model", "checkpoint", "data", "prompts",
    "prompt_field", "random_tokens", "vocab_size", "eos_id", "as_ids",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A rate and a way."""

    rate: float
    way: str

    @property
    def name(self) -> str:
        """As a file can be called: without ``=``."""
        return f"rate-{told_rate(self.rate)}-{self.way.replace('=', '-')}"


@dataclass(frozen=True)
class Measured:
    """What a cell brought.

    Attributes:
        duration: seconds from the schedule's zero until everything was back.
        client_cpu: CPU seconds of this process by ``duration``: near 1, it was the client that was measured.
        connections: opened by this cell.
    """

    cell: Cell
    samples: list[Sample]
    duration: float
    client_cpu: float
    connections: int

    @property
    def lost(self) -> int:
        """Requests that got no answer."""
        return sum(sample.lost for sample in self.samples)

    @property
    def whole(self) -> bool:
        """No request was lost, and some brought words."""
        return self.lost == 0 and len(answered(self.samples)) > 0

    def record(self, config: LoadConfig) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "rate": told_rate(self.cell.rate),
            "way": self.cell.way,
            **measures(self.samples, self.duration, config.percentiles, config.goodput),
            "client_cpu": self.client_cpu,
            "connections": self.connections,
        }


def cells(rates: Sequence[float], ways: Sequence[str]) -> list[Cell]:
    """In the order of their turns."""
    return [
        Cell(rate, ways[(place + turn) % len(ways)])
        for turn, rate in enumerate(sorted(rates))
        for place in range(len(ways))
    ]


def bodies(config: LoadConfig, model: str, way: str, prompts: Sequence[Prompt]) -> list[bytes]:
    """Of a way's requests, made before the clock runs."""
    return [
        body_of(
            model,
            prompt,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            ignore_eos=True if config.ignore_eos else None,
            early_exit=early_exit(way),
            **config.extra_body,
        )
        for prompt in prompts
    ]


async def measure(
    client: Client,
    config: LoadConfig,
    cell: Cell,
    asked: Sequence[bytes],
    tick: Callable[[], object] = lambda: None,
) -> Measured:
    """Warm up, then send everything on schedule; ``tick`` is called after every request."""
    await asyncio.gather(*[client.complete(asked[i % len(asked)]) for i in range(config.warmups)])
    due = arrivals(len(asked), cell.rate, config.burstiness, config.seed)

    async def send(number: int, at: float, zero: float) -> Sample:
        sample = await client.complete(asked[number], number, at, zero)
        tick()
        return sample

    opened = client.pool.opened
    with uncollected():
        cpu = time.process_time()
        samples, duration = await open_loop(due, send)
        cpu = time.process_time() - cpu
    return Measured(cell, samples, duration, cpu / duration, client.pool.opened - opened)


class Ledger:
    """The whole cells of a run folder: of one server, model and kind of request."""

    def __init__(self, run_dir: Path, config: LoadConfig, model: str, prompts: Sequence[Prompt]) -> None:
        from calm.calibration.identity import hash_json

        asked = asked_of(config, UNIMPORTANT)
        asked = {name: "inf" if value == math.inf else value for name, value in asked.items()}
        self._folder = run_dir / "cells" / hash_json({"asked": asked, "model": model, "prompts": list(prompts)})[:12]

    def read(self, cell: Cell) -> Measured | None:
        """None where it was not kept."""
        from calm.checkpoint import read_json

        path = self._folder / f"{cell.name}.json"
        if not path.is_file():
            return None
        return Measured(cell, read_samples(path.with_suffix(".parquet")), **read_json(path))

    def keep(self, measured: Measured) -> None:
        """Leave a whole cell's samples, and then the file that says that they are whole."""
        from calm.checkpoint import write_json

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{measured.cell.name}.json"
        write_samples(path.with_suffix(".parquet"), [(shared(measured.cell), measured.samples)])
        facts = {name: getattr(measured, name) for name in ("duration", "client_cpu", "connections")}
        write_json(path, facts)


def shared(cell: Cell) -> dict[str, Any]:
    """What all rows of a cell have in common."""
    return {"way": cell.way, "rate": cell.rate}
