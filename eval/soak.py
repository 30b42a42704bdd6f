"""Half an hour with a server whose clients crash: does it hold more and more, and is every answer its own?

    python -m eval.soak checkpoint=runs/demo/model
    python -m eval.soak checkpoint=runs/demo/model duration_s=60 settle_s=15 serve=[max_batch=8]

Starts ``python -m serve`` in a process of its own and sends it clients as they come (a Poisson process, and bursts):
some wait for their answer, which must be what the same prompt gets when nobody else is there; others break off in every
way there is, or send what is no request (eval/soak_clients.py). Meanwhile memory, open files and threads of the
server's processes are read. Writes summary.json, samples.parquet and a figure. Exit status 4: a client got what it
should not have got, or the server holds more at the end than before.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.cli import program
from calm.errors import CalmError
from calm.soak_config import SoakConfig

from .common import Stamp, articles_of, can_draw, choose_model, finish, say

if TYPE_CHECKING:
    from .own_server import Held, OwnServer
    from .soak_clients import Question, Visit, Visitors

UNSOUND = 4  # exit status
IDLE_S = 60.0  # until everybody who is left has been served, or noticed to be gone
CLOSED_S = 30.0  # until connections of the departed are closed
SPARE_FILES, SPARE_THREADS = 4, 2  # that come and go


@dataclass(frozen=True)
class Reading:
    """The server at one moment.

    Attributes:
        at: seconds after the load began.
        running, waiting: requests.
    """

    at: float
    rss_mib: float
    files: int
    threads: int
    processes: int
    running: float
    waiting: float


def run(config: SoakConfig, run_dir: Path) -> int:
    stamp, folder = Stamp("eval.soak", config), choose_model(config.checkpoint)
    from calm.models.folder import load

    from .own_server import own_server

    corpus, articles = articles_of(config.data, load(folder), config.prompts)
    say(f"prompts: {corpus}, test split, {len(articles)} of them")
    prompts = [article.source for article in articles]
    with own_server(folder, run_dir / "server.log", config.serve) as server:
        say(f"server ready after {server.ready_s:.1f} s")
        found = asyncio.run(_soak(config, server, prompts))
    summary = {**stamp.values(), "ready_s": server.ready_s, "exit_status": server.process.returncode, **found.told()}
    found.write(run_dir)
    summary["figures"] = _draw(found.readings, run_dir / "soak.png")
    say(found.as_text())
    for line in found.faults:
        say(f"fault: {line}")
    summary["sound"] = not found.faults
    finish(summary, run_dir)
    return UNSOUND if found.faults else 0


@dataclass
class Soaked:
    """What a soak brought.

    Attributes:
        before, after: what an idle server held before the load, and when everybody had left.
        cancelled: as the server counts those who left.
    """

    config: SoakConfig
    duration_s: float
    readings: list[Reading]
    visits: "list[Visit]"
    before: "Held"
    after: "Held"
    cancelled: float
    idle: bool

    @property
    def growth(self) -> float:
        """Resident MiB an hour: the slope of a straight line through the readings after ``settle_s``."""
        kept = [reading for reading in self.readings if reading.at >= self.config.settle_s]
        if len(kept) < 2:
            return 0.0
        slope = statistics.linear_regression([each.at for each in kept], [each.rss_mib for each in kept]).slope
        return float(slope) * 3600.0

    @property
    def settled_mib(self) -> tuple[float, float]:
        """Median resident memory in the first and the last tenth of the settled readings."""
        kept = [reading.rss_mib for reading in self.readings if reading.at >= self.config.settle_s] or [0.0]
        tenth = max(1, len(kept) // 10)
        return statistics.median(kept[:tenth]), statistics.median(kept[-tenth:])

    @property
    def faults(self) -> list[str]:
        """Everything that should not be; one line each."""
        from .soak_clients import ANSWERED, RIGHT, counted

        odd = counted([visit for visit in self.visits if not visit.in_order])
        lines = [f"{count} clients that {kind}: {what}" for kind, of in odd.items() for what, count in of.items()]
        if not any(visit.outcome == RIGHT for visit in self.visits if visit.kind in ANSWERED):
            lines.append("nobody got an answer")
        if not self.idle:
            lines.append("requests were left when all clients had gone")
        if self.after.files > self.before.files + SPARE_FILES:
            lines.append(f"{self.after.files} open files, {self.before.files} before")
        if self.after.threads > self.before.threads + SPARE_THREADS:
            lines.append(f"{self.after.threads} threads, {self.before.threads} before")
        if self.after.processes != self.before.processes:
            lines.append(f"{self.after.processes} processes, {self.before.processes} before")
        first, last = self.settled_mib
        hours = max(0.0, self.duration_s - self.config.settle_s) / 3600.0
        allowed = max(self.config.growth_mib_per_hour * hours, 0.05 * first)
        if last - first > allowed:
            lines.append(f"resident memory grew from {first:.0f} to {last:.0f} MiB, {allowed:.0f} are allowed")
        return lines

    def told(self) -> dict[str, Any]:
        """JSON-ready."""
        from .soak_clients import ANSWERED, RIGHT, counted

        right = [visit for visit in self.visits if visit.outcome == RIGHT]
        times = sorted(1000.0 * (visit.ended - visit.started) for visit in right)
        first, last = self.settled_mib
        thirds = [_between(right, self.duration_s * i / 3, self.duration_s * (i + 1) / 3) for i in range(3)]
        return {
            "duration_s": self.duration_s,
            "clients": len(self.visits),
            "outcomes": counted(self.visits),
            "answers": len(right),
            "of_those_that_waited": sum(visit.kind in ANSWERED for visit in self.visits),
            "answer_ms": {"p50": _quantile(times, 0.5), "p99": _quantile(times, 0.99), "p50_by_third": thirds},
            "cancelled": self.cancelled,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "settled_rss_mib": {"first_tenth": first, "last_tenth": last, "slope_mib_per_hour": self.growth},
            "most": {
                name: max((getattr(reading, name) for reading in self.readings), default=0)
                for name in ("rss_mib", "files", "threads", "running", "waiting")
            },
            "faults": self.faults,
        }

    def write(self, run_dir: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist([asdict(each) for each in self.readings])
        pq.write_table(table, run_dir / "samples.parquet", compression="zstd")

    def as_text(self) -> str:
        """For the terminal."""
        told, ms = self.told(), self.told()["answer_ms"]
        outcomes = {kind: ", ".join(f"{n} {what}" for what, n in of.items()) for kind, of in told["outcomes"].items()}
        first, last = self.settled_mib
        before, after = self.before, self.after
        lines = [
            *(f"{kind}: {words}" for kind, words in outcomes.items()),
            f"answers: {told['answers']}, median {ms['p50']:.0f} ms, p99 {ms['p99']:.0f} ms",
            f"resident: {first:.0f} MiB, then {last:.0f}; {self.growth:+.1f} MiB an hour",
            f"open files: {before.files} before, {after.files} after; threads: {before.threads}, {after.threads}",
        ]
        return "\n".join(lines)


async def _soak(config: SoakConfig, server: "OwnServer", prompts: Sequence[str]) -> Soaked:
    """Everybody comes; what they brought."""
    from .load_arrivals import arrivals, open_loop
    from .load_client import Client, check_files
    from .load_ready import find_model
    from .soak_clients import Kind, Visit, Visitors, draw

    check_files(4 * config.burst + int(4 * config.rate))
    client = Client(server.url, config.timeout)
    generator = random.Random(config.seed)
    try:
        model = await find_model(client, server.url, None, config.timeout)
        visitors = Visitors(client, model, [], generator)
        visitors.questions = await _alone(visitors, config, prompts)
        client.close()
        await _settle(server)
        before = await asyncio.to_thread(server.held)
        due = arrivals(round(config.rate * config.duration_s), config.rate, 1.0, config.seed)
        coming = [(at, draw(generator)) for at in due]
        bursts = int(config.duration_s / config.burst_every_s)
        coming += [
            (config.burst_every_s * (number + 0.5), Kind.whole if i % 2 else Kind.streamed)
            for number in range(bursts)
            for i in range(config.burst)
        ]
        coming.sort()
        with _bar(len(coming)) as bar:

            async def send(number: int, at: float, zero: float) -> Visit:
                visit = await visitors.visit(coming[number][1])
                bar.update()
                return visit

            began = asyncio.get_running_loop().time()
            readings: list[Reading] = []
            watch = asyncio.create_task(_watch(server, config.sample_every_s, readings, time.monotonic()))
            try:
                _, duration = await open_loop([at for at, _ in coming], send)
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        for visit in visitors.visits:
            visit.started, visit.ended = visit.started - began, visit.ended - began
        client.close()
        idle = await _settle(server)
        after = await asyncio.to_thread(server.held)
        cancelled = await asyncio.to_thread(server.metric, "calm_requests_cancelled_total")
    finally:
        client.close()
    return Soaked(config, duration, readings, visitors.visits, before, after, cancelled, idle)


async def _alone(visitors: "Visitors", config: SoakConfig, prompts: Sequence[str]) -> "list[Question]":
    """Each prompt in each way, one after another."""
    from .soak_clients import Question

    questions = []
    for prompt in prompts:
        for way in config.ways:
            status, text = await visitors.ask(Question(prompt, way))
            if status != 200:
                raise CalmError(f"way {way}: the server answers {status} to a first request: {text}")
            questions.append(Question(prompt, way, text))
    return questions


async def _settle(server: "OwnServer") -> bool:
    """Wait until nobody is served and connections are closed; whether it came to the former."""
    idle = await asyncio.to_thread(server.wait, server.idle, IDLE_S)
    last = -1
    for _ in range(round(CLOSED_S)):
        held = await asyncio.to_thread(server.held)
        if held.files == last:
            break
        last = held.files
        await asyncio.sleep(1.0)
    return idle


async def _watch(server: "OwnServer", every_s: float, readings: list[Reading], zero: float) -> None:
    """Until it is cancelled."""

    def read() -> Reading:
        held = server.held()
        load = [server.metric(f"calm_num_requests_{which}") for which in ("running", "waiting")]
        return Reading(time.monotonic() - zero, held.rss_mib, held.files, held.threads, held.processes, *load)

    while True:
        await asyncio.sleep(every_s)
        try:
            readings.append(await asyncio.to_thread(read))
        except OSError:  # it takes no more connections just now
            continue


def _between(right: "Sequence[Visit]", begin: float, end: float) -> float | None:
    times = [1000.0 * (visit.ended - visit.started) for visit in right if begin <= visit.started < end]
    return statistics.median(times) if times else None


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _bar(clients: int) -> Any:
    from calm.progress import Progress

    return Progress(clients, "soak", unit="client")


def _draw(readings: Sequence[Reading], path: Path) -> list[str]:
    """One PNG; its name. Says so where matplotlib is not installed, or there is nothing to draw."""
    if not can_draw():
        return []
    if not readings:
        say("no figure: nothing was read")
        return []
    import pandas as pd

    from calm.plotting import plot_held

    axes = plot_held(pd.DataFrame([asdict(each) for each in readings]))
    axes[0].figure.savefig(path, dpi=150)
    return [path.name]


main = program("soak", SoakConfig, run)

if __name__ == "__main__":
    main()
