"""Interleaved pairs on clocks that are told: who runs when, what a ratio is, and when a machine is refused."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from calm.errors import CalmError, ConfigError
from eval.clocks import (
    Clocked,
    Contender,
    Load,
    Noise,
    Paired,
    ProcLoad,
    look,
    median_ratio,
    paired,
    uncollected,
)


@dataclass
class Machine:
    """A clock that only work and others move.

    Attributes:
        foreign: seconds of CPU that others take per second.
        slower: by round and name, a factor on the work of that turn.
    """

    cores: int = 2
    foreign: float = 0.0
    now: float = 0.0
    own: float = 0.0
    log: list[tuple[str, int]] = field(default_factory=list)

    def contender(
        self, name: str, start: float, step: float, slow: Callable[[int], float] = lambda turn: 1.0
    ) -> Contender:
        def run(tokens: int) -> None:
            turn = sum(who == name for who, _ in self.log)
            self.log.append((name, tokens))
            self.wait((start + step * tokens) * slow(turn))
            self.own += (start + step * tokens) * slow(turn)

        return Contender(name, run)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def load(self) -> Load:
        return Load(100.0 + self.own + self.foreign * self.now, self.own, self.cores)

    def time(self, contenders: list[Contender], repeats: int = 3, **options: object) -> Paired:
        given: dict[str, object] = {"now": lambda: self.now, "load": self.load, **options}
        return paired(contenders, 4, 12, repeats, **given)  # type: ignore[arg-type]


def test_clocks_tell_a_step_from_a_call() -> None:
    machine = Machine()
    found = machine.time([machine.contender("slow", 3.0, 2.0), machine.contender("fast", 3.0, 0.5)])
    assert found.seconds("slow", Clocked.decode) == pytest.approx([2.0] * 3)
    assert found.seconds("slow", Clocked.call) == pytest.approx([27.0] * 3)
    assert found.speedup("fast", "slow", Clocked.decode) == pytest.approx(4.0)
    assert found.speedup("fast", "slow", Clocked.call) == pytest.approx(27 / 9)
    assert found.noise.again == {clock: pytest.approx(1.0) for clock in Clocked} and found.noise.foreign == 0.0
    assert not found.noise.noisy


def test_turns_alternate_and_warm_ups_do_not_count() -> None:
    machine, ticks = Machine(), []
    contenders = [machine.contender(name, 1.0, 1.0) for name in ("a", "b", "c")]
    found = machine.time(contenders, repeats=2, warmups=1, tick=lambda: ticks.append(1))
    one_round = [(name, tokens) for name in "abac" for tokens in (4, 12)]
    assert machine.log == one_round * 3 and len(ticks) == 12
    assert {name: len(samples) for name, samples in found.samples.items()} == {"a": 2, "b": 2, "a (again)": 2, "c": 2}


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """A round that was slow for all changes nothing; one that was slow for one is an outlier."""
    machine = Machine()
    slow = {0: 1.0, 1: 1.0, 2: 5.0, 3: 5.0}
    base = machine.contender("a", 0.0, 2.0, lambda turn: slow.get(turn // 2, 1.0))  # a has two turns a round
    other = machine.contender("b", 0.0, 1.0, lambda turn: {2: 5.0, 3: 5.0, 4: 9.0, 5: 9.0}.get(turn, 1.0))
    found = machine.time([base, other], repeats=5, warmups=0, allow_noisy=True)
    ratios = [a / b for a, b in zip(found.seconds("a", Clocked.call), found.seconds("b", Clocked.call), strict=True)]
    assert found.speedup("b", "a", Clocked.call) == pytest.approx(sorted(ratios)[2]) == pytest.approx(2.0)


def test_a_busy_machine_is_refused_with_both_figures() -> None:
    machine = Machine(cores=2, foreign=0.3)
    with pytest.raises(
        CalmError, match=r"others had 15.0% of its CPU \(limit 5%\).*decode 1.000, call 1.000.*allow_no"
    ):
        machine.time([machine.contender("a", 1.0, 1.0)])
    quiet = Machine(cores=2, foreign=0.09)
    assert quiet.time([quiet.contender("a", 1.0, 1.0)]).noise.foreign == pytest.approx(0.045)


def test_a_baseline_unlike_itself_is_refused() -> None:
    def drifting(machine: Machine) -> Contender:
        return machine.contender("a", 1.0, 1.0, lambda turn: 1.0 + 0.08 * (turn // 2 % 2))

    machine = Machine()
    with pytest.raises(CalmError, match=r"others had 0.0%.*decode 0.926, call 0.926 \(limit 5% from 1\)"):
        machine.time([drifting(machine)])
    machine = Machine()
    found = machine.time([drifting(machine)], allow_noisy=True)
    assert found.noise.noisy and found.noise.to_json()["noisy"] is True
    assert found.noise.to_json()["again"]["decode"] == pytest.approx(1 / 1.08)


def test_a_step_that_takes_no_time_gives_no_ratio_and_is_noise() -> None:
    assert median_ratio([1.0, 2.0], [1.0, 0.0]) != median_ratio([1.0, 2.0], [1.0, 0.0])
    machine = Machine()
    with pytest.raises(CalmError, match="decode nan"):
        machine.time([machine.contender("a", 1.0, 0.0)])
    assert Noise(float("nan")).noisy


@pytest.mark.parametrize(
    ("names", "few", "many", "repeats"),
    [([], 1, 2, 1), (["a", "a"], 1, 2, 1), (["a"], 2, 2, 1), (["a"], 0, 2, 1), (["a"], 1, 2, 0)],
)
def test_what_cannot_be_compared_is_refused(names: list[str], few: int, many: int, repeats: int) -> None:
    machine = Machine()
    with pytest.raises(ConfigError):
        paired([machine.contender(name, 1.0, 1.0) for name in names], few, many, repeats)
    assert not machine.log


def test_a_name_that_took_no_part_is_an_error() -> None:
    machine = Machine()
    with pytest.raises(ConfigError, match="'b' was not timed; there are a, a .again."):
        machine.time([machine.contender("a", 1.0, 1.0)]).seconds("b", Clocked.call)


def test_a_look_beforehand_sees_who_is_there() -> None:
    machine = Machine(cores=4, foreign=2.0)
    noise = look(1.5, machine.load, lambda: machine.now, machine.wait)
    assert noise.foreign == pytest.approx(0.5) and not noise.again
    with pytest.raises(CalmError, match="others had 50.0% of its CPU"):
        noise.check()


def process(root: Path, pid: int, parent: int, ticks: tuple[int, int, int, int]) -> None:
    (root / str(pid)).mkdir(exist_ok=True)
    before = " ".join("0" * 9)
    times = " ".join(map(str, ticks))
    (root / str(pid) / "stat").write_text(f"{pid} (a ) name) S {parent} {before} {times} 20 0 1 0\n")


def test_proc_tells_our_processes_from_others(tmp_path: Path) -> None:
    import os

    tick = os.sysconf("SC_CLK_TCK")
    lines = ["cpu  100 20 30 1000 50 1 2 3 40 0", "cpu0 1 1 1 1", "cpu1 1 1 1 1", "intr 5"]
    (tmp_path / "stat").write_text("\n".join(lines) + "\n")
    process(tmp_path, 10, 1, (1, 2, 3, 4))  # we, and our children that have ended
    process(tmp_path, 11, 10, (10, 0, 0, 0))
    process(tmp_path, 12, 11, (20, 0, 0, 0))
    process(tmp_path, 13, 1, (40, 0, 0, 0))
    process(tmp_path, 14, 1, (500, 0, 0, 0))
    (tmp_path / "15").mkdir()  # gone between two looks
    load = ProcLoad(pids=[13], root=tmp_path, own=10)()
    assert load == Load(156 / tick, 80 / tick, 2)
    with pytest.raises(CalmError, match="cannot be read"):
        ProcLoad(root=tmp_path / "nothing")()


def test_this_machine_can_be_read() -> None:
    before = ProcLoad()()
    deadline = before.own + 0.05
    while (after := ProcLoad()()).own < deadline:
        pass
    assert after.busy - before.busy >= after.own - before.own - 0.05 and after.cores >= 1


def test_nothing_is_collected_while_turns_are_timed() -> None:
    seen: list[bool] = []
    contender = Contender("only", lambda n: seen.append(gc.isenabled()))
    paired([contender], 1, 2, 3, 1, allow_noisy=True, load=lambda: Load(0.0, 0.0, 1))
    assert seen[:4] == [True] * 4 and seen[4:] and not any(seen[4:])  # warm-ups, twice for the baseline
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with pytest.raises(RuntimeError, match="stop"), uncollected():
        raise RuntimeError("stop")
    assert gc.isenabled() and gc.get_freeze_count() == 0
