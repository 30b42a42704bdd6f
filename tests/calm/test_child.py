"""What a process that is started here has, and that it ends with the one that started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calm.child import starting
from calm.environment import ONE_OF_SEVERAL

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_ends_with_its_parent(signum: int) -> None:
    child = (
        f"from calm.child import die_with_parent, signal; die_with_parent({int(signum)}); print(1, flush=True); "
        "signal.pause()"
    )
    parent = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    ran = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    pid = int(ran.stdout)
    state = Path(f"/proc/{pid}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":
        os.sched_yield()


def test_what_is_started_has_one_thread_and_no_interrupt_and_here_all_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MALLOC_TOP_PAD_", raising=False)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with starting():
        child = "import os, signal; print(os.environ['OMP_NUM_THREADS'], *signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
        ran = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1", str(int(signal.SIGINT))]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert os.environ["OMP_NUM_THREADS"] == "3" and "MALLOC_TOP_PAD_" not in os.environ
    assert set(ONE_OF_SEVERAL) >= {"OMP_NUM_THREADS", "MALLOC_TOP_PAD_"}
