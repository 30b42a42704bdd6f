"""The workers of one model: started once, kept over its cases, let go one by one as they fail."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from calm.engine_config import PeersConfig

from .peer_plan import WorkerPlan
from .peer_process import PeerError, WorkerProcess, load

logger = logging.getLogger(__name__)
Sources = Sequence[Sequence[int]]
BATCH = 32  # rows of one call where answers are read


class Crew:
    """Workers that have a model open.

    Attributes:
        about: what each told when it had loaded.
        failures: why a worker is not, or no longer, here; by its name.
    """

    def __init__(self, config: PeersConfig, folder: Path, store: Path, logs: Path) -> None:
        self._config, self._folder, self._store, self._logs = config, folder, store, logs
        self._workers: dict[str, WorkerProcess] = {}
        self._stack = ExitStack()
        self.about: dict[str, Mapping[str, Any]] = {}
        self.failures: dict[str, str] = {}

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    @property
    def names(self) -> list[str]:
        return list(self._workers)

    def start(self, plans: Iterable[WorkerPlan], told: Callable[[str], None]) -> None:
        """Start each and have it open the model; ``told`` hears of each. One that cannot be had is a failure noted."""
        for plan in plans:
            try:
                worker = self._stack.enter_context(self._started(plan))
                self._workers[plan.name] = worker
                self.about[plan.name] = load(
                    worker, self._config.load_timeout, folder=str(self._folder), store=str(self._store),
                    threads=self._config.threads, settings=plan.settings,
                )  # fmt: skip
                told(f"{plan.name}: {' '.join(f'{k} {v}' for k, v in self.about[plan.name]['versions'].items())}")
            except PeerError as error:
                self.drop(error)
                told(f"{error.peer}: left out: {error.reason}")

    def _started(self, plan: WorkerPlan) -> WorkerProcess:
        environments = Path(self._config.environments)
        if plan.environment is not None and not plan.interpreter(environments).is_file():
            raise PeerError(plan.name, _missing(environments, plan.environment))
        log = self._logs / f"{plan.name}.log"
        return WorkerProcess(plan.name, plan.command(environments), log, self._config.threads)

    def drop(self, error: PeerError) -> None:
        """The peer takes no part any more."""
        logger.warning("%s", error)
        self.failures[error.peer] = error.reason
        worker = self._workers.pop(error.peer, None)
        if worker is not None:
            worker.end()

    def ask(self, name: str, op: str, timeout: float | None = None, **values: Any) -> dict[str, Any]:
        """Raise PeerError as WorkerProcess.ask does."""
        return self._workers[name].ask(op, timeout or self._config.call_timeout, **values)

    def prepare(self, sources: Sources, most: int, variants: Mapping[str, Mapping[str, Any]]) -> None:
        """Hand the rows of a case to everyone; ``variants`` by worker. Who cannot take them drops out."""
        for name in self.names:
            try:
                self.ask(
                    name, "prepare", self._config.load_timeout,
                    sources=sources, most=most, variants=variants.get(name, {}),
                )  # fmt: skip
            except PeerError as error:
                self.drop(error)

    def answers(self, sources: Sources, most: int) -> dict[str, list[list[int]]]:
        """Everyone's greedy answers to these rows, by worker."""
        found: dict[str, list[list[int]]] = {}
        for name in self.names:
            rows: list[list[int]] = []
            try:
                for start in range(0, len(sources), BATCH):
                    batch = sources[start : start + BATCH]
                    rows += self.ask(name, "answer", self._config.load_timeout, sources=batch, most=most)["tokens"]
            except PeerError as error:
                self.drop(error)
                continue
            found[name] = rows
        return found

    def decoder(self, name: str, variant: str, rows: int) -> Callable[[int], None]:
        """What times one contender: so many tokens of every row, and no other number of them."""

        def run(tokens: int) -> None:
            lengths = self.ask(name, "decode", variant=variant, tokens=tokens)["lengths"]
            if lengths != [tokens] * rows:
                wrong = sorted(set(lengths))
                raise PeerError(name, f"gave {len(lengths)} rows of {wrong} tokens where {rows} of {tokens} were asked")

        return run


def _missing(environments: Path, name: str) -> str:
    """Why there is no environment of a peer: the last line of its set-up, where it was tried."""
    log = environments / f"{name}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    said = [line.strip() for line in lines if line.strip()]
    tried = f"; its set-up ended with: {said[-1][:200]}" if said else ""
    return f"no environment {environments / name}; make peers sets it up{tried}"
