"""Who waits and who is next: a bounded first-come-first-served queue, and which sources are encoded together."""

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence

from calm.rules import next_group

from .errors import QueueFull
from .requests import Row


class Waiting:
    """Requests that wait for a slot, in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: deque[Row] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def add(self, row: Row) -> None:
        """Raises QueueFull."""
        if len(self._rows) >= self._limit:
            raise QueueFull(f"{self._limit} requests wait already; send it again later")
        self._rows.append(row)

    def put_back(self, rows: Sequence[Row]) -> None:
        """At the head of the queue, in this order, whatever the limit: they had waited already."""
        self._rows.extendleft(reversed(rows))

    def remove(self, row: Row) -> None:
        self._rows.remove(row)

    @property
    def first(self) -> Row:
        return self._rows[0]

    def group(self, rows: int, alike: Callable[[int], int], known: Container[bytes]) -> list[Row]:
        """At most ``rows`` requests that are encoded together (calm.rules.next_group); they leave the queue."""
        chosen = next_group(self._rows, rows, alike, known)
        if chosen[0] is self.first and len(chosen) == 1:
            return [self._rows.popleft()]
        names = {id(row) for row in chosen}
        self._rows = deque(row for row in self._rows if id(row) not in names)
        return chosen
