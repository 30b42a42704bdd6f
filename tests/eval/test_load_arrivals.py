"""When requests are sent: the schedule's distribution, and a loop that neither drifts nor waits for answers."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from eval.load_arrivals import arrivals, open_loop

INF = float("inf")


class Clock:
    """Time passes when somebody sleeps or works; ``over`` is how much too long every sleep takes."""

    def __init__(self, over: float = 0.0) -> None:
        self.time, self.over = 100.0, over

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        until = self.time + seconds + (self.over if seconds else 0.0)
        await asyncio.sleep(0)
        self.time = max(self.time, until)


def loop(
    clock: Clock, due: list[float], work: Callable[[int], None] = lambda number: None
) -> tuple[list[float], float]:
    """Seconds after the zero at which each was sent, and the duration."""

    async def send(number: int, at: float, zero: float) -> float:
        assert at == due[number]
        sent = clock.now() - zero
        work(number)
        return sent

    return asyncio.run(open_loop(due, send, now=clock.now, sleep=clock.sleep))


def test_the_last_request_is_due_at_n_over_rate_and_gaps_follow_their_distribution() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        due = np.array(arrivals(20_000, 8.0, burstiness, seed=7))
        assert due[-1] == pytest.approx(20_000 / 8.0, rel=1e-12)
        gaps = np.diff(due, prepend=0.0)
        assert (gaps >= 0).all()
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)  # a gamma's
        assert stats.kstest(gaps, stats.gamma(burstiness, scale=1 / (8.0 * burstiness)).cdf).pvalue > 0.01
    assert stats.kstest(np.diff(arrivals(20_000, 8.0, 1.0, seed=7)), stats.expon(scale=1 / 8.0).cdf).pvalue > 0.01


def test_a_schedule_is_that_of_its_seed_stretched_to_its_rate() -> None:
    slow, fast = arrivals(50, 2.0, seed=1), arrivals(50, 8.0, seed=1)
    assert slow == arrivals(50, 2.0, seed=1) != arrivals(50, 2.0, seed=2)
    assert slow == pytest.approx([4 * at for at in fast])
    assert arrivals(4, 2.0, burstiness=INF) == [0.5, 1.0, 1.5, 2.0]
    assert arrivals(3, INF) == [0.0, 0.0, 0.0]
    assert arrivals(2, 4.0, burstiness=1e-9)[-1] == 0.5


def test_the_schedule_is_made_as_vllms_is() -> None:
    """Gaps of gamma(burstiness, 1 / (rate burstiness)), added up, all by one factor so that the last is n / rate."""
    n, rate, burstiness = 40, 3.0, 0.5
    draw = np.random.default_rng(11)
    delays = [draw.gamma(burstiness, 1.0 / (rate * burstiness)) for _ in range(n)]
    for i in range(1, n):
        delays[i] += delays[i - 1]
    factor = (n / rate) / delays[-1]
    assert arrivals(n, rate, burstiness, seed=11) == pytest.approx([delay * factor for delay in delays])


def test_sleeps_that_take_too_long_do_not_add_up() -> None:
    clock = Clock(over=0.003)
    sent, _ = loop(clock, [0.1 * i for i in range(1, 101)])
    assert [at - 0.1 * i for i, at in enumerate(sent, 1)] == pytest.approx([0.003] * 100)


def test_requests_are_sent_while_earlier_ones_are_still_waited_for() -> None:
    clock, sent = Clock(), list[float]()

    async def main() -> float:
        all_sent = asyncio.Event()

        async def send(number: int, at: float, zero: float) -> int:
            sent.append(clock.now() - zero)
            if number == 2:
                all_sent.set()
            await all_sent.wait()
            clock.time += 1.0
            return number

        results, duration = await open_loop([1.0, 2.0, 3.0], send, now=clock.now, sleep=clock.sleep)
        assert results == [0, 1, 2]
        return duration

    assert asyncio.run(main()) == pytest.approx(3.0 + 3 * 1.0)
    assert sent == pytest.approx([1.0, 2.0, 3.0])


def test_a_client_that_is_busy_sends_late_and_catches_up() -> None:
    clock = Clock()

    def work(number: int) -> None:
        clock.time += 2.5 if number == 0 else 0.0

    sent, _ = loop(clock, [1.0, 2.0, 3.0, 4.0], work)
    assert sent == pytest.approx([1.0, 3.5, 3.5, 4.0])


def test_everything_at_once_goes_out_in_order() -> None:
    sent, duration = loop(Clock(), arrivals(5, INF))
    assert sent == [0.0] * 5 and duration == 0.0


def test_a_failure_of_the_client_itself_ends_the_run_and_leaves_nothing_behind() -> None:
    async def main() -> list[str]:
        ended: list[str] = []

        async def send(number: int, at: float, zero: float) -> None:
            if number == 1:
                raise ZeroDivisionError
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(f"cancelled {number}")
                raise

        with pytest.raises(ZeroDivisionError):
            await open_loop([0.0, 0.0, 0.0], send)
        await asyncio.sleep(0)
        return ended

    assert asyncio.run(main()) == ["cancelled 0", "cancelled 2"]


def test_an_interrupted_schedule_gives_up_what_is_under_way() -> None:
    async def main() -> list[int]:
        ended: list[int] = []

        async def send(number: int, at: float, zero: float) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(number)
                raise

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(0)
            if seconds > 100:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await open_loop([0.0, 0.0, 1000.0], send, sleep=sleep)
        await asyncio.sleep(0)
        return ended

    assert asyncio.run(main()) == [0, 1]
