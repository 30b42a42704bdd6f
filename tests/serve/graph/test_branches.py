"""Branches by cuda-bindings, with a driver that only notes what it is told: what hangs on what, in which order."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serve.graph import branches
from serve.graph.branches import BoundBranches, BranchError, compiled

PARENT, CHILD = 11, 22


class Status(int):
    name = "CUDA_ERROR_NOT_SUPPORTED"


@dataclass
class Driver:
    """Streams as numbers; what a stream has captured last is what the next node of it hangs on.

    Attributes:
        refuses: call that answers with an error.
        noted: (call, what it was told) in order.
        last: stream -> nodes.
    """

    refuses: str = ""
    noted: list[tuple[Any, ...]] = field(default_factory=list)
    last: dict[int, list[str]] = field(default_factory=lambda: {PARENT: ["begun"]})
    graphs: dict[int, str] = field(default_factory=lambda: {PARENT: "whole"})

    CUstream = staticmethod(int)
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_CONDITIONAL="conditional")
    CUgraphConditionalNodeType = SimpleNamespace(CU_GRAPH_COND_TYPE_IF="if")
    CUstreamUpdateCaptureDependencies_flags = SimpleNamespace(CU_STREAM_SET_CAPTURE_DEPENDENCIES=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL="thread")

    def CUgraphNodeParams(self) -> Any:
        return SimpleNamespace(type=None, conditional=SimpleNamespace(phGraph_out=[None]))

    def _answer(self, call: str, *found: Any) -> tuple[Any, ...]:
        return (Status(801 if call == self.refuses else 0), *found)

    def cuCtxGetCurrent(self) -> Any:
        return self._answer("cuCtxGetCurrent", "context")

    def cuModuleLoadData(self, ptx: bytes) -> Any:
        return self._answer("cuModuleLoadData", ptx)

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> Any:
        return self._answer("cuModuleGetFunction", name)

    def cuFuncLoad(self, kernel: bytes) -> Any:
        return self._answer("cuFuncLoad")

    def cuStreamGetCaptureInfo(self, stream: int) -> Any:
        nodes = self.last[stream]
        return self._answer("cuStreamGetCaptureInfo", "active", 5, self.graphs[stream], nodes, ["edge"] * len(nodes), 1)

    def cuGraphConditionalHandleCreate(self, graph: str, context: str, default: int, flags: int) -> Any:
        return self._answer("cuGraphConditionalHandleCreate", 77)

    def cuLaunchKernel(self, kernel: bytes, *rest: Any) -> Any:
        stream, (values, _), _ = rest[7:]
        self.noted.append(("kernel", kernel, stream, values))
        self.last[stream] = ["set"]
        return self._answer("cuLaunchKernel")

    def cuGraphAddNode(self, graph: str, before: list[str], edges: list[str], count: int, node: Any) -> Any:
        assert len(before) == len(edges) == count and node.type == "conditional"
        asked = node.conditional
        self.noted.append(("node", graph, before, asked.handle, asked.type, asked.size))
        if self.refuses != "cuGraphAddNode":
            asked.phGraph_out = ["body"]
        return self._answer("cuGraphAddNode", "branch")

    def cuStreamUpdateCaptureDependencies(
        self, stream: int, nodes: list[str], edges: None, count: int, how: int
    ) -> Any:
        assert how == 1 and count == len(nodes)
        self.last[stream] = nodes
        return self._answer("cuStreamUpdateCaptureDependencies")

    def cuStreamBeginCaptureToGraph(self, stream: int, graph: str, *rest: Any) -> Any:
        self.noted.append(("begin", stream, graph))
        return self._answer("cuStreamBeginCaptureToGraph")

    def cuStreamEndCapture(self, stream: int) -> Any:
        self.noted.append(("end", stream))
        return self._answer("cuStreamEndCapture", "body")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of torch, as far as branches know them; the present one is the last."""
    present = [PARENT]

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        present.append(stream.cuda_stream)
        yield
        present.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=present[-1]))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: nullcontext())
    return present


def bound(driver: Driver) -> BoundBranches:
    return BoundBranches(driver, b"ptx", SimpleNamespace(cuda_stream=CHILD))  # type: ignore[arg-type]


def test_two_branches_stand_one_behind_the_other(streams: list[int]) -> None:
    driver, ended = Driver(), torch.zeros((), dtype=torch.bool)
    branch = bound(driver)
    for name in ("first", "second"):
        branch(ended, lambda name=name: driver.noted.append((name, streams[-1])))  # type: ignore[misc]
    flag = (77, ended.data_ptr())
    once = [
        ("kernel", b"calm_goes_on", PARENT, flag),
        ("node", "whole", ["set"], 77, "if", 1),
        ("begin", CHILD, "body"),
    ]
    assert driver.noted == [*once, ("first", CHILD), ("end", CHILD), *once, ("second", CHILD), ("end", CHILD)]
    assert driver.last[PARENT] == ["branch"] and streams == [PARENT]


def test_a_branch_whose_act_raises_is_closed(streams: list[int]) -> None:
    driver = Driver()
    with pytest.raises(ZeroDivisionError):
        bound(driver)(torch.zeros((), dtype=torch.bool), lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert driver.noted[-1] == ("end", CHILD)


@pytest.mark.parametrize(
    "call", ["cuCtxGetCurrent", "cuModuleLoadData", "cuGraphConditionalHandleCreate", "cuGraphAddNode"]
)
def test_what_cuda_refuses_is_one_line(streams: list[int], call: str) -> None:
    told: list[str] = []
    with pytest.raises(BranchError, match="CUDA answers CUDA_ERROR_NOT_SUPPORTED .*; choose stepping=whole"):
        bound(Driver(refuses=call))(torch.zeros((), dtype=torch.bool), lambda: told.append("ran"))
    assert told == []


@pytest.mark.parametrize(
    ("installed", "there"), [("13.0.3", True), ("12.9.4", False), ("14.0.0", False), (None, False)]
)
def test_who_can_branch(monkeypatch: pytest.MonkeyPatch, installed: str | None, there: bool) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise branches.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(branches, "version", version)
    monkeypatch.setattr(branches, "_of_torch", lambda: False)
    assert branches.can_branch() is there
    monkeypatch.setattr(branches, "_of_torch", lambda: True)
    assert branches.can_branch()


def test_the_kernel_compiles_where_a_compiler_is_installed() -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings are not installed")
    try:
        ptx = compiled(nvrtc, "compute_90")
    except BranchError:
        raise
    except Exception as error:  # the bindings without NVRTC's library
        pytest.skip(str(error).splitlines()[0])
    assert b".visible .entry calm_goes_on" in ptx and b"cudaGraphSetConditional" in ptx
