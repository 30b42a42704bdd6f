"""The engine's own process, whose decoding a test holds and lets go: what is to happen in between is certain to.

Not a step is faked: while the gate is shut, requests come, get slots, leave and end as they always do, and the only
thing that is left out is the wave that would give the running rows their next token.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

from serve.link import Target
from serve.worker import Settings

BREAK = 53  # the first word of a source whose every wave raises
POLL_S = 0.005


class Gate:
    """Shut by a file at ``path``. For engines whose target is ``partial(gated, path, work)``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def hold(self, at: int = 0) -> None:
        """Nobody gets a token any more once somebody who runs has so many."""
        new = self.path.with_suffix(".new")
        new.write_text(str(at), encoding="ascii")
        os.replace(new, self.path)

    def open(self) -> None:
        self.path.unlink(missing_ok=True)


def gated(path: str, inner: Target, end: socket.socket, settings: Settings) -> None:
    """``inner``, held where the gate says so; a wave with a row that begins with ``BREAK`` raises."""
    import torch

    from serve.desk import Desk
    from serve.engine import Engine, Step

    stepped, made = Desk._stepped, Engine.__init__

    def held(self: Desk) -> Step:
        engine = self._engine
        if not _shut(path, [row.step for row in engine._running]):
            return stepped(self)
        time.sleep(POLL_S)
        with torch.inference_mode():
            engine.clock.begin()
            engine._admit()
            return Step([], engine._answers(), None)

    def fragile(self: Engine, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        new_wave = self.turns._new_wave

        def wave(rule: Any, rows: Any, bucket: int | None) -> Any:
            if any(row.source[0] == BREAK and row.tokens for row in rows):
                raise RuntimeError("of the secret prompt")
            return new_wave(rule, rows, bucket)

        self.turns._new_wave = wave

    Desk._stepped = held  # type: ignore[method-assign]
    Engine.__init__ = fragile  # type: ignore[method-assign]
    inner(end, settings)


def _shut(path: str, steps: list[int]) -> bool:
    try:
        at = int(Path(path).read_text(encoding="ascii"))
    except FileNotFoundError:
        return False
    return at == 0 or any(step >= at for step in steps)
