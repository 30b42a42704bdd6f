"""Every kernel compiles for a Hopper card, in fp32 and bf16, and fits it; no GPU is needed for that."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; the tests of its kernels need it")

SHARED = 227 * 1024  # bytes that a block may have on sm_90
PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from serve.graph.kernels.attention import attention_kernel
from serve.graph.kernels.products import backfill_kernel, inner_kernel, linear_kernel, qkv_kernel
from serve.graph.kernels.rows import begin_kernel, settle_kernel, speak_kernel, states_kernel
from serve.graph.kernels.vocabulary import choose_kernel, words_kernel

kind, n, k, words = sys.argv[1], *map(int, sys.argv[2:])
real, tile = "*" + kind, dict(ROWS=16, BLOCK_N=n, BLOCK_K=k)
LISTS = dict(order="*i32", active="*i32")
SURE = dict(measures="*i64", run_lengths="*i64", words="*i64", run="*i64", confidence="*fp32", widest="fp32")
STEPS = dict(key_steps="*fp32", value_steps="*fp32")
CASES = {
    "linear": (linear_kernel, dict(x=real, norm=real, weight=real, out=real, crossed="*i1", **LISTS, n="i32", k="i32", eps="fp32"), dict(NORMED=True, ADDS=True, HOLDS=True, **tile)),
    "linear down": (linear_kernel, dict(x="*fp32", norm="*fp32", weight="*fp32", out=real, crossed="*i1", **LISTS, n="i32", k="i32", eps="fp32"), dict(NORMED=False, ADDS=True, HOLDS=False, **tile)),
    "qkv": (qkv_kernel, dict(x=real, norm=real, weight=real, queries=real, keys=real, values=real, previous=real, slots="*i64", steps="*i64", **LISTS, heads="i32", positions="i32", k="i32", eps="fp32"), dict(WIDTH=64, **tile)),
    "inner": (inner_kernel, dict(x=real, norm=real, gate=real, up=real, out=real, **LISTS, n="i32", k="i32", eps="fp32"), dict(GATED=True, ACTIVATION="gelu_new", **tile)),
    "inner relu": (inner_kernel, dict(x=real, norm=real, gate=real, up=real, out=real, **LISTS, n="i32", k="i32", eps="fp32"), dict(GATED=False, ACTIVATION="relu", **tile)),
    "backfill": (backfill_kernel, dict(x=real, norms=real, weights=real, keys=real, values=real, slots="*i64", steps="*i64", executed="*i64", count="*i32", all_slots="i32", heads="i32", positions="i32", k="i32", eps="fp32"), dict(WIDTH=64, **tile)),
    "attention self": (attention_kernel, dict(queries=real, keys=real, values=real, lengths="*i64", bias="*fp32", **STEPS, slots="*i64", **LISTS, out=real, heads="i32", positions="i32", scale="fp32"), dict(BIASED=True, COARSE=False, WIDTH=64, WIDE=64, BLOCK=64)),
    "attention cross": (attention_kernel, dict(queries=real, keys=real, values=real, lengths="*i32", bias="*fp32", **STEPS, slots="*i64", **LISTS, out=real, heads="i32", positions="i32", scale="fp32"), dict(BIASED=False, COARSE=False, WIDTH=64, WIDE=64, BLOCK=64)),
    "attention int8": (attention_kernel, dict(queries=real, keys="*i8", values="*i8", lengths="*i32", bias="*fp32", **STEPS, slots="*i64", **LISTS, out=real, heads="i32", positions="i32", scale="fp32"), dict(BIASED=False, COARSE=True, WIDTH=64, WIDE=64, BLOCK=64)),
    "words": (words_kernel, dict(x=real, norm=real, weight=real, stats="*fp32", **LISTS, size="i32", tiles="i32", vocab="i32", k="i32", eps="fp32", head_scale="fp32"), dict(ROWS=16, BLOCK_N=words, BLOCK_K=k)),
    "choose": (choose_kernel, dict(stats="*fp32", **LISTS, chosen="*i64", **SURE, size="i32", tiles="i32"), dict(CONFIDES=False, SOFTMAX=-1, MAX_PROB=-1, ENTROPY=-1, AGREEMENT=-1, FIRST=False, BLOCK=512)),
    "choose, sure": (choose_kernel, dict(stats="*fp32", **LISTS, chosen="*i64", **SURE, size="i32", tiles="i32"), dict(CONFIDES=True, SOFTMAX=0, MAX_PROB=3, ENTROPY=4, AGREEMENT=5, FIRST=False, BLOCK=512)),
    "states": (states_kernel, dict(hidden=real, previous=real, weight="*fp32", offset="fp32", measures="*i64", confidence="*fp32", **LISTS, d="i32"), dict(STATE=1, CLASSIFIER=2, FIRST=False, ALONE=False, BLOCK=512)),
    "states first": (states_kernel, dict(hidden=real, previous=real, weight="*fp32", offset="fp32", measures="*i64", confidence="*fp32", **LISTS, d="i32"), dict(STATE=1, CLASSIFIER=-1, FIRST=True, ALONE=True, BLOCK=512)),
}
CASES["begin"] = (begin_kernel, dict(given="*i64", position="*i64", token="*i64", all_thresholds="*fp32", all_depths="*i64", all_measures="*i64", all_run_lengths="*i64", embed=real, slots="*i64", steps="*i64", tokens="*i64", live="*i1", thresholds="*fp32", depths="*i64", measures="*i64", run_lengths="*i64", hidden=real, crossed="*i1", crossing="*i64", runs="*i1", run="*i64", stopped="*i1", layers="*i64", **LISTS, count="*i32", size="i32", positions="i32", num_layers="i32", d="i32"), dict(LAYERS=8, BLOCK=512, ROWS=32))
CASES["speak"] = (speak_kernel, dict(chosen="*i64", crossed="*i1", crossing="*i64", layers="*i64", live="*i1", slots="*i64", steps="*i64", said="*i64", executed="*i64", fills="*i1", position="*i64", token="*i64", size="i32", num_layers="i32"), dict(HOLDS=True, LEAVES=False, ROW_EXACT=True, BLOCK=32))
ROWS = dict(live="*i1", runs="*i1", crossed="*i1", crossing="*i64", depths="*i64", confidence="*fp32", thresholds="*fp32", stopped="*i1", layers="*i64", **LISTS, size="i32", num_layers="i32", share="fp32", layer="i32")
for rule in ("all", "quantile", "lockstep"):
    CASES["settle " + rule] = (settle_kernel, ROWS, dict(CONFIDENT=True, LEAVES=rule == "all", RULE=rule, BLOCK=32))
told = {}
for name, (kernel, arguments, constants) in CASES.items():
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    assert list(signature) == kernel.arg_names, (name, list(signature), kernel.arg_names)
    found = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    told[name] = found.metadata.shared
print(json.dumps(told))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n", "k", "words"), [("fp32", 32, 32, 64), ("bf16", 32, 128, 128)])
def test_kernels_compile_for_hopper(kind: str, n: int, k: int, words: int, tmp_path: Path) -> None:
    import os

    from serve.graph.triton_ops import Tiles, usual_tiles
    from tests.serve.models import tiny_served

    if kind == "fp32":
        assert usual_tiles(tiny_served().spec) == Tiles(n=n, k=k, words=words)
    else:
        assert Tiles() == Tiles(n=n, k=k, words=words)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(n), str(k), str(words)],
        cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True, timeout=1000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told) == 19 and max(told.values()) <= SHARED, told
