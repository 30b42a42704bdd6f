"""How a program is run: in one piece, layer by layer with the host looking at the flag, or with branches in the graph.

On a CUDA device each piece is captured once and replayed; elsewhere it is called, so that the logic is the same and
can be tested. What is captured reads and writes tensors that stay where they are.
"""

import gc
from typing import Any, Protocol

import torch

from calm.config import Stepping

from .branches import branch
from .program import Act, Program

WARMUPS = 3  # calls before a capture: libraries set themselves up, kernels are compiled


class Capture(Protocol):
    """Turns what is to be run again and again into something that is quick to run."""

    def __call__(self, act: Act) -> Act: ...


def called(act: Act) -> Act:
    """Without a device that captures: the act itself."""
    return act


class CudaCapture:
    """Captures acts into CUDA graphs that share one memory pool.

    What an act reads must stay where it is, so who has the replay keeps the act.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, act: Act) -> Act:
        with torch.cuda.device(self._device):  # Triton launches on the current device
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARMUPS):
                    act()
            torch.cuda.current_stream().wait_stream(self._stream)
            gc.collect()  # a graph that were destroyed during the capture would break it
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                act()

        def replay(graph: Any = graph, act: Act = act) -> None:
            graph.replay()

        return replay


def stepper(program: Program, stepping: Stepping, capture: Capture) -> Act:
    """The step as one call."""
    match stepping:
        case Stepping.whole:
            return capture(program.whole)
        case Stepping.segments:
            return _segments(program, capture)
        case Stepping.branches:
            return capture(lambda: _branching(program))


def _segments(program: Program, capture: Capture) -> Act:
    """A piece for each layer; the host reads the flag of one while the next is already on its way.

    So at most one piece is launched in vain, and in that no row runs.
    """
    first, *others = program.layers()

    def begin() -> None:
        program.begin()
        first()

    pieces = [capture(begin), *(capture(act) for act in others)]
    end, look = capture(program.end), _Look(program)

    def run() -> None:
        pieces[0]()
        for number, piece in enumerate(pieces[1:]):
            look.ask(number)
            piece()
            if look.told(number):
                break
        end()

    return run


class _Look:
    """The flag that ends a step, as it was after each piece."""

    def __init__(self, program: Program) -> None:
        self._flag = program.frame.stopped
        self._on_device = self._flag.device.type == "cuda"
        count = program.num_layers
        self._seen = torch.zeros(count, dtype=torch.bool, pin_memory=self._on_device)
        self._events = [torch.cuda.Event() for _ in range(count * self._on_device)]  # type: ignore[no-untyped-call]

    def ask(self, number: int) -> None:
        self._seen[number].copy_(self._flag, non_blocking=True)
        if self._on_device:
            self._events[number].record()

    def told(self, number: int) -> bool:
        if self._on_device:
            self._events[number].synchronize()
        return bool(self._seen[number])


def _branching(program: Program) -> None:
    """Each layer in a branch of its own that is taken while the step goes on."""
    program.begin()
    for act in program.layers():
        branch(program.frame.stopped, act)
    program.end()
