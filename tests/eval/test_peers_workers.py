"""Peers' processes: what is said over the pipes, and what becomes of one that fails, dies or hangs."""

import sys
from pathlib import Path
from typing import Any

import pytest

from calm.engine_config import PeersConfig
from eval import peer_plan
from eval.peer_crew import Crew
from eval.peer_plan import WorkerPlan
from eval.peer_process import PeerError, WorkerProcess, load, worker_environment
from eval.peer_workers import protocol

FAKE = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
ROWS = [[5, 6, 1], [7, 1]]


def started(tmp_path: Path, **settings: str) -> WorkerProcess:
    worker = WorkerProcess("fake", FAKE, tmp_path / "fake.log")
    load(worker, 60, folder="folder", store="store", threads=1, settings=settings)
    return worker


def plan(name: str, **settings: str) -> WorkerPlan:
    return WorkerPlan(name, name, "fake", "fp32", None, settings)


@pytest.fixture
def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(peer_plan.WorkerPlan, "command", lambda self, environments: FAKE)
    config = PeersConfig(load_timeout=60.0, call_timeout=60.0, environments=str(tmp_path / "peers"))
    with Crew(config, tmp_path, tmp_path / "store", tmp_path / "logs") as made:
        yield made


def test_a_worker_answers_in_turn_and_what_it_prints_goes_to_its_log(tmp_path: Path) -> None:
    with WorkerProcess("fake", FAKE, tmp_path / "fake.log", threads=2) as worker:
        about = load(worker, 60, folder="folder", store="store", threads=2, settings={})
        assert about == {"versions": {"fake": "1.0"}, "threads": "2", "asked": 2}
        worker.ask("prepare", 60, sources=ROWS, most=9, variants={})
        assert worker.ask("decode", 60, variant="full", tokens=9)["lengths"] == [9, 9]
        assert worker.ask("answer", 60, sources=ROWS, most=9)["tokens"] == [[7, 8, 1], [7, 8, 1]]
        assert worker.ask("predict", 60, variant="full", tokens=9)["seconds"] == 9.0
        with pytest.raises(PeerError, match="fake: ValueError: unknown request 'dance'"):
            worker.ask("dance", 60)
    assert "must go to stderr" in (tmp_path / "fake.log").read_text()
    assert worker._process.returncode == 0


def test_a_request_longer_than_a_pipe_arrives_whole(tmp_path: Path) -> None:
    with started(tmp_path) as worker:
        worker.ask("prepare", 60, sources=[[5] * 50_000] * 3, most=2, variants={})
        assert worker.ask("decode", 60, variant="full", tokens=2)["lengths"] == [2, 2, 2]


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("fail", "ValueError: cannot decode$"),
        ("die", "ended with exit status 3 at 'decode'; its log ends with: a last word$"),
        ("abort", "was ended by SIGABRT at 'decode'"),
    ],
)
def test_what_went_wrong_is_one_line(trouble: str, reason: str, tmp_path: Path) -> None:
    with started(tmp_path, decode=trouble) as worker, pytest.raises(PeerError, match=reason) as caught:
        worker.ask("decode", 60, variant="full", tokens=2)
    assert caught.value.peer == "fake" and "\n" not in str(caught.value)


def test_a_worker_that_hangs_is_ended_and_not_asked_again(tmp_path: Path) -> None:
    with started(tmp_path, decode="hang") as worker:
        with pytest.raises(PeerError, match="no answer to 'decode' within 0.3 s"):
            worker.ask("decode", 0.3, variant="full", tokens=2)
        assert worker._process.returncode == -9
        with pytest.raises(PeerError, match="was ended before 'decode'"):
            worker.ask("decode", 60, variant="full", tokens=2)


def test_words_that_are_no_reply_are_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input(); print('certainly!')"]
    with WorkerProcess("chatty", command, tmp_path / "log") as worker, pytest.raises(PeerError, match="no reply"):
        worker.ask("load", 60)


def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="cannot be started: .*No such file"):
        WorkerProcess("nobody", [str(tmp_path / "python")], tmp_path / "log")


def test_a_worker_runs_by_path_where_eval_is_no_package(tmp_path: Path) -> None:
    command = [sys.executable, "-I", str(peer_plan.WORKERS), "ct2"]
    with WorkerProcess("ct2", command, tmp_path / "log") as worker, pytest.raises(PeerError, match="unknown request"):
        worker.ask("dance", 60)


def test_workers_get_their_threads_and_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    variables = worker_environment(2)
    assert "PYTHONPATH" not in variables
    assert (variables["OMP_NUM_THREADS"], variables["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")


def test_a_peer_that_cannot_be_had_is_a_line_and_the_others_go_on(crew: Crew) -> None:
    said: list[str] = []
    elsewhere = WorkerPlan("openvino-fp32", "openvino", "ov", "fp32", "openvino")
    crew.start([plan("good"), plan("bad", load="fail"), plan("dead", load="die"), elsewhere], said.append)
    assert crew.names == ["good"] and set(crew.failures) == {"bad", "dead", "openvino-fp32"}
    assert crew.failures["bad"] == "ValueError: cannot load"
    assert "no environment" in crew.failures["openvino-fp32"] and "make peers" in crew.failures["openvino-fp32"]
    assert said[0] == "good: fake 1.0" and said[1] == "bad: left out: ValueError: cannot load"


def test_why_an_environment_is_missing_is_read_from_its_set_up(crew: Crew, tmp_path: Path) -> None:
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "openvino.log").write_text("Collecting\nERROR: no such package\n\n")
    crew.start([WorkerPlan("openvino-fp32", "openvino", "ov", "fp32", "openvino")], lambda line: None)
    assert crew.failures["openvino-fp32"].endswith("its set-up ended with: ERROR: no such package")


def test_who_fails_later_drops_out_with_its_reason(crew: Crew) -> None:
    crew.start([plan("good"), plan("deaf", prepare="fail"), plan("mute", answer="die")], lambda line: None)
    crew.prepare(ROWS, 9, {"good": {"full": {}}})
    assert crew.names == ["good", "mute"]
    assert crew.answers(ROWS * 40, 9) == {"good": [[7, 8, 1]] * 80}
    assert set(crew.failures) == {"deaf", "mute"}


def test_a_row_of_another_length_is_refused(crew: Crew) -> None:
    crew.start([plan("good"), plan("hasty", decode="short")], lambda line: None)
    crew.prepare(ROWS, 9, {})
    crew.decoder("good", "full", 2)(9)
    with pytest.raises(PeerError, match=r"hasty: gave 2 rows of \[8\] tokens where 2 of 9 were asked"):
        crew.decoder("hasty", "full", 2)(9)
    with pytest.raises(PeerError, match="good: gave 2 rows"):
        crew.decoder("good", "full", 3)(9)


def test_an_errors_first_line_is_told() -> None:
    assert protocol.one_line(ValueError("\n\n  first\nsecond")) == "ValueError: first"
    assert protocol.one_line(ValueError()) == "ValueError: "
