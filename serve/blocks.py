"""Which blocks of a paged cache are whose (vLLM, 2309.06180, section 4): ids only, no numbers."""

from .slots import SlotError


class BlockPool:
    """``count`` blocks, numbered from ``first`` on; the lowest free ones are handed out."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count = count
        self._free = list(range(first, first + count))[::-1]
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._taken)

    def take(self) -> int:
        """Raises SlotError where none is free."""
        if not self._free:
            raise SlotError("no block of the cache is free")
        block = self._free.pop()
        self._taken.add(block)
        return block

    def give_back(self, blocks: list[int]) -> None:
        """Raises SlotError for a block that nobody has."""
        for block in blocks:
            if block not in self._taken:
                raise SlotError(f"block {block} is given back but was not taken")
            self._taken.remove(block)
        self._free = sorted([*self._free, *blocks], reverse=True)
