"""An engine in its own process: every request gets its own answer or an error, whatever happens to the process.

Tests share two processes: the engine's own, and one that stands in where only its life counts.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from calm import save
from calm.config import Measure
from calm.errors import CalibrationError, CalmError, ConfigError, DataError
from serve import remote as module
from serve.desk import FAILED
from serve.engine import Engine
from serve.errors import Draining, EngineGone
from serve.messages import Batch, Ended, Spoke
from serve.options import EngineOptions, RequestOptions
from serve.remote import IDLE, RemoteEngine
from serve.requests import Answer, Reason, Status
from serve.streams import Stream
from serve.tokenising import SHORT_CHARS
from tests.scripted import early_exit, examples, random_t5

from . import stand_in
from .faulty import POISON, RAISE, SLOW, SLOW_S, work
from .models import confident

Result = TypeVar("Result")
ROOT = Path(__file__).parents[2]
VOCABULARY, LENGTH = 60, 12
OPTIONS = EngineOptions(max_batch=8, max_waiting=200)
PATIENT = 60.0  # a slow machine is no hang
HUNG = 2.0


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all tests; it runs while one of them awaits."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = early_exit(random_t5(vocabulary=VOCABULARY), length=LENGTH)
    return save(model, tmp_path_factory.mktemp("remote") / "model")


@pytest.fixture(scope="module")
def here(folder: Path) -> Engine:
    return Engine(folder, OPTIONS)


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner, folder: Path) -> Iterator[RemoteEngine]:
    made = RemoteEngine(folder, OPTIONS, name="tiny", hung_after=PATIENT, restarts=1, target=work)
    runner.run(made.start())
    assert made.state == "loading"
    with pytest.raises(EngineGone, match="not ready yet"):
        made.submit("w3")
    runner.run(made.ready())
    yield made
    runner.run(made.stop())
    assert made.state == "dead"


@pytest.fixture
def other(runner: asyncio.Runner) -> Iterator[Callable[..., RemoteEngine]]:
    """Starts stand-ins; what is left of them is stopped."""
    made: list[RemoteEngine] = []

    def start(how: str = "echo", wait: bool = True, **options: Any) -> RemoteEngine:
        made.append(RemoteEngine(how, name="m", target=stand_in.work, **{"hung_after": PATIENT, **options}))
        runner.run(made[-1].start())
        if wait:
            runner.run(made[-1].ready())
        return made[-1]

    yield start
    for each in made:
        runner.run(each.stop())


def pid_of(engine: RemoteEngine) -> int:
    assert engine._link is not None and engine._link.pid is not None
    return engine._link.pid


def sources(count: int, seed: int = 3) -> list[str]:
    """None of which means trouble."""
    texts = [row.source for row in examples(VOCABULARY, 2 * count, seed=seed, longest=7)]
    return [text for text in texts if text.split()[0] not in (f"w{SLOW}", f"w{RAISE}", f"w{POISON}")][:count]


async def everything(stream: Stream) -> tuple[list[Spoke], Ended]:
    spokes = [spoke async for spoke in stream]
    assert stream.ended is not None
    return spokes, stream.ended


def text_of(spokes: list[Spoke], ended: Ended) -> str:
    return "".join(spoke.text for spoke in spokes) + ended.text


def tokens_of(spokes: list[Spoke]) -> tuple[int, ...]:
    return tuple(token for spoke in spokes for token in spoke.tokens)


def same(spokes: list[Spoke], ended: Ended, answer: Answer) -> None:
    assert (text_of(spokes, ended), tokens_of(spokes)) == (answer.text, answer.tokens)
    assert ended.emission_layers == answer.emission_layers == tuple(n for spoke in spokes for n in spoke.layers)
    assert (ended.status, ended.reason, ended.certified) == (answer.status, answer.reason, answer.certified)


async def outcome(awaited: Awaitable[Any]) -> Any:
    """What it gives or raises."""
    try:
        return await awaited
    except CalmError as error:
        return error


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


# the engine's own process


def test_it_says_what_it_serves(engine: RemoteEngine) -> None:
    info = engine.info
    assert info is not None and engine.state == "ready"
    assert (info.name, info.num_layers, info.max_target, info.vocab_size) == ("tiny", 4, LENGTH, VOCABULARY)


def test_streamed_answers_are_those_of_generate(engine: RemoteEngine, here: Engine, runner: asyncio.Runner) -> None:
    long = "w7 w8 w9 " * SHORT_CHARS
    asked = [
        ("w3 w4 w5", RequestOptions()),
        ((7, 8, 9, 1), RequestOptions(policy=confident(Measure.softmax, 0.3))),
        (long, RequestOptions(max_tokens=5)),
        ("w9 w10", RequestOptions(temperature=1.0, seed=5)),
    ]

    async def check() -> None:
        for source, options in asked:
            began = time.perf_counter()
            spokes, ended = await everything(engine.submit(source, options))
            same(spokes, ended, here.generate([source], options)[0])
            timing = ended.timing
            assert began <= timing.arrived <= timing.admitted <= timing.first_token <= timing.ended
            assert ended.prompt_tokens == len(here.model.to_ids(source) if isinstance(source, str) else source)
            result = await engine.submit(source, options).result()
            assert result.text == text_of(spokes, ended)

    runner.run(check())


def test_a_hundred_at_once_are_not_mixed_up(engine: RemoteEngine, here: Engine, runner: asyncio.Runner) -> None:
    texts = sources(100)
    options = [
        RequestOptions(policy=confident(Measure.softmax, 0.3), stop=("w4",)) if number % 2 else RequestOptions()
        for number in range(100)
    ]

    async def check() -> list[tuple[list[Spoke], Ended]]:
        streams = [
            engine.submit(*each, id=f"r{number}") for number, each in enumerate(zip(texts, options, strict=True))
        ]
        with pytest.raises(ConfigError, match="in use"):
            engine.submit("w3", id="r7")
        return await asyncio.gather(*map(everything, streams))

    found = runner.run(check())
    for (spokes, ended), answer in zip(found, here.generate(texts, options), strict=True):
        same(spokes, ended, answer)
    assert [ended.id for _, ended in found] == [f"r{number}" for number in range(100)]
    assert (engine.load.running, engine.load.waiting) == (0, 0) and not engine._streams


def test_refusals_are_the_errors_that_they_were(engine: RemoteEngine, runner: asyncio.Runner) -> None:
    cases: list[tuple[Any, dict[str, Any], type[CalmError], str]] = [
        ("w3 \ud800", {}, DataError, "lone surrogate"),
        ([5, VOCABULARY], {}, DataError, "none of the vocabulary"),
        (b"w3", {}, DataError, "got bytes"),
        ("w3", {"max_tokens": LENGTH + 1}, ConfigError, "max_tokens=13"),
        ("w3", {"tolerance": 0.1}, CalibrationError, "no calibration"),
    ]

    async def check() -> None:
        for source, options, kind, said in cases:
            stream = engine.submit(source, RequestOptions(**options))
            with pytest.raises(kind, match=said):
                await anext(stream)
            with pytest.raises(kind, match=said):
                await stream.result()

    runner.run(check())
    assert not engine._streams


def test_who_stops_reading_frees_the_slot_within_a_step(engine: RemoteEngine, runner: asyncio.Runner) -> None:
    async def check(how: str) -> None:
        batches: list[Batch] = []
        stream = engine.submit(f"w{SLOW} w4", RequestOptions(ignore_eos=True))
        first = await anext(stream)
        engine.on_batch = batches.append
        if how == "reader":
            reader = asyncio.create_task(stream.result())
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
        else:
            await stream.aclose()
        stream.cancel()
        ended = await stream.result()
        assert (ended.status, ended.reason, ended.expired) == (Status.cancelled, Reason.cancelled, False)
        # the step that ran when it was told, and the next, in which the row is gone
        assert len(batches) <= 2 and batches[-1].load.running == 0
        assert len(first.tokens) <= ended.tokens <= len(first.tokens) + 2 < LENGTH

    try:
        runner.run(check("reader"))
        runner.run(check("aclose"))
    finally:
        engine.on_batch = None


def test_a_deadline_ends_a_request_where_it_is(engine: RemoteEngine, runner: asyncio.Runner) -> None:
    async def check() -> None:
        late = engine.submit(f"w{SLOW}", RequestOptions(ignore_eos=True), deadline=time.perf_counter() + 4 * SLOW_S)
        in_time = engine.submit("w3", deadline=time.perf_counter() + 600)
        ended = await late.result()
        assert ended.expired and ended.status is Status.cancelled and ended.tokens < LENGTH
        assert (await in_time.result()).status is Status.finished

    runner.run(check())


def test_poison_fails_alone(engine: RemoteEngine, here: Engine, runner: asyncio.Runner) -> None:
    texts = sources(6, seed=8)

    async def check() -> list[Ended]:
        streams = [engine.submit(text) for text in [*texts[:3], f"w{POISON} w3", *texts[3:]]]
        return [await stream.result() for stream in streams]

    found = runner.run(check())
    bad = found.pop(3)
    assert (bad.status, bad.error) == (Status.failed, FAILED)
    assert [ended.text for ended in found] == [answer.text for answer in here.generate(texts)]


def test_after_a_step_that_raised_the_others_go_on(engine: RemoteEngine, here: Engine, runner: asyncio.Runner) -> None:
    async def check() -> None:
        assert (await engine.submit(f"w{RAISE} w3", RequestOptions(ignore_eos=True)).result()).error == FAILED
        assert (await engine.submit("w3 w4").result()).text == here.generate(["w3 w4"])[0].text

    runner.run(check())
    assert engine.state == "ready"


def test_a_slow_reader_holds_nobody_up_and_gets_one_piece(
    engine: RemoteEngine, here: Engine, runner: asyncio.Runner
) -> None:
    async def check() -> None:
        slow = engine.submit("w3 w4")
        await asyncio.gather(*(engine.submit(text).result() for text in sources(20)))
        await until(lambda: slow.over)
        spokes, ended = await everything(slow)
        assert len(spokes) == 1
        same(spokes, ended, here.generate(["w3 w4"])[0])

    runner.run(check())


def test_a_hook_that_raises_costs_nothing(engine: RemoteEngine, runner: asyncio.Runner) -> None:
    def broken(batch: Batch) -> None:
        raise RuntimeError("no metrics")

    engine.on_batch = broken
    try:
        assert runner.run(engine.submit("w3").result()).status is Status.finished
    finally:
        engine.on_batch = None


def test_killed_under_load_every_request_fails_and_it_starts_anew(
    engine: RemoteEngine, here: Engine, runner: asyncio.Runner
) -> None:
    async def check() -> None:
        streams = [engine.submit(f"w{SLOW} w{3 + n}", RequestOptions(ignore_eos=True)) for n in range(40)]
        readers = [asyncio.create_task(outcome(everything(stream))) for stream in streams]
        await until(lambda: engine.load.running == OPTIONS.max_batch and engine.load.waiting == 32)
        pid = pid_of(engine)
        os.kill(pid, signal.SIGKILL)
        began = time.perf_counter()
        found = await asyncio.gather(*readers)
        assert time.perf_counter() - began < 2 and engine.state in ("dead", "loading")
        assert all(type(each) is EngineGone for each in found)
        assert engine.load.running == 0 and not engine._streams
        with pytest.raises(EngineGone):
            engine.submit("w3")
        await engine.ready()
        assert engine.state == "ready" and pid_of(engine) != pid and not psutil.pid_exists(pid)
        assert (await engine.submit("w3 w4").result()).text == here.generate(["w3 w4"])[0].text

    runner.run(check())


def test_it_drains_and_is_gone(engine: RemoteEngine, runner: asyncio.Runner) -> None:
    """The last of its tests: a group's SIGTERM and Ctrl-C reach the process, and it still answers what runs."""
    pid = pid_of(engine)

    async def check() -> None:
        stream = engine.submit(f"w{SLOW}", RequestOptions(ignore_eos=True))
        await anext(stream)
        for signum in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, signum)
        stopping = asyncio.create_task(engine.stop(60))
        await asyncio.sleep(0)
        assert engine.state == "draining"
        with pytest.raises(Draining):
            engine.submit("w3")
        ended = await stream.result()
        assert ended.status is Status.finished and ended.tokens == LENGTH
        await stopping
        assert engine.state == "dead" and not psutil.pid_exists(pid)
        with pytest.raises(Draining):
            engine.submit("w3")
        with pytest.raises(Draining):
            await engine.ready()

    runner.run(check())


def test_the_process_ends_with_its_parent(folder: Path) -> None:
    parent = f"""
import asyncio, os
from serve.remote import RemoteEngine

async def main():
    engine = RemoteEngine({str(folder)!r}, name="tiny", hung_after=600)
    await engine.start()
    print(engine._link.pid, flush=True)
    await engine.ready()
    os.kill(os.getpid(), 9)

if __name__ == "__main__":
    asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert ran.returncode == -signal.SIGKILL
    gone(int(ran.stdout))


# a stand-in: only the life of the process counts


def gone(pid: int) -> None:
    """Wait until nothing but its parent's interest is left of a process."""
    state = Path(f"/proc/{pid}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":
        os.sched_yield()


@pytest.mark.parametrize("word", ["hang", "die"])
def test_a_process_that_hangs_or_dies_is_noticed_and_replaced(
    word: str, other: Callable[..., RemoteEngine], runner: asyncio.Runner
) -> None:
    engine = other(restarts=1, hung_after=HUNG if word == "hang" else PATIENT)
    seen: list[float] = []
    engine.on_batch = lambda batch: seen.append(time.perf_counter())

    async def check() -> None:
        stays = [engine.submit("stay") for _ in range(3)]
        await engine.submit("a b").result()
        pid = pid_of(engine)
        stays.append(engine.submit(word))
        found = [await outcome(stream.result()) for stream in stays]
        noticed = time.perf_counter() - seen[-1]
        assert all(type(each) is EngineGone for each in found)
        assert engine.state == "hung" if word == "hang" else engine.state in ("dead", "loading")
        assert noticed < HUNG + 0.5
        assert word == "die" or noticed > 0.8 * HUNG
        with pytest.raises(EngineGone):
            engine.submit("c")
        await engine.ready()
        assert not psutil.pid_exists(pid) and engine.load == IDLE
        assert (await engine.submit("c d").result()).text == "c d "
        os.kill(pid_of(engine), signal.SIGKILL)  # and that was its last life
        await until(lambda: engine.state == "dead")
        with pytest.raises(EngineGone, match="has ended"):
            await engine.ready()

    runner.run(check())


def test_a_process_that_reads_nothing_does_not_stop_the_server(
    other: Callable[..., RemoteEngine], runner: asyncio.Runner
) -> None:
    """It is stopped in mid-air with a full pipe; what is sent meanwhile waits, and the loop goes on."""
    engine = other(hung_after=HUNG)

    async def check() -> None:
        os.kill(pid_of(engine), signal.SIGSTOP)
        began = time.perf_counter()
        streams = [engine.submit("stay " * 2**18) for _ in range(8)]
        assert time.perf_counter() - began < 1
        streams[0].cancel()
        found = [await outcome(stream.result()) for stream in streams]
        assert all(type(each) is EngineGone for each in found)

    runner.run(check())


def test_an_engine_whose_steps_are_long_is_given_as_long(
    other: Callable[..., RemoteEngine], runner: asyncio.Runner
) -> None:
    engine = other("slow", hung_after=0.5)

    async def check() -> None:
        assert (await engine.submit("nap").result()).status is Status.finished  # stand_in.NAP_S without a word
        assert engine.state == "ready"
        with pytest.raises(EngineGone):
            await engine.submit("hang").result()

    runner.run(check())


def test_what_the_process_logs_is_in_the_servers_log(
    other: Callable[..., RemoteEngine], runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.run(other().submit("log").result())
    assert ("serve.somewhere", logging.WARNING, "100 %s sure") in caplog.record_tuples


def test_a_loop_that_stands_still_takes_nobody_for_hung(
    other: Callable[..., RemoteEngine], runner: asyncio.Runner
) -> None:
    engine = other(hung_after=1.0)

    async def check() -> None:
        time.sleep(1.5)
        assert (await engine.submit("a").result()).text == "a "
        assert engine.state == "ready"

    runner.run(check())


def test_draining_waits_so_long_and_aborts_the_rest(other: Callable[..., RemoteEngine], runner: asyncio.Runner) -> None:
    engine = other()
    pid = pid_of(engine)

    async def check() -> None:
        stays = [engine.submit("stay") for _ in range(3)]
        began = time.perf_counter()
        stopping = asyncio.create_task(engine.stop(0.3))
        ended = [await stream.result() for stream in stays]
        assert time.perf_counter() - began >= 0.3
        assert [each.status for each in ended] == [Status.cancelled] * 3
        await stopping
        assert engine.state == "dead" and not psutil.pid_exists(pid)
        await engine.stop(5)  # again is nothing

    runner.run(check())


def test_a_second_stop_ends_the_patience_of_the_first(
    other: Callable[..., RemoteEngine], runner: asyncio.Runner
) -> None:
    engine = other()

    async def check() -> None:
        stream = engine.submit("stay")
        first = asyncio.create_task(engine.stop(600))
        await asyncio.sleep(0)
        await engine.stop(0)
        assert engine.state == "dead" and (await stream.result()).status is Status.cancelled
        await first

    runner.run(check())


def test_a_process_that_will_not_leave_is_killed(
    other: Callable[..., RemoteEngine], runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEFT_S", 0.2)
    monkeypatch.setattr(module, "ABORTED_S", 0.2)
    engine = other("stubborn")
    pid = pid_of(engine)

    async def check() -> None:
        stream = engine.submit("stay")
        await engine.submit("a").result()
        await engine.stop(0.1)
        assert not psutil.pid_exists(pid)
        with pytest.raises(EngineGone):
            await stream.result()

    runner.run(check())


def test_one_that_is_stopped_while_it_loads_is_gone_at_once(
    other: Callable[..., RemoteEngine], runner: asyncio.Runner
) -> None:
    engine = other("loads", wait=False)
    pid = pid_of(engine)
    waiting = runner.run(waits_and_stops(engine))
    assert isinstance(waiting, Draining) and engine.state == "dead" and not psutil.pid_exists(pid)


async def waits_and_stops(engine: RemoteEngine) -> Any:
    waiting = asyncio.create_task(outcome(engine.ready()))
    await asyncio.sleep(0)
    await engine.stop(60)
    return await waiting


@pytest.mark.parametrize(
    ("how", "error", "said"), [("fails", CalmError, "^no such folder; give another$"), ("dies", EngineGone, "ended")]
)
def test_one_that_never_gets_ready_says_why(
    how: str, error: type[CalmError], said: str, other: Callable[..., RemoteEngine], runner: asyncio.Runner
) -> None:
    engine = other(how, wait=False, restarts=1)
    with pytest.raises(error, match=said):
        runner.run(engine.ready())
    assert engine.state == "dead" and engine.info is None
    with pytest.raises(ConfigError, match="started once"):
        runner.run(engine.start())


def test_nothing_is_left_after_many_lives(runner: asyncio.Runner) -> None:
    process = psutil.Process()

    async def life() -> None:
        engine = RemoteEngine("echo", name="m", target=stand_in.work, hung_after=PATIENT)
        await engine.start()
        await engine.ready()
        await engine.submit("a").result()
        await engine.stop(1)

    def left() -> tuple[int, int, int]:
        return process.num_fds(), process.num_threads(), len(process.children())

    runner.run(life())  # what multiprocessing keeps for good is there now
    before = left()
    for _ in range(8):
        runner.run(life())
    assert left() == before


def test_a_server_needs_no_torch() -> None:
    program = "import serve.remote, sys; print('torch' in sys.modules, 'fastapi' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]
