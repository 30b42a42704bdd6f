"""Work that is for a client, and stops when the client leaves."""

import asyncio

from starlette.types import Receive, Scope

DROP = "calm.drop"  # in the scope of this server's connections: closes one without waiting for its client


async def until_gone(receive: Receive, work: "asyncio.Task[None]") -> bool:
    """Wait for the work, and cancel it at once when the client's connection closes; True when it came to that.

    The request's body must have been read. Raises what the work raises.
    """
    watch = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((watch, work), return_when=asyncio.FIRST_COMPLETED)
        gone = not work.done()
    finally:
        for task in (watch, work):
            task.cancel()
        await asyncio.gather(watch, work, return_exceptions=True)
    if not gone:
        work.result()
    return gone


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def drop(scope: Scope) -> None:
    """Close the connection of a response that cannot be finished, whatever its client has not read yet."""
    close = scope.get(DROP)
    if close is not None:
        close()
