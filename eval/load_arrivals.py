"""When requests are sent: a schedule fixed beforehand, and the loop that keeps to it whatever the server does.

Gaps are drawn from a gamma distribution of mean 1/rate and shape ``burstiness`` (1: exponential, a Poisson process;
below 1: bursts; infinite: equal gaps). They are added up and then stretched so that the last request is due at exactly
n/rate: rates of different seeds are then the same. An infinite rate sends everything at once.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")


def arrivals(n: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the schedule's zero at which each of ``n`` requests is due, ascending.

    Schedules of one seed and burstiness are the same up to their rate.
    """
    import numpy as np

    if math.isinf(rate):
        return [0.0] * n
    even = math.isinf(burstiness)
    gaps = np.ones(n) if even else np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, size=n)
    due = np.cumsum(gaps)
    if due[-1] == 0.0:  # gaps too small for a float: a single burst
        return [n / rate] * n
    return [float(at) for at in due * (n / rate / due[-1])]


async def open_loop(
    due: list[float],
    send: Callable[[int, float, float], Awaitable[Result]],
    *,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> tuple[list[Result], float]:
    """Send each request when it is due, without waiting for earlier ones.

    Each wait is from the clock's reading to the due time, so that delays do not add up.

    Args:
        send: called with a request's number, its due time and the schedule's zero on the clock.

    Returns:
        What ``send`` brought, in order, and the seconds from the schedule's zero until everything was back.
    """
    zero = now()
    sent: list[asyncio.Future[Result]] = []
    try:
        for number, at in enumerate(due):
            await sleep(max(0.0, zero + at - now()))  # also when late: those already under way get their turn
            sent.append(asyncio.ensure_future(send(number, at, zero)))
        results = await asyncio.gather(*sent)
    except BaseException:
        for each in sent:
            each.cancel()
        raise
    return list(results), now() - zero
