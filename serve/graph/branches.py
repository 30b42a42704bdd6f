"""Branches in a CUDA graph: what is captured in one runs only while a flag lets it, and the host is not asked.

torch 2.12 and later put them there. For older ones they are made with NVIDIA's bindings (package cuda-bindings, version
13), as CUDA's programming guide makes conditional nodes while a stream is captured: a kernel sets the condition, the
node that depends on it has a graph of its own, and a second stream is captured into that.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ..errors import CaptureError
from ..requests import one_line
from .program import Act

MAJOR = 13  # version of cuda-bindings: calls of others take other arguments
KERNEL = b"""
typedef __device_builtin__ unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned int);
extern "C" __global__ void calm_goes_on(cudaGraphConditionalHandle handle, const bool *ended) {
    cudaGraphSetConditional(handle, !*ended);
}
"""


class BranchError(CaptureError):
    """CUDA refused to put a branch into a graph."""


def can_branch() -> bool:
    """Whether what puts branches into a graph is installed."""
    return _of_torch() or _bindings() == MAJOR


def prepare(device: torch.device) -> None:
    """Load what branches are made with, which cannot be done during a capture.

    Raises:
        BranchError: it does not load.
    """
    if _of_torch():
        return
    try:
        _bound(device)
    except (ImportError, RuntimeError, OSError) as error:
        if isinstance(error, BranchError):
            raise
        said = one_line(error)
        raise BranchError(f"cuda-bindings do not load ({said:.200}); choose stepping=whole") from error


def branch(ended: Tensor, act: Act) -> None:
    """Run ``act`` in a branch that is taken while ``ended``, a flag on the device, is False.

    Called while a graph is captured, after ``prepare``; elsewhere and in a warm-up it is the act itself.
    """
    if ended.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        act()
    elif _of_torch():
        _by_torch(ended, act)
    else:
        _bound(ended.device)(ended, act)


def _of_torch() -> bool:
    return hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node")


def _bindings() -> int:
    """Major version of cuda-bindings; 0 where it is not installed."""
    try:
        return int(version("cuda-bindings").split(".")[0])
    except (PackageNotFoundError, ValueError):
        return 0


def _by_torch(ended: Tensor, act: Act) -> None:
    graph: Any = torch.cuda.CUDAGraph.get_currently_capturing_graph()
    graph.begin_capture_to_if_node(~ended)
    try:
        act()
    finally:
        graph.end_capture_to_conditional_node()


@cache
def _bound(device: torch.device) -> BoundBranches:
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        driver = import_module("cuda.bindings.driver")
        ptx = compiled(import_module("cuda.bindings.nvrtc"), f"compute_{major}{minor}")
        return BoundBranches(driver, ptx, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def compiled(nvrtc: Any, architecture: str) -> bytes:
    """The kernel that sets a condition, as PTX. Raises BranchError where it does not compile."""
    program = told(nvrtc.nvrtcCreateProgram(KERNEL, b"calm_goes_on.cu", 0, [], []))
    told(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={architecture}".encode()]))
    ptx = b" " * int(told(nvrtc.nvrtcGetPTXSize(program)))
    told(nvrtc.nvrtcGetPTX(program, ptx))
    told(nvrtc.nvrtcDestroyProgram(program))
    return ptx


class BoundBranches:
    """Branches by cuda-bindings.

    Numbers that an act makes in a branch lie in a pool of their own, which stays as long as this does: torch does not
    know that the second stream belongs to a graph, and would hand their memory to others.

    Args:
        driver: the module cuda.bindings.driver.
        ptx: of ``compiled``.
        stream: that is captured into branches.
    """

    def __init__(self, driver: Any, ptx: bytes, stream: torch.cuda.Stream) -> None:
        self._driver, self._stream = driver, stream
        self._pool = torch.cuda.MemPool()
        self._context = told(driver.cuCtxGetCurrent())
        self._module = told(driver.cuModuleLoadData(ptx))
        self._kernel = told(driver.cuModuleGetFunction(self._module, b"calm_goes_on"))
        told(driver.cuFuncLoad(self._kernel))  # else the first launch would, and that is captured

    def __call__(self, ended: Tensor, act: Act) -> None:
        driver, capturing = self._driver, torch.cuda.current_stream(ended.device).cuda_stream
        while self._stream.cuda_stream == capturing:  # torch hands out the same few again and again
            self._stream = torch.cuda.Stream(ended.device)  # type: ignore[no-untyped-call]
        child = driver.CUstream(self._stream.cuda_stream)
        body = self._node(driver.CUstream(capturing), ended)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        told(driver.cuStreamBeginCaptureToGraph(child, body, None, None, 0, mode))
        try:
            with torch.cuda.use_mem_pool(self._pool, ended.device), torch.cuda.stream(self._stream):
                act()
        except BaseException:
            driver.cuStreamEndCapture(child)  # whatever it answers: the act's own error is the one to show
            raise
        told(driver.cuStreamEndCapture(child))

    def _node(self, stream: Any, ended: Tensor) -> Any:
        """The graph of a new branch, which runs after all that ``stream`` has captured and before what follows."""
        driver = self._driver
        graph = told(driver.cuStreamGetCaptureInfo(stream))[2]
        handle = told(driver.cuGraphConditionalHandleCreate(graph, self._context, 0, 0))
        given = (int(handle), ended.data_ptr()), (ctypes.c_uint64, ctypes.c_void_p)
        told(driver.cuLaunchKernel(self._kernel, 1, 1, 1, 1, 1, 1, 0, stream, given, 0))
        before, edges = told(driver.cuStreamGetCaptureInfo(stream))[3:5]
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle, node.conditional.ctx = handle, self._context
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        node.conditional.size = 1
        added = told(driver.cuGraphAddNode(graph, before, edges, len(before), node))
        only = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        told(driver.cuStreamUpdateCaptureDependencies(stream, [added], None, 1, int(only)))
        return node.conditional.phGraph_out[0]


def told(answer: tuple[Any, ...]) -> Any:
    """What a call of the bindings returns besides its status. Raises BranchError where that is not success."""
    status, *found = answer
    if int(status) != 0:
        raise BranchError(f"CUDA answers {status.name} while a branch is put into a graph; choose stepping=whole")
    return found[0] if len(found) == 1 else found
