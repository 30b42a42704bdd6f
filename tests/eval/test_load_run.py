"""The program: rates by ways in turn, what is kept, what is written, what is warned of, and how it ends."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from calm.cli import settings
from calm.errors import ConfigError
from calm.load_config import LoadConfig
from eval import serving
from eval.load_cells import Cell, Ledger, Measured, cells, uncollected
from eval.load_metrics import measures
from eval.load_ready import NotReady
from eval.load_samples import Counted, ErrorKind, Sample, read_samples, write_samples

from ..conftest import RunProgram
from .load_server import Call, Server, served_aside, words
from .test_load_figures import made_up

INF = float("inf")


@pytest.fixture(autouse=True)
def unstamped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records without a look at git and libraries, which other tests see to."""
    monkeypatch.setattr("calm.environment.environment", lambda: {"git": None})


def config(server: Server, tmp_path: Path, **changes: Any) -> LoadConfig:
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    values: dict[str, Any] = {
        "url": server.url, "prompts": str(tmp_path / "prompts.txt"), "n": 6, "rates": [200.0, INF], "warmups": 1,
        "ways": ["full", "tolerance=0.05"], "max_tokens": 5, "timeout": 60.0,
    }  # fmt: skip
    return LoadConfig(**{**values, **changes})


def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir(exist_ok=True)
    return made


def test_at_each_rate_every_way_has_its_turn_and_another_begins() -> None:
    order = [(cell.rate, cell.way) for cell in cells([4.0, INF, 1.0], ["full", "static=2", "threshold=0.5"])]
    assert order == [
        (1.0, "full"), (1.0, "static=2"), (1.0, "threshold=0.5"),
        (4.0, "static=2"), (4.0, "threshold=0.5"), (4.0, "full"),
        (INF, "threshold=0.5"), (INF, "full"), (INF, "static=2"),
    ]  # fmt: skip
    names = {cell.name for cell in cells([0.5, INF], ["full", "tolerance=0.05"])}
    assert names == {"rate-0.5-full", "rate-0.5-tolerance-0.05", "rate-inf-full", "rate-inf-tolerance-0.05"}


def test_a_run_measures_everything_and_says_it_in_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = folder(tmp_path)
    with served_aside(words) as server:
        assert serving.run(config(server, tmp_path, goodput={"e2el": 60_000.0}), run_dir) == 0
        asked = [call.json for call in server.completions]
    said = capsys.readouterr().out.splitlines()
    summary = json.loads(said[-1])
    assert summary == json.loads((run_dir / "summary.json").read_text())
    assert (summary["program"], summary["served_model"], summary["lost"]) == ("eval.serving", "m", 0)
    assert summary["config"]["rates"] == [200.0, "inf"] and summary["figures"] == ["serving.png"]
    assert [(cell["rate"], cell["way"]) for cell in summary["cells"]] == [
        (200.0, "full"), (200.0, "tolerance=0.05"), ("inf", "full"), ("inf", "tolerance=0.05")
    ]  # fmt: skip
    for cell in summary["cells"]:
        assert (cell["completed"], cell["failed"], cell["total_output_tokens"]) == (6, 0, 18)
        assert cell["total_input_tokens"] == 18 and cell["tokens_from"] == {"usage": 6}
        assert cell["from_scheduled"]["slo_attainment"] == 1.0 and cell["client_cpu"] > 0.0
    table = next(line for line in said if "tok/s" in line)
    assert "goodput" in table and "lag" in table

    # one request of each way beforehand, one to warm up each cell, and the rest in the order of the turns
    ways = ["full" if body["early_exit"] == {"policy": "full"} else "tolerance" for body in asked]
    assert ways == ["full", "tolerance", *7 * ["full"], *14 * ["tolerance"], *7 * ["full"]]
    assert asked[1]["early_exit"] == {"tolerance": 0.05}
    first = asked[0]
    assert (first["model"], first["prompt"], first["max_tokens"], first["temperature"]) == ("m", "one", 5, 0.0)
    assert "ignore_eos" not in first and first["stream"] is True

    samples = pd.read_parquet(run_dir / "samples.parquet")
    assert len(samples) == 24 and set(samples["way"]) == {"full", "tolerance=0.05"}
    assert {"scheduled_s", "sent_s", "first_s", "last_s", "tokens", "error"} <= set(samples.columns)
    at_200 = samples[(samples["rate"] == 200.0) & (samples["way"] == "full")].sort_values("number")
    other = samples[(samples["rate"] == 200.0) & (samples["way"] != "full")].sort_values("number")
    assert list(at_200["scheduled_s"]) == list(other["scheduled_s"])  # the same arrivals for every way
    assert at_200["scheduled_s"].iloc[-1] == pytest.approx(6 / 200)
    assert (samples[samples["rate"] == INF]["scheduled_s"] == 0.0).all()
    assert (samples["sent_s"] >= samples["scheduled_s"] - 1e-4).all()


def test_to_others_servers_nothing_of_ours_is_sent(tmp_path: Path) -> None:
    asked = config(
        Server(words), tmp_path, ways=["plain"], rates=[INF], ignore_eos=True, extra_body={"truncate": True, "top_k": 3}
    )
    with served_aside(words) as server:
        assert serving.run(replace(asked, url=server.url), folder(tmp_path)) == 0
        bodies = [call.json for call in server.completions]
    assert all("early_exit" not in body and body["ignore_eos"] is True for body in bodies)
    assert all(body["truncate"] is True and body["top_k"] == 3 for body in bodies)


def test_what_is_whole_is_kept_and_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = folder(tmp_path)

    async def breaks(call: Call) -> None:
        body = call.json
        if body["early_exit"] != {"policy": "full"} and broken and body["prompt"] == "two":
            call.drop()
        else:
            call.words(2)

    with served_aside(breaks) as server:
        asked, broken = config(server, tmp_path, rates=[INF]), True
        assert serving.run(asked, run_dir) == serving.UNFINISHED
        first = json.loads((run_dir / "summary.json").read_text())
        assert [cell["lost"] for cell in first["cells"]] == [0, 2] and first["lost"] == 2
        assert first["cells"][1]["errors"] == {"disconnected": 2} and first["cells"][1]["completed"] == 4
        assert "2 of 6 requests failed: 2 disconnected; times are of the others" in capsys.readouterr().out
        server.calls.clear()
        broken = False
        assert serving.run(asked, run_dir) == 0
        ways = [call.json["early_exit"] for call in server.completions]
        assert ways == [{"tolerance": 0.05}] * (1 + 1 + 6)  # the whole cell is not measured, nor its way tried
        second = json.loads((run_dir / "summary.json").read_text())
        assert second["cells"][0] == first["cells"][0]
        server.calls.clear()
        again = replace(asked, goodput={"ttft": 1e6}, percentiles=[50.0], ways=["tolerance=0.05", "full"])
        assert serving.run(again, run_dir) == 0 and not server.completions
        third = json.loads((run_dir / "summary.json").read_text())
        assert [cell["way"] for cell in third["cells"]] == ["tolerance=0.05", "full"]
        assert third["cells"][1]["from_sent"]["slo_attainment"] == 1.0
        assert len(pd.read_parquet(run_dir / "samples.parquet")) == 12


def test_a_cell_keeps_to_its_server_model_and_prompts(tmp_path: Path) -> None:
    asked = config(Server(words), tmp_path)
    cell = Cell(INF, "full")
    found = Measured(cell, [Sample(0, 0.0, 0.0, 1.0, (1.0,), 1, counted=Counted.usage)], 1.0, 0.1, 1)
    Ledger(tmp_path, asked, "m", ["one"]).keep(found)
    assert Ledger(tmp_path, asked, "m", ["one"]).read(cell) == found
    assert Ledger(tmp_path, asked, "m", ["one"]).read(Cell(1.0, "full")) is None
    changed: list[tuple[LoadConfig, str, list[Any]]] = [
        (asked, "other", ["one"]),
        (asked, "m", ["two"]),
        *(
            (replace(asked, **{name: value}), "m", ["one"])
            for name, value in {
                "url": "http://x", "seed": 1, "max_tokens": 6, "n": 5, "burstiness": INF, "warmups": 2, "timeout": 9.0,
                "extra_body": {"top_p": 0.5},
            }.items()
        ),
    ]  # fmt: skip
    for each in changed:
        assert Ledger(tmp_path, *each).read(cell) is None
    same = replace(asked, rates=[1.0], ways=["plain"], goodput={"ttft": 1.0}, percentiles=[1.0], ready_timeout=1.0)
    assert Ledger(tmp_path, same, "m", ["one"]).read(cell) == found


def test_samples_are_read_back_as_they_were(tmp_path: Path) -> None:
    samples = [
        Sample(0, 0.5, 0.6, 2.0, (1.0, 1.5), 2, 7, Counted.usage, 2.5, 0.6875, True, status=200),
        Sample(1, 0.7, 0.7, 3.0, (1.0,), error=ErrorKind.timeout, status=200, detail="no end", retries=1),
        Sample(2, 0.8, 0.8, 0.9, error=ErrorKind.refused, status=429, detail="full"),
    ]
    write_samples(tmp_path / "x.parquet", [({"way": "full", "rate": 2.0}, samples)])
    assert read_samples(tmp_path / "x.parquet") == samples
    table = pd.read_parquet(tmp_path / "x.parquet")
    assert table["first_s"].isna().tolist() == [False, False, True] and table["last_s"].tolist()[:2] == [1.5, 1.0]


def test_refusals_are_answers_and_a_cell_of_nothing_else_is_no_measurement(tmp_path: Path) -> None:
    async def full(call: Call) -> None:
        served = len([each for each in server.completions if each is not call])
        if served < 2 or (some and served % 2):
            call.words(1)
        else:
            call.refuse(429, "too many")

    with served_aside(full) as server:
        asked, some = config(server, tmp_path, rates=[INF], ways=["plain"]), True
        assert serving.run(asked, folder(tmp_path)) == 0  # every request was answered, half of them by a refusal
        cell = json.loads((tmp_path / "run" / "summary.json").read_text())["cells"][0]
        assert (cell["errors"], cell["lost"]) == ({"refused": 3}, 0) and cell["completed"] == 3
        server.calls.clear()
        some = False
        assert serving.run(replace(asked, seed=5), folder(tmp_path)) == serving.UNFINISHED
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["cells"][0]["completed"] == 0 and summary["figures"] == []


def test_what_the_server_does_not_take_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    async def strict(call: Call) -> None:
        if "early_exit" in call.json:
            call.refuse(400, "unknown field early_exit")
        else:
            call.words(1)

    with served_aside(strict) as server:
        with pytest.raises(NotReady, match=r"way tolerance=0.05: .*unknown field early_exit.*ways=\[plain\]"):
            serving.run(config(server, tmp_path, ways=["plain", "tolerance=0.05"]), folder(tmp_path))
        assert len(server.completions) == 2


def test_a_late_client_is_marked_and_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eval.load_client import Client

    complete = Client.complete

    async def busy(
        self: Client, body: bytes, number: int = 0, scheduled: float = 0.0, zero: float | None = None
    ) -> Any:
        time.sleep(0.05)  # the client's own work, before it sends
        return await complete(self, body, number, scheduled, zero)

    monkeypatch.setattr(Client, "complete", busy)
    with served_aside(words) as server:
        assert serving.run(config(server, tmp_path, ways=["plain"], rates=[INF]), folder(tmp_path)) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    cell = summary["cells"][0]
    assert summary["client_late"] is True and cell["client_late"] is True and cell["max_client_lag_ms"] > 250
    assert "warning: rate inf, plain: the client sent up to" in capsys.readouterr().out


def test_warnings_name_their_cell_and_a_clean_cell_has_none() -> None:
    clean = made_up()["cells"][0]
    assert serving.warnings(clean) == []
    told = serving.warnings(
        {
            **clean,
            "client_late": True,
            "errors": {"timeout": 1, "refused": 2},
            "failed": 3,
            "tokens_from": {"chunks": 4},
        }
    )
    assert len(told) == 3 and all("rate 1.0, full" in line for line in told)
    assert "2 refused, 1 timeout" in told[1] and "counted here" in told[2]


def test_the_table_shows_what_there_is() -> None:
    sample = Sample(0, 0.0, 0.0, 1.0, (1.0,), 1)
    record = {"rate": "inf", "way": "plain", **measures([sample], 1.0, [99.0], {})}
    head, line, note = serving.as_text([record]).splitlines()
    assert "goodput" not in head and "tpot" not in head  # no limits, and no answer of two tokens
    assert line.split()[:5] == ["inf", "plain", "1", "0", "0"] and "due" in note


def test_a_missing_library_is_told_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs h11.*the extra 'serve' brings it"):
        serving.run(LoadConfig(random_tokens=3), tmp_path)


def test_too_many_requests_for_this_process_are_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (64, 64))
    with pytest.raises(ConfigError, match="n=200 requests may be in flight"):
        serving.run(LoadConfig(prompts="nothing.txt"), tmp_path)


def test_nothing_is_collected_while_times_are_taken() -> None:
    import gc

    with pytest.raises(ZeroDivisionError), uncollected():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_the_command_line_takes_ways_as_they_are_called() -> None:
    found = settings(
        "serving",
        LoadConfig,
        ["rates=[1,2.5,inf]", "ways=[full,static=4,tolerance=0.05]", "goodput.ttft=200", "extra_body.truncate=true"],
    )
    assert found.rates == [1.0, 2.5, INF] and found.ways == ["full", "static=4", "tolerance=0.05"]
    assert found.goodput == {"ttft": 200.0} and found.extra_body == {"truncate": True} and found.data is None
    assert settings("serving", LoadConfig, ["data=restaurants"]).data is not None


def test_interrupting_a_run_leaves_whole_cells_and_no_sockets(tmp_path: Path) -> None:
    async def script(call: Call) -> None:
        if "early_exit" in call.json and len(server.completions) > 12:
            raise_here.set()
            await asyncio.sleep(600)
        call.words(1)

    raise_here = asyncio.Event()
    with served_aside(script) as server:
        asked = config(server, tmp_path, rates=[INF], ways=["plain", "full"])

        async def cut() -> None:
            from eval.load_prompts import read_prompts

            task = asyncio.ensure_future(serving.measured(asked, read_prompts(asked), folder(tmp_path)))
            while not raise_here.is_set():
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0)

        asyncio.run(cut())
    kept = [path.stem for path in (tmp_path / "run" / "cells").rglob("*.json")]
    assert kept == ["rate-inf-plain"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["url=localhost:8000"], "write it like http://127.0.0.1:8000"),
        (["ways=[fast]"], "'fast' is none; choose from plain, full, static=LAYER"),
        (
            ["url=http://127.0.0.1:1", "random_tokens=4", "ready_timeout=0.1"],
            "no server is ready at url=http://127.0.0.1:1",
        ),
    ],
)
def test_a_users_mistake_is_one_line(argv: list[str], said: str, run_program: RunProgram) -> None:
    done = run_program("eval.serving", *argv)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and said in done.stderr
