"""How many processes, in which environment, and what their parent does when one ends or a signal comes."""

import os
import signal
import sys
from pathlib import Path

import pytest

from calm.config import Device, Stage
from calm.errors import ConfigError
from tests.train.tiny import tiny_config
from train import launch as module
from train.launch import Workers, check_divisible, on_cpu, process_count


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_a_cpu_gets_one_process_per_core_as_far_as_the_batch_can_be_shared() -> None:
    assert process_count(tiny_config()) == 4
    assert process_count(tiny_config(finetune__batch_size=6)) == 3
    assert process_count(tiny_config(finetune__batch_size=8, finetune__accumulation=8)) == 1
    assert process_count(tiny_config(processes=1)) == 1
    assert process_count(tiny_config(processes=2)) == 2
    assert process_count(tiny_config(stage=Stage.calibrate)) == 1


def test_processes_that_do_not_fit_the_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=8 is the global batch .* 3 x 1 = 3; try finetune.batch_size=9"):
        process_count(tiny_config(processes=3))
    check_divisible(tiny_config(finetune__accumulation=2).finetune, 4)


def test_under_a_launcher_no_more_processes_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert process_count(tiny_config()) == 1
    assert process_count(tiny_config(processes=2)) == 1
    with pytest.raises(ConfigError, match="the launcher started 2"):
        process_count(tiny_config(processes=3))


def test_a_gpu_is_driven_by_one_process() -> None:
    assert process_count(tiny_config(device=Device.cuda)) == 1
    assert on_cpu(Device.cpu) and not on_cpu(Device.cuda)


def workers(count: int, code: str, folder: Path) -> Workers:
    return Workers(count, [sys.executable, "-S", "-c", code], folder)


def test_each_process_knows_its_place_and_gets_one_thread(tmp_path: Path) -> None:
    code = """
import os, sys
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS OMP_WAIT_POLICY CALM_RUN_DIR".split()
print(*[os.environ[name] for name in names + ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"]])
"""
    both = workers(3, code, tmp_path)
    assert both.wait() == (0, 0)
    one, two = (both.log(rank).read_text().split() for rank in (1, 2))
    assert one[:2] == ["1", "1"] and two[:2] == ["2", "2"]
    assert one[2:] == two[2:] and one[2] == "3" and one[5:8] == ["1", "PASSIVE", str(tmp_path)]


def test_when_one_process_fails_the_others_are_ended_and_its_words_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MATE_GRACE_S", 0.2)
    code = """
import os, signal, sys
if os.environ["RANK"] == "1": sys.exit("no such luck")
signal.pause()
"""
    both = workers(2, code, tmp_path)
    assert both.wait() == (1, 1)
    assert "no such luck" in both.log(1).read_text()
    assert both.processes[0].returncode == -signal.SIGKILL


def ready(folder: Path, count: int) -> None:
    while len(list(folder.glob("ready-*"))) < count:
        os.sched_yield()


HANDLED = """
import os, pathlib, signal, sys
folder = pathlib.Path(os.environ["CALM_RUN_DIR"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143) if {leave} else None)
(folder / ("ready-" + os.environ["RANK"])).touch()
while True: signal.pause()
"""


def test_a_signal_is_passed_on_and_its_status_returned(tmp_path: Path) -> None:
    both = workers(2, HANDLED.format(leave=True), tmp_path)
    ready(tmp_path, 2)
    both.pass_on(signal.SIGTERM)
    assert both.wait() == (0, 143)


def test_a_second_signal_ends_them_by_force(tmp_path: Path) -> None:
    both = workers(2, HANDLED.format(leave=False), tmp_path)
    ready(tmp_path, 2)
    both.pass_on(signal.SIGTERM)
    both.pass_on(signal.SIGTERM)
    assert both.wait() == (0, -signal.SIGKILL)


def test_the_end_of_a_failed_process_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMAND", [sys.executable, "-S", "-c", "import sys; sys.exit('shown')"])
    assert module.launch(2, [], tmp_path) == 1
    assert "shown" in capfd.readouterr().err
