"""What was used last, by name, within bounds of number and size: the engine's kept sources and their simulation."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class LastUsed(Generic[Kept]):
    """Keeps at most ``count`` things whose sizes add up to at most ``size``; who was not used for longest goes first.

    Args:
        size: in the unit of ``put``; None: no bound.
    """

    def __init__(self, count: int, size: int | None = None) -> None:
        self._count, self._most = count, size
        self._kept: OrderedDict[Hashable, tuple[Kept, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def get(self, name: Hashable) -> Kept | None:
        """What has this name, which is used now; None where it is not kept."""
        if name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def put(self, name: Hashable, thing: Kept, size: int = 0) -> None:
        """Keep it, unless it alone is larger than all that may be kept: then the others stay and it does not."""
        if name in self._kept:
            self.size -= self._kept.pop(name)[1]
        if not self._count or (self._most is not None and size > self._most):
            return
        self._kept[name] = thing, size
        self.size += size
        while len(self._kept) > self._count or (self._most is not None and self.size > self._most):
            _, (_, gone) = self._kept.popitem(last=False)
            self.size -= gone
