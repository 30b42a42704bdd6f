"""The engine's own process, in which the first word of a source makes steps slow or raise, or its numbers bad."""

import socket
import time
from typing import Any

from serve import worker
from serve.worker import Settings

SLOW, RAISE, POISON = 50, 51, 52
SLOW_S = 0.1  # a step with such a row


def work(end: socket.socket, settings: Settings) -> None:
    from serve.engine import Engine

    step, seat = Engine.step, Engine._seat

    def faulty(self: Engine) -> Any:
        words = {row.source[0] for row in self._running if row.tokens}
        if SLOW in words:
            time.sleep(SLOW_S)
        if RAISE in words:
            raise RuntimeError("of the secret prompt")
        return step(self)

    def seated(self: Engine, row: Any, kv: Any) -> bool:
        bad = row.source[0] == POISON
        return seat(self, row, tuple(each * float("nan") for each in kv) if bad else kv)  # type: ignore[arg-type]

    Engine.step, Engine._seat = faulty, seated  # type: ignore[method-assign, assignment]
    worker.work(end, settings)
