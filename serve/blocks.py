"""Which blocks of a paged cache are whose (vLLM, 2309.06180, section 4): ids only, no numbers."""

from collections.abc import Iterable
from heapq import heappop, heappush

from .slots import SlotError


class BlockPool:
    """``count`` blocks, numbered from ``first`` on; the lowest free ones are handed out."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count = count
        self._free = list(range(first, first + count))  # ascending, so it is a heap
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._taken)

    def take(self, count: int) -> list[int]:
        """So many of them, ascending. Raises SlotError where fewer are free, and takes none."""
        if count > self.free:
            raise SlotError(f"{count} blocks of the cache are needed and {self.free} are free")
        blocks = [heappop(self._free) for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """Raises SlotError for a block that nobody has."""
        for block in blocks:
            if block not in self._taken:
                raise SlotError(f"block {block} is given back but was not taken")
            self._taken.remove(block)
            heappush(self._free, block)
