"""Who waits and who is next: a bounded first-come-first-served queue, and which sources are encoded together."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import chain

from calm.rules import next_group

from .errors import QueueFull
from .requests import Row


class Waiting:
    """Requests that wait for a slot: those that had one and gave it up, then the others in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: deque[Row] = deque()
        self._preempted: list[Row] = []

    def __len__(self) -> int:
        return len(self._preempted) + len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return chain(self._preempted, self._rows)

    def add(self, row: Row) -> None:
        """Raises QueueFull."""
        if len(self) >= self._limit:
            raise QueueFull(f"{self._limit} requests wait already; send it again later")
        self._rows.append(row)

    def put_back(self, rows: Sequence[Row]) -> None:
        """To where they were in the order of arrival, whatever the limit: they had waited already.

        Rows whose answers have begun go before all others.
        """
        for row in rows:
            insort(self._preempted if row.tokens else self._rows, row, key=lambda each: each.number)

    def remove(self, row: Row) -> None:
        (self._preempted if row in self._preempted else self._rows).remove(row)

    @property
    def first(self) -> Row:
        return self._preempted[0] if self._preempted else self._rows[0]

    def group(self, rows: int, alike: Callable[[int], int], known: Container[bytes]) -> list[Row]:
        """At most ``rows`` requests that are encoded together (calm.rules.next_group); they leave the queue.

        A row that was preempted goes alone.
        """
        if self._preempted:
            return [self._preempted.pop(0)]
        chosen = next_group(self._rows, rows, alike, known)
        if chosen[0] is self.first and len(chosen) == 1:
            return [self._rows.popleft()]
        names = {id(row) for row in chosen}
        self._rows = deque(row for row in self._rows if id(row) not in names)
        return chosen
