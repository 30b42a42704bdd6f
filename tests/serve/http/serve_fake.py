"""The server as a program of its own, with a scripted engine: for tests that send it signals.

python -m tests.serve.http.serve_fake 'drain_s=2' 'held'
"""

import asyncio
import sys
from typing import Any

from serve.http.logs import log_to_stderr
from serve.http.server import serve

from .fakes import NAME, FakeEngine, config_of


class SlowEngine(FakeEngine):
    """Holds every answer until it is asked to leave, and for a while then."""

    async def stop(self, drain_seconds: float) -> None:
        asyncio.get_running_loop().call_later(0.3, setattr, self, "held", False)
        await super().stop(drain_seconds)


def main(argv: list[str]) -> int:
    log_to_stderr()
    settings: dict[str, Any] = {"port": 0}
    engine = FakeEngine()
    for word in argv:
        name, equal, value = word.partition("=")
        if equal:
            settings[name] = float(value)
        else:
            engine = {"slow": SlowEngine, "held": FakeEngine}[name]()
            engine.held = True
    return serve(engine, config_of(**settings), NAME, None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
