"""How a program is run: in one piece, layer by layer with the host looking at the flag, or with branches in the graph.

On a CUDA device each piece is captured once and replayed; elsewhere it is called, so that the logic is the same and
can be tested. What is captured reads and writes tensors that stay where they are.
"""

import gc
from contextlib import suppress
from typing import Any, Protocol

import torch

from calm.config import Stepping
from calm.errors import CalmError

from ..errors import CaptureError
from ..requests import one_line
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

    Raises:
        CaptureError: the device refuses; what the act itself raises where that is for the user to mend.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        gc.collect()  # engines that are gone lie in cycles, and their slots are what is large

    def __call__(self, act: Act) -> Act:
        with torch.cuda.device(self._device):  # Triton launches on the current device
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARMUPS):
                    act()
                self._stream.synchronize()
                graph = self._captured(act)
            torch.cuda.current_stream().wait_stream(self._stream)

        def replay(graph: Any = graph, act: Act = act) -> None:
            graph.replay()

        return replay

    def _captured(self, act: Act) -> Any:
        """torch.cuda.graph would collect garbage and give memory back each time, which takes longer than the rest."""
        graph: Any = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a graph that were destroyed during the capture would break it
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                act()
            except BaseException:
                with suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException as error:
            self._start_anew()
            if isinstance(error, CalmError) or not isinstance(error, Exception):
                raise
            said = one_line(error)
            raise CaptureError(f"the step cannot be captured ({said:.300}); choose runner=eager") from error
        finally:
            if collects:
                gc.enable()
        return graph

    def _start_anew(self) -> None:
        """With another pool: CUDA has thrown the capture away, and torch's allocators may believe for ever that it is
        under way in this one. (So may torch's default generator of the device, which nothing here draws from.)
        """
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._pool = torch.cuda.graph_pool_handle()


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
