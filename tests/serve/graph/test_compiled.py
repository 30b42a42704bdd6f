"""Every kernel compiles for a Hopper card as a real step launches it, and fits it; no GPU is needed for that."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; the tests of its kernels need it")

SHARED = 227 * 1024  # bytes that a block may have on sm_90
REGISTERS = 65536  # of a processor, for the threads of all its blocks
ROOT = Path(__file__).parents[3]


def compiled(folder: Path, *asked: str) -> list[dict[str, Any]]:
    """What the compiler says of each kernel that steps launch: numbers, ``ahead`` or not, shapes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.serve.graph.launches", *asked],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def fits(told: list[dict[str, Any]]) -> None:
    from serve.graph import triton_ops

    assert {each["name"] for each in told} == {name for name in vars(triton_ops) if name.endswith("_kernel")}
    for each in told:
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["shared"] <= SHARED and 32 * each["warps"] * each["registers"] <= REGISTERS, each


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_kernels_compile_for_hopper(kind: str, tmp_path: Path) -> None:
    told = compiled(tmp_path, kind, "small", "base")
    fits(told)
    assert not any(each["ahead"] for each in told)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_kernels_that_are_launched_ahead_wait_before_they_touch_anything(kind: str, tmp_path: Path) -> None:
    told = compiled(tmp_path, kind, "ahead", "base")
    fits(told)
    assert all(each["waits"] and each["launches"] for each in told), told
