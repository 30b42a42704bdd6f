"""The native runner's own promises: products, layouts, independence of rows to the bit, and how it is built."""

import ctypes
import platform
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calm.config import BatchRule, Head, Measure, RunnerName, Schedule, Weights
from calm.decode import OneDecoder
from calm.errors import ConfigError
from calm.models.base import BiasKind
from calm.models.t5_adapter import T5Adapter
from calm.policies import Replay
from serve.engine import Engine
from serve.heads import NOTHING
from serve.model import served
from serve.native import build
from serve.native.build import NativeError, library
from serve.native.views import BF16, FP32, INT8
from serve.native.weights import address
from serve.requests import Status
from serve.slots import SlotError
from tests.scripted import early_exit, random_t5

from .conftest import need_native
from .models import EXACT, LENGTH, SHAPES, VOCABULARY, confident, engine_of, rows, texts, tiny, tiny_served, usual

KINDS = {"fp32": FP32, "bf16": BF16, "int8": INT8}
ARITHMETICS = [*KINDS, "int8-cross"]  # the last one with int8 cross-attention K/V too
POLICY = confident(Measure.softmax, usual(Measure.softmax, below=0.4), Schedule.decaying)


@pytest.fixture(autouse=True)
def native() -> None:
    need_native()


def native_engine(arithmetic: str = "fp32", rule: BatchRule = BatchRule.compact, **options: Any) -> Engine:
    model = tiny_served(dtype=torch.float32 if arithmetic == "fp32" else torch.bfloat16)
    weights = Weights.int8 if arithmetic.startswith("int8") else Weights.model
    cross_kv = Weights.int8 if arithmetic == "int8-cross" else Weights.model
    options = {"weights": weights, "cross_kv": cross_kv, **options}
    return engine_of(rule, model, runner=RunnerName.native, **options)


# products


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 5), (16, 8), (65, 36), (100, 144), (200, 31)])
def test_a_product_is_torchs_at_any_shape_and_its_rows_are_independent(outputs: int, inputs: int, kind: int) -> None:
    torch.manual_seed(outputs)
    weights, x = torch.randn(outputs, inputs), torch.randn(14, inputs) * torch.logspace(-3, 3, 14)[:, None]
    right = x.double() @ weights.double().t()
    size = x.abs().amax(1, keepdim=True).double() * weights.abs().amax(1).double() * inputs
    whole = product(x, weights, kind)
    assert ((whole - right).abs() / size).max() < {FP32: 1e-6, BF16: 5e-3, INT8: 5e-3}[kind]
    for count in range(1, 14):  # rows beside others, beside none, and at other places
        assert torch.equal(product(x[:count], weights, kind), whole[:count])
        assert torch.equal(product(x[count:], weights, kind), whole[count:])


def product(x: Tensor, weights: Tensor, kind: int) -> Tensor:
    functions = library()
    outputs, inputs = weights.shape
    padded = -(-outputs // 16) * 16
    packed = torch.empty(functions.calm_packed_lanes(outputs, inputs, kind), dtype=torch.int32)
    scale, correction = torch.zeros(padded), torch.zeros(padded, dtype=torch.int32)
    functions.calm_pack(address(weights), outputs, inputs, kind, *map(address, (packed, scale, correction)))
    out = torch.full((x.shape[0], outputs), float("nan"))
    functions.calm_product(
        address(x.contiguous()),
        x.shape[0],
        *map(address, (packed, scale, correction)),
        outputs,
        inputs,
        kind,
        address(out),
    )
    return out


def test_int8_products_are_whole_numbers_times_scales() -> None:
    """By hand: two rows, exact integers, one scale a row and one a word."""
    weights, x = torch.tensor([[127.0, -64.0], [2.0, 1.0]]), torch.tensor([[127.0, 3.0], [0.0, 0.0]])
    by_hand = torch.tensor([[127 * 127 - 3 * 64, (127 * 127 + 3 * 64) * 2 / 127], [0.0, 0.0]])  # of [2, 1]
    torch.testing.assert_close(product(x, weights, INT8), by_hand)


def test_a_row_without_numbers_leaves_its_mates_alone() -> None:
    weights, x = torch.randn(40, 48), torch.randn(5, 48)
    right = {kind: product(x, weights, kind) for kind in KINDS.values()}
    for wrong in (float("nan"), float("inf")):
        broken = x.clone()
        broken[2, 17] = wrong
        for kind, whole in right.items():
            found = product(broken, weights, kind)
            assert not found[2].isfinite().any()
            assert torch.equal(found[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


# caches


def kept(engine: Engine, layer: int, slot: int, step: int) -> tuple[Tensor, Tensor]:
    """K and V of a position of an fp32 engine, (heads, d_kv): the layout of attention.h, read back."""
    slots, spec = engine.slots, engine.model.spec
    keys = slots.keys[layer - 1, slot].view(torch.float32).view(spec.num_heads, -1, spec.d_kv, 16)
    values = slots.values[layer - 1, slot].view(torch.float32).view(spec.num_heads, slots.max_target, -1)
    return keys[:, step // 16, :, step % 16], values[:, step, : spec.d_kv]


@pytest.mark.parametrize("rule", [*EXACT, BatchRule.sync, BatchRule.quantile], ids=lambda rule: rule.value)
def test_above_an_exit_every_layer_holds_its_own_projection(rule: BatchRule) -> None:
    adapter, seen = T5Adapter(tiny()), []
    engine = native_engine(rule=rule, quantile=0.6, max_batch=5)
    take = engine._take

    def shown(spoken: Any) -> Any:
        states = spoken.states()
        for number, row in enumerate(spoken.rows):
            for layer in range(spoken.emission[number] + 1, 5):
                own = adapter.kv(layer, states[number][None, None])
                for mine, right in zip(kept(engine, layer, row.slot, row.step), own, strict=True):
                    torch.testing.assert_close(mine, right[0, :, 0], atol=1e-5, rtol=1e-5)
            seen.append(spoken.emission[number])
        return take(spoken)

    engine._take = shown  # type: ignore[method-assign]
    engine.generate(texts(5), policy=POLICY)
    assert len(set(seen)) >= 3


def test_freed_slots_are_poisoned_and_never_read() -> None:
    engine = native_engine(max_batch=3)
    first = engine.generate(texts(8), policy=POLICY)
    for tensor in (engine.slots.keys, engine.slots.values, engine.slots.cross_keys, engine.slots.cross_values):
        freed = tensor[:, : engine.slots.count]
        assert freed.view(torch.float32).isnan().all() and freed.view(torch.bfloat16).isnan().all()
    again = engine.generate(texts(8), policy=POLICY)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_stale_read_would_show(arithmetic: str) -> None:
    """The control: a source that is said to be one token longer than it is reads what the slot held before."""
    engine = native_engine(arithmetic, max_batch=2)
    put = engine.slots.put_source

    def longer(slot: int, keys: Tensor, values: Tensor) -> None:
        put(slot, keys, values)
        engine.slots.source_length[slot] = 16

    assert {answer.status for answer in engine.generate(texts(3), policy=POLICY)} == {Status.finished}
    engine.slots.put_source = longer  # type: ignore[method-assign]
    answers = engine.generate(["w3 w4", "w5"], policy=POLICY)
    assert {(answer.status, answer.error) for answer in answers} == {(Status.failed, "the logits are not finite")}


def test_a_slot_takes_what_fits_and_nothing_else() -> None:
    slots = native_engine().slots
    layers, heads, width = slots.keys.shape[0], slots.keys.shape[2], slots._width
    slot = slots.take()
    wrong = [(layers, heads, 17, width), (layers, heads, 0, width), (layers, heads, 3, width + 1), (1, heads, 3, width)]
    for shape in wrong:
        with pytest.raises(SlotError, match="do not fit a slot of 4 layers"):
            slots.put_source(slot, torch.zeros(shape), torch.zeros(shape))
    slots.put_source(slot, *(torch.zeros(layers, heads, 16, width),) * 2)


# rows


@cache
def alone(arithmetic: str) -> list[tuple[Any, ...]]:
    """Answers of rows that have no mates, by number."""
    return [
        said(native_engine(arithmetic, max_batch=1, record_confidences=True), [number])[number] for number in range(8)
    ]


def said(engine: Engine, numbers: list[int]) -> dict[int, tuple[Any, ...]]:
    answers = engine.generate([rows()[number].source for number in numbers], policy=POLICY)
    return {
        number: (answer.tokens, answer.crossing_layers, tuple(map(str, answer.confidences)))
        for number, answer in zip(numbers, answers, strict=True)
    }


@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.compact, BatchRule.rebatch], ids=lambda rule: rule.value)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_row_is_the_same_to_the_bit_in_any_batch(arithmetic: str, rule: BatchRule) -> None:
    """Across batch sizes too: that is more than buckets of torch promise, and what certificates in bf16 stand on."""
    right = alone(arithmetic)
    for numbers, batch in (([0, 1, 2], 2), ([5, 3, 1, 7, 0, 2, 6, 4], 8), ([4, 4, 4, 2], 3)):
        engine = native_engine(arithmetic, rule, max_batch=batch, record_confidences=True)
        for number, answer in said(engine, numbers).items():
            assert answer == right[number]
    depths = {depth for _, crossing, _ in right for depth in crossing}
    assert len(depths) >= 3


@pytest.mark.parametrize(("arithmetic", "share"), [("bf16", 0.7), ("int8", 0.5), ("int8-cross", 0.5)])
def test_coarse_arithmetic_stays_near_fp32(arithmetic: str, share: float) -> None:
    """At full depth most first tokens of a random model, whose logits lie close, stay what they are."""
    right = [trace.tokens[0] for trace in OneDecoder(tiny())(list(rows()), confident(Measure.softmax, 1.0))]
    answers = native_engine(arithmetic).generate(texts())
    assert sum(answer.tokens[0] == token for answer, token in zip(answers, right, strict=True)) >= share * len(right)


def test_int8_sources_are_attended_as_their_numbers_say() -> None:
    """First states over int8 and over fp32 cross K/V lie close, those of other sources far off."""
    states = {}
    for name, cross_kv in (("fp32", Weights.model), ("int8", Weights.int8)):
        engine, seen = native_engine(cross_kv=cross_kv, max_batch=1), []
        take = engine._take

        def shown(spoken: Any, seen: list[Tensor] = seen, take: Any = take) -> Any:
            seen.append(spoken.states())
            return take(spoken)

        engine._take = shown  # type: ignore[method-assign]
        engine.generate(texts(6), max_tokens=1)
        states[name] = torch.cat(seen)
    gap = (states["int8"] - states["fp32"]).norm(dim=1) / states["fp32"].norm(dim=1)
    apart = (states["fp32"] - states["fp32"].roll(1, 0)).norm(dim=1) / states["fp32"].norm(dim=1)
    assert 0.0 < gap.median() < 0.02 and gap.max() < 0.2 < apart.median()


def test_a_replay_asks_the_measure_and_discards_its_answer() -> None:
    names = [f"row-{number}" for number in range(4)]
    depths = {name: tuple(1 + (number + step) % 4 for step in range(10)) for number, name in enumerate(names)}
    for runner in (RunnerName.native, RunnerName.eager):
        engine = engine_of(BatchRule.compact, runner=runner, record_confidences=True)
        plain = engine.generate(texts(4), names=names, policy=Replay(depths), ignore_eos=True)
        asked = engine.generate(texts(4), names=names, policy=Replay(depths, Measure.softmax), ignore_eos=True)
        for left, right in zip(plain, asked, strict=True):
            assert left.tokens == right.tokens and left.crossing_layers == right.crossing_layers == depths[right.id]
            told = [[c == c for c in token] for token in right.confidences]
            assert told == [[layer <= min(depth, 3) for layer in range(1, 5)] for depth in depths[right.id]]
            assert not any(c == c for token in left.confidences for c in token)


def test_a_row_whose_state_is_no_number_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = native_engine(max_batch=4)
    right = [answer.tokens for answer in native_engine(max_batch=4).generate(texts(4), policy=POLICY)]
    put = engine.slots.put_source

    def spoiled(slot: int, keys: Tensor, values: Tensor) -> None:
        put(slot, keys, values * float("nan") if slot == 2 else values)

    monkeypatch.setattr(engine.slots, "put_source", spoiled)
    answers = engine.generate(texts(4), policy=POLICY)
    assert [answer.status for answer in answers] == [Status.finished] * 2 + [Status.failed] + [Status.finished]
    assert [answers[i].tokens for i in (0, 1, 3)] == [right[i] for i in (0, 1, 3)]
    assert NOTHING not in answers[2].tokens


# heads


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
@pytest.mark.parametrize("measure", [None, Measure.state, Measure.classifier], ids=str)
def test_behind_the_screen_is_the_full_heads_argmax(arithmetic: str, measure: Measure | None) -> None:
    policy = confident(measure, usual(measure)) if measure else confident(Measure.softmax, 1.0)
    right = native_engine(arithmetic).generate(texts(), policy=policy)
    tokens = sum(len(answer.tokens) for answer in right)
    for k, doubt, share in ((2, 1.0, 0.5), (8, 1.0, 0.1), (VOCABULARY, 1.0, 0.0), (8, 2.0**14, 1.0)):
        engine = native_engine(arithmetic, head=Head.screened, head_k=k)
        engine.machine._doubt *= doubt  # a much coarser screen: every row stays open
        try:
            answers = engine.generate(texts(), policy=policy)
        finally:
            engine.machine._doubt /= doubt  # all engines of the model share it
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in right]
        fell = sum(record.fallbacks for record in engine.clock.history)
        assert fell <= share * tokens and (doubt == 1.0 or fell == tokens)


def test_behind_the_screen_too_a_word_that_is_no_number_fails_the_row() -> None:
    hf = random_t5(seed=1, vocabulary=VOCABULARY, **SHAPES["v1.1"])
    hf.lm_head.weight.data[50, 3] = float("nan")
    model = served(early_exit(hf, length=LENGTH))
    for head in (Head.full, Head.screened):
        answers = engine_of(BatchRule.own, model, runner="native", head=head, head_k=8).generate(texts(3))
        assert {answer.error for answer in answers} == {"the logits are not finite"}


def test_int8_layers_have_an_exact_head_behind_the_screen() -> None:
    """However few words are looked at, the word is that of the bf16 head over the int8 layers' states."""
    told = []
    for k in (2, 16, VOCABULARY):
        engine = native_engine("int8", head=Head.screened, head_k=k)
        told.append([answer.tokens for answer in engine.generate(texts())])
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("arithmetic", KINDS)
def test_a_screened_check_reads_exact_logits_of_the_best(arithmetic: str) -> None:
    """With every word rescored the margins are the full head's; with few they stay near."""
    kept = {}
    for head, k in ((Head.full, 2), (Head.screened, VOCABULARY), (Head.screened, 4)):
        engine = native_engine(arithmetic, head=head, head_k=k, record_confidences=True)
        answers = engine.generate(texts(), policy=confident(Measure.softmax, 1.0), max_tokens=1)
        kept[head, k] = torch.tensor([answer.confidences[0][:3] for answer in answers])
    near = 0.03 if arithmetic == "int8" else 1e-6  # the full head of an int8 engine is int8 too
    torch.testing.assert_close(kept[Head.screened, VOCABULARY], kept[Head.full, 2], atol=near, rtol=0)
    torch.testing.assert_close(kept[Head.screened, 4], kept[Head.full, 2], atol=0.03, rtol=0)
    assert not torch.equal(kept[Head.screened, 4], kept[Head.full, 2])


# how it is had


def test_the_library_is_built_once_and_a_broken_one_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALM_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS[:1], "-O0", *build.FLAGS[2:]))
    first = build.library.__wrapped__()
    (made,) = (tmp_path / "native").glob("*.so")
    stamp = made.stat().st_mtime_ns
    monkeypatch.setattr(subprocess, "run", _version_only(subprocess.run))
    assert build.library.__wrapped__()._name == first._name == str(made) and made.stat().st_mtime_ns == stamp
    monkeypatch.undo()
    monkeypatch.setenv("CALM_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS[:1], "-O0", *build.FLAGS[2:]))
    broken = tmp_path / "other" / "native" / made.name
    broken.parent.mkdir(parents=True)
    broken.write_bytes(made.read_bytes()[:1000])
    broken.with_suffix(".sha256").write_bytes(made.with_suffix(".sha256").read_bytes())
    assert isinstance(build.library.__wrapped__(), ctypes.CDLL) and broken.stat().st_size == made.stat().st_size


def _version_only(run: Any) -> Any:
    def asked(command: list[str], **options: Any) -> Any:
        assert command[-1] == "--version", "nothing is compiled twice"
        return run(command, **options)

    return asked


@pytest.mark.parametrize(
    ("compiler", "line"),
    [
        ("false -v", r"cannot compile the native runner \(.*\); use runner=eager"),
        ("no-such-compiler", r"no C\+\+ compiler found \(CXX=no-such-compiler\); install one, or use runner=eager"),
        ("false", r"cannot compile the native runner \(.*\); use runner=eager"),
    ],
)
def test_without_a_compiler_there_is_one_line_and_auto_is_eager(
    compiler: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("CALM_CACHE", str(tmp_path))
    monkeypatch.setattr("serve.backend.library", build.library.__wrapped__)
    monkeypatch.setattr("serve.backend.available", lambda: build.available.__wrapped__())
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    with pytest.raises(NativeError, match=line):
        engine_of(BatchRule.own, runner="native")
    engine = engine_of(BatchRule.own, runner="auto")
    assert engine.generate(texts(1))[0].status is Status.finished and type(engine.machine).__name__ == "Machine"
    with pytest.raises(ConfigError, match="weights=int8 needs runner=native, and this engine's is eager"):
        engine_of(BatchRule.own, runner="auto", weights="int8")


@pytest.mark.slow
def test_a_processor_without_dot_products_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain code for old processors: fp32 and int8 to the bit, bf16 up to the rounding of sums; whole engines."""
    if platform.machine() != "x86_64":
        pytest.skip("compiles for another x86-64 processor")
    torch.manual_seed(0)
    weights, x = torch.randn(70, 144), torch.randn(9, 144)

    def everything() -> tuple[dict[int, Tensor], dict[str, list[tuple[int, ...]]]]:
        products = {kind: product(x, weights, kind) for kind in KINDS.values()}
        said = {}
        for arithmetic in ARITHMETICS:
            for head in (Head.full, Head.screened, Head.candidates):
                answers = native_engine(arithmetic, head=head, head_k=8).generate(texts(), policy=POLICY)
                said[f"{arithmetic} {head.value}"] = [answer.tokens for answer in answers]
        return products, said

    here, said_here = everything()
    try:
        with monkeypatch.context() as patch:
            patch.setenv("CALM_CACHE", str(tmp_path))
            patch.setattr(build, "FLAGS", ("-std=c++17", "-O1", "-march=x86-64-v3", *build.FLAGS[3:]))
            library.cache_clear()
            assert build.instructions() == "fma" != build.kernels()
            there, said_there = everything()
    finally:
        library.cache_clear()
    assert torch.equal(there[INT8], here[INT8]) and torch.equal(there[FP32], here[FP32])
    torch.testing.assert_close(there[BF16], here[BF16], atol=1e-4, rtol=1e-4)
    for name, tokens in said_here.items():
        same = sum(left == right for left, right in zip(tokens, said_there[name], strict=True))
        assert same == len(tokens) if name.startswith("fp32") else same >= 0.5 * len(tokens), name


def test_what_the_step_does_not_know_is_refused_by_name() -> None:
    model = tiny_served()
    odd = replace(model, spec=replace(model.spec, bias_kind=BiasKind.rotary, activation="tanh"))
    with pytest.raises(NativeError, match="no decoder with dtype torch.float64; use runner=eager"):
        Engine(tiny_served(dtype=torch.float64), runner="native")
    assert Engine(tiny_served(dtype=torch.float64)).generate(texts(1))[0].status is Status.finished
    with pytest.raises(NativeError, match="no decoder with positions by rotary and activation 'tanh'; use"):
        Engine(odd, runner="native")
