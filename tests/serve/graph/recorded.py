"""A capture without a device: notes what torch is told to do, and does that again at each replay.

As in a CUDA graph the numbers that the host had at the capture are baked in, what was made on the way keeps its place,
nothing is written while it is captured, and nothing may be looked at.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from serve.graph.program import Act

aten = torch.ops.aten
LOOKS = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select)
Done = tuple[Any, Any, Any, Any]  # function, its arguments, and what it made; None where it wrote


class Recorder(TorchDispatchMode):
    """Notes functions; those that write are not run."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Done] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        assert func.overloadpacket not in LOOKS and not _by_flags(func, args), f"{func} looks at a number"
        assert func.overloadpacket is not aten.lift_fresh, "a tensor comes from the host"
        given = func._schema.arguments
        written = [i for i, each in enumerate(given) if each.alias_info is not None and each.alias_info.is_write]
        if written:
            self.done.append((func, args, kwargs, None))
            found = [args[i] if i < len(args) else kwargs[given[i].name] for i in written]
            return found[0] if len(found) == 1 else tuple(found)
        made = func(*args, **kwargs)
        if all(each.alias_info is None for each in func._schema.returns):
            self.done.append((func, args, kwargs, made))
        return made


def _by_flags(func: Any, args: Any) -> bool:
    """Whether it picks what a flag is set of: how much that is, the host must know."""
    if func.overloadpacket not in (aten.index, aten.index_put_):
        return False
    return any(each is not None and each.dtype is torch.bool for each in args[1])


def again(done: list[Done]) -> None:
    for func, args, kwargs, made in done:
        found = func(*args, **kwargs)
        if made is not None:
            for place, tensor in zip(tree.tree_leaves(made), tree.tree_leaves(found), strict=True):
                if isinstance(place, Tensor):
                    place.copy_(tensor)


class Recorded:
    """Stands for CudaCapture.

    Attributes:
        replays: of all that were captured.
    """

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, act: Act) -> Act:
        recorder = Recorder()
        with recorder:
            act()

        def replay() -> None:
            self.replays += 1
            again(recorder.done)

        return replay
