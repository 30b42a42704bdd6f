"""Decoding spread over processes; a decoder like the others, so calibration and Table 1 need not know.

On a CPU one process per core with one thread each decodes more than twice as fast as threads do.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from .child import starting
from .decode_spec import Decode, DecodeSpec, Failure, OnRows, SpreadDecoder, cut, out_of_memory
from .environment import usable_cores
from .errors import CalmError
from .policies import Full, Policy
from .records import DecodeTrace, Example


def default_processes(device: str) -> int:
    """One per core on a CPU, one on an accelerator."""
    return usable_cores() if device == "cpu" else 1


class ParallelDecoder(SpreadDecoder):
    """``decode(examples, policy)`` over ``processes`` of its own, started when first needed.

    Args:
        processes: None for one per core on a CPU and one elsewhere; 1 decodes here.
        on_rows: called in this process with the rows of every batch that is done.

    Use it as a context manager: leaving it, also by Ctrl-C, ends the processes. What goes wrong in one of them is
    raised here as one line.
    """

    def __init__(self, spec: DecodeSpec, processes: int | None = None, on_rows: OnRows | None = None) -> None:
        super().__init__(spec, on_rows)
        self.processes = processes or default_processes(spec.device)
        self._workers: dict[Connection, BaseProcess] = {}

    def __call__(self, examples: Sequence[Example], policy: Policy) -> list[DecodeTrace]:
        batches = cut(examples, self.spec.rows_per_task)
        answers: list[DecodeTrace | None] = [None] * len(examples)
        alone = self.processes == 1 or len(batches) < 2
        with _one_thread(self.processes > 1 and self.spec.device == "cpu"):
            done = self._alone(batches, examples, policy) if alone else self._spread(batches, examples, policy)
            for index, traces in done:
                for row, trace in zip(batches[index], traces, strict=True):
                    answers[row] = trace
                self._tell(len(traces))
        return [trace for trace in answers if trace is not None]

    def warm(self, rows: int) -> None:
        """Start the processes that ``rows`` rows will need and wait until they can decode, so that no clock sees it."""
        batches = -(-rows // self.spec.rows_per_task)
        if self.processes == 1 or batches < 2:
            return
        self._start(min(self.processes, batches))
        for pipe in self._workers:
            self._send(pipe, ([], Full()))
        for pipe in self._workers:
            self._receive(pipe)

    def __enter__(self) -> "ParallelDecoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. The decoder stays usable: a later call starts new ones."""
        workers, self._workers = self._workers, {}
        for pipe, process in workers.items():
            pipe.close()
            process.terminate()
        for process in workers.values():
            process.join()
            process.close()

    def _alone(
        self, batches: list[list[int]], examples: Sequence[Example], policy: Policy
    ) -> Iterator[tuple[int, list[DecodeTrace]]]:
        for index, batch in enumerate(batches):
            yield index, self._here([examples[row] for row in batch], policy)

    def _spread(
        self, batches: list[list[int]], examples: Sequence[Example], policy: Policy
    ) -> Iterator[tuple[int, list[DecodeTrace]]]:
        """(index of a batch, its traces) as they get done; a free process takes the next batch."""
        self._start(min(self.processes, len(batches)))
        waiting = iter(enumerate(batches))
        busy: dict[Connection, int] = {}

        def feed(pipe: Connection) -> None:
            index, batch = next(waiting, (-1, []))
            if batch:
                self._send(pipe, ([examples[row] for row in batch], policy))
                busy[pipe] = index

        try:
            for pipe in self._workers:
                feed(pipe)
            while busy:
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    index = busy.pop(ready)
                    traces = self._receive(ready)
                    feed(ready)
                    yield index, traces
        except BaseException:
            self.close()  # the others' answers would be taken for those of the next call
            raise

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self.spec), daemon=True, name="calm-decode")
            with starting():
                process.start()
            theirs.close()
            self._workers[ours] = process

    def _send(self, pipe: Connection, task: object) -> None:
        try:
            pipe.send(task)
        except OSError:
            raise self._died(pipe) from None

    def _receive(self, pipe: Connection) -> list[DecodeTrace]:
        try:
            answer = pipe.recv()
        except (EOFError, OSError):
            raise self._died(pipe) from None
        if isinstance(answer, Failure):
            raise answer.error()
        traces: list[DecodeTrace] = answer
        return traces

    def _died(self, pipe: Connection) -> CalmError:
        process = self._workers[pipe]
        process.join(10)
        return CalmError(
            f"a decoding process ended with exit code {process.exitcode} (killed for memory?); "
            f"try a smaller batch_size than {self.spec.batch_size}, or processes=1"
        )


def _work(pipe: Connection, spec: DecodeSpec) -> None:
    """Life of a process: load the folder once, answer tasks until the pipe closes."""
    torch.set_num_threads(1)
    decode: Decode | None = None
    while True:
        try:
            examples, policy = pipe.recv()
        except (EOFError, OSError):
            return
        answer: Any
        try:
            decode = decode or spec.over(spec.load())
            answer = decode(examples, policy)
        except torch.OutOfMemoryError:
            answer = Failure.of(out_of_memory(spec))
        except Exception as error:
            answer = Failure.of(error)
        try:
            pipe.send(answer)
        except OSError:
            return


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """What is decoded here is decoded as in the other processes."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if wanted:
            torch.set_num_threads(before)
