"""The soak tells every fault that there is, and the server has none (CALM_SOAK_S: seconds of the long test)."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from calm.cli import settings
from calm.errors import CalmError, ConfigError
from calm.soak_config import HttpShareConfig, SoakConfig
from eval.own_server import Held, own_server
from eval.soak import Reading, Soaked
from eval.soak_clients import GONE, RIGHT, SHARES, WRONG, Kind, Visit, counted, draw
from tests.conftest import RunProgram

HELD = Held(500.0, 30, 4, 4)


def soaked(rss: list[float], visits: list[Visit], after: Held = HELD, idle: bool = True) -> Soaked:
    """An hour's, settled from the first reading on."""
    config = SoakConfig(duration_s=3600.0, settle_s=0.0, growth_mib_per_hour=10.0)
    step = 3600.0 / max(1, len(rss) - 1)
    readings = [Reading(i * step, mib, 30, 4, 4, 0.0, 0.0) for i, mib in enumerate(rss)]
    return Soaked(config, 3600.0, readings, visits, HELD, after, 3.0, idle)


def visit(kind: Kind, outcome: str, started: float = 1.0, took: float = 0.5) -> Visit:
    return Visit(kind, started, started + took, outcome)


GOOD = [
    visit(Kind.streamed, RIGHT),
    visit(Kind.whole, "429"),
    visit(Kind.leaves_midway, GONE),
    visit(Kind.no_json, "400"),
    visit(Kind.too_large, "413"),
]


def test_a_sound_server_has_no_faults() -> None:
    found = soaked([500.0] * 20, GOOD)
    assert found.faults == [] and found.growth == 0.0
    told = found.told()
    assert told["answers"] == 1 and told["of_those_that_waited"] == 2 and told["answer_ms"]["p50"] == 500.0
    assert told["outcomes"]["whole"] == {"429": 1}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (soaked([500.0] * 5, [*GOOD, visit(Kind.whole, WRONG)]), "1 clients that whole: wrong"),
        (soaked([500.0] * 5, [*GOOD, visit(Kind.streamed, "Disconnected: closed")]), "streamed: Disconnected"),
        (soaked([500.0] * 5, [*GOOD, visit(Kind.no_json, "500")]), "no_json: 500"),
        (soaked([500.0] * 5, GOOD[1:]), "nobody got an answer"),
        (soaked([500.0 + 10 * i for i in range(20)], GOOD), "resident memory grew from 50"),
        (soaked([500.0] * 5, GOOD, replace(HELD, files=60)), "60 open files, 30 before"),
        (soaked([500.0] * 5, GOOD, replace(HELD, threads=9)), "9 threads, 4 before"),
        (soaked([500.0] * 5, GOOD, replace(HELD, processes=3)), "3 processes, 4 before"),
        (soaked([500.0] * 5, GOOD, idle=False), "requests were left"),
    ],
)
def test_every_fault_is_told(found: Soaked, said: str) -> None:
    assert len(found.faults) == 1 and said in found.faults[0]


def test_growth_is_by_the_hour_and_after_it_has_settled() -> None:
    found = soaked([100.0, 900.0, *[1000.0 + i for i in range(10)]], GOOD)
    found.config.settle_s = 2 * 3600.0 / 11
    assert found.growth == pytest.approx(11.0) and found.settled_mib == (1000.0, 1009.0)


def test_clients_of_every_kind_come() -> None:
    generator = random.Random(0)
    drawn = [draw(generator) for _ in range(2000)]
    assert set(drawn) == set(SHARES) == set(Kind)
    assert counted([visit(Kind.whole, RIGHT), visit(Kind.whole, "503"), visit(Kind.whole, "503")]) == {
        "whole": {"503": 2, RIGHT: 1}
    }


@pytest.mark.parametrize(
    ("program", "schema", "argv", "said"),
    [
        ("soak", SoakConfig, "ways=[fastest]", "fastest"),
        ("soak", SoakConfig, "settle_s=9999", "settle_s"),
        ("http_share", HttpShareConfig, "shapes=[huge]", "huge"),
        ("http_share", HttpShareConfig, "batches=[8,8]", "batches"),
        ("http_share", HttpShareConfig, "dtype=fp16", "fp16"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(program: str, schema: type, argv: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(program, schema, [argv])


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with (
        pytest.raises(CalmError, match="did not become ready: .*error: "),
        own_server(tmp_path / "model", tmp_path / "log"),
    ):
        raise AssertionError("there is no model")


@pytest.mark.slow
def test_a_minute_of_clients_that_crash(certified: Path, run_program: RunProgram, tmp_path: Path) -> None:
    """Faults 30 to 32 and 44: everybody gets their own answer or a documented refusal, and nothing is left behind."""
    seconds = float(os.environ.get("CALM_SOAK_S", "60"))
    done = run_program(
        "eval.soak", f"checkpoint={certified / 'model'}", f"duration_s={seconds}", f"settle_s={seconds / 4}",
        "prompts=32", "rate=40", "burst=200", "burst_every_s=10", "sample_every_s=1",
        f"hydra.run.dir={tmp_path / 'run'}",
        timeout=seconds + 300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["faults"] == [] and told["sound"] and told["exit_status"] == 0
    assert told["answers"] > 10 * seconds and told["cancelled"] > seconds / 2
    assert set(told["outcomes"]) == {kind.value for kind in Kind}
