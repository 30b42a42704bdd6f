"""Before a load: is there a server, may we use it, which model is it, and does it take what will be sent?

Each way to be wrong is one line that names the setting to change.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from calm.errors import CalmError
from calm.load_config import PLAIN

from .common import say
from .load_client import KEY, Client
from .load_connection import Disconnected
from .load_samples import ErrorKind, Sample
from .load_stream import Malformed, Reply

PAUSE_S = 0.5  # between two looks
MODELS = "/v1/models"
NAMED = 5  # models in a message


class NotReady(CalmError):
    """The server cannot be measured as asked."""


async def find_model(
    client: Client,
    url: str,
    served_model: str | None,
    timeout: float,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> str:
    """Wait until the server answers; the model asked for, or the first that it lists.

    A server that cannot be reached, or says 503, is given ``timeout`` seconds; any other answer counts at once.

    Raises:
        NotReady: there is none in time, it is no such server, it wants a key, or does not have the model.
    """
    deadline, waiting = now() + timeout, False
    while True:
        left = max(deadline - now(), PAUSE_S)
        try:
            reply = await client.get(MODELS, left)
            if reply.status != 503:
                return _model(reply, url, served_model)
            found = f"it says 503: {reply.message}" if reply.body else "it says 503"
        except TimeoutError:
            found = "it accepts connections and says nothing"
        except Malformed as error:
            raise NotReady(f"url={url} is no completions server: {error}; check the port, and http or https") from None
        except Disconnected as error:
            found = str(error)
        if now() >= deadline:
            raise NotReady(
                f"no server is ready at url={url} within {timeout:g} s ({found}); start one, or give its url= "
                "(ready_timeout= waits longer)"
            )
        if not waiting:
            say(f"waiting up to {timeout:g} s for url={url}: {found}")
            waiting = True
        await sleep(PAUSE_S)


def _model(reply: Reply, url: str, served_model: str | None) -> str:
    _check_key(reply.status, url)
    names = _names(reply) if reply.status == 200 else None
    if names is None:
        if served_model is not None and reply.status == 404:  # a server that lists nothing; the probe will tell
            return served_model
        raise NotReady(
            f"url={url} is no completions server: it answers {reply.status} to {MODELS}"
            f"{'' if reply.status != 200 else ', with no list of models'}; give the address before /v1"
        )
    if not names:
        raise NotReady(f"url={url} lists no model; load one there")
    if served_model is not None and served_model not in names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        raise NotReady(f"served_model={served_model} is not at url={url}; it has {', '.join(names[:NAMED])}{more}")
    return served_model or names[0]


def _names(reply: Reply) -> list[str] | None:
    try:
        found: Any = json.loads(bytes(reply.body))
        return [str(each["id"]) for each in found["data"]]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def _check_key(status: int | None, url: str) -> None:
    if status in (401, 403):
        raise NotReady(f"url={url} answers {status}: it wants an API key, or another one; set {KEY} in the environment")


async def probe(
    client: Client,
    url: str,
    way: str,
    body: bytes,
    timeout: float,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """One request of a way, whole. A server that says 503, as one does that still loads, is given ``timeout`` seconds.

    Raises:
        NotReady: it was not answered; with what the server said.
    """
    deadline = now() + timeout
    while (sample := await client.complete(body)).status == 503 and now() < deadline:
        await sleep(PAUSE_S)
    if sample.error is None:
        return
    _check_key(sample.status, url)
    raise NotReady(f"way {way}: the first request to url={url} failed: {_told(sample)}{_advice(sample, way)}")


def _told(sample: Sample) -> str:
    status = f" {sample.status}" if sample.error in (ErrorKind.status, ErrorKind.refused) else ""
    assert sample.error is not None
    return f"{sample.error.value}{status}: {sample.detail}" if sample.detail else f"{sample.error.value}{status}"


def _advice(sample: Sample, way: str) -> str:
    if sample.status == 404:
        return "; check served_model= and url="
    if sample.status in (400, 422) and way != PLAIN:
        return "; a server that is not calm's takes only ways=[plain]"
    return ""
