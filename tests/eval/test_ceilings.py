"""The machine's rates on a clock that is told, and what a step must move, counted by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from calm.config import Head, Measure, RunnerName
from calm.cost import backfill_work, head_work, layer_work
from eval.ceilings import (
    Ceilings,
    Need,
    Sizes,
    cache_bytes,
    floors,
    packed_rates,
    probe,
    product_rates,
    reading_rate,
    step_need,
)
from serve.engine import Engine
from serve.native.build import NativeError, library
from tests.serve.models import tiny_served


class Ticking:
    """Each look at the clock is a second after the last."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return float(self.looks)


SPEC = tiny_served().spec  # 4 layers
SIZES = Sizes(layer=1000, head=5000, kv=10)
LAYER, HEAD, FILL = layer_work(SPEC, 3, 7, 2), head_work(SPEC), backfill_work(SPEC)


def test_rates_are_work_by_seconds() -> None:
    assert reading_rate(4096, 3, Ticking()) == 4096
    rates = product_rates(2, Ticking())
    assert rates["fp32"] == {rows: rows * 1024 * 4096 for rows in (1, 8, 32, 256)}
    assert set(rates) >= {"fp32", "bf16"}


def test_a_probe_of_this_machine_is_whole() -> None:
    found = probe(repeats=1, memory_bytes=1 << 22)
    assert found.memory > 0 and found.cache > 0 and found.cache_bytes >= 1 << 18 and found.threads >= 1
    assert found.fastest("fp32") and found.fastest("nothing") is None
    assert found.to_json()["macs"]["fp32"][8] > 0


def test_the_best_of_several_counts() -> None:
    times = iter([0.0, 5.0, 10.0, 12.0, 20.0, 23.0] * 2)
    assert reading_rate(400, 3, lambda: next(times)) == 400 / 2.0


def test_the_runners_own_product_is_measured_where_it_can_be_had() -> None:
    try:
        library()
    except NativeError as error:
        pytest.skip(str(error))
    engine = Engine(tiny_served(), runner=RunnerName.native, max_batch=4)
    assert packed_rates(engine, (1, 4, 8), 2, Ticking()) == {
        rows: rows * SPEC.d_model * SPEC.vocab_size for rows in (1, 4)
    }


def test_the_last_level_cache_is_found(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate([(1, "Data", "32K"), (1, "Instruction", "64M"), (3, "Unified", "16M")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", str(level)), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    (tmp_path / "index9").mkdir()
    assert cache_bytes(tmp_path) == 16 << 20
    assert cache_bytes(tmp_path / "nothing") == 32 << 20


def need(depths: list[int], measure: Measure | None = None, head: Head = Head.full) -> Need:
    return step_need(SPEC, SIZES, depths, keys=3, source=7, cache_width=2, measure=measure, head=head)


def test_full_depth_reads_every_weight_once_and_every_rows_cache() -> None:
    assert need([4, 4]) == Need(4 * 1000 + 5000, 8 * LAYER.row_bytes, 8 * LAYER.macs + 2 * HEAD.macs)


def test_cross_attention_may_be_kept_in_fewer_bytes() -> None:
    found = step_need(SPEC, SIZES, [4], keys=3, source=7, cache_width=2, cross_width=1)
    assert found.rows == 4 * (layer_work(SPEC, 3, 0, 2).row_bytes + layer_work(SPEC, 0, 7, 1).row_bytes)


def test_a_layer_is_read_if_any_row_needs_it_and_keys_are_filled_above_the_last() -> None:
    found = need([1, 3], Measure.state)
    assert found.weights == 3 * 1000 + 5000 + 10
    assert found.rows == 4 * LAYER.row_bytes
    assert found.macs == 4 * LAYER.macs + 2 * HEAD.macs + 4 * FILL.macs


def test_checks_that_read_words_read_the_head_each_time() -> None:
    assert need([2, 2], Measure.softmax).weights == 2 * 1000 + 2 * 5000 + 2 * 10
    assert need([2, 4], Measure.softmax).weights == 4 * 1000 + 3 * 5000 + 5000  # checks at 1..3; one row speaks at 4
    assert need([3, 3], Measure.softmax, Head.candidates).weights == 3 * 1000 + 5000 + 10
    assert need([2, 2], Measure.classifier).weights == 2 * 1000 + 5000 + 2 * 10


def test_needs_add_up_and_average() -> None:
    assert (Need(1, 2, 3) + Need(3, 2, 1)).over(2) == Need(2, 2, 2) and Need(1, 2, 3).bytes == 3


def test_floors_tell_memory_from_cache_and_name_what_counts() -> None:
    machine = Ceilings(
        memory=100.0, cache=1000.0, cache_bytes=500, macs={"int8": {1: 10.0}, "int8 packed": {8: 50.0}}, threads=1
    )
    found = floors(Need(300, 100, 100), 8.0, machine, "int8", held=600)
    assert (found["from_memory_s"], found["from_cache_s"], found["compute_s"]) == (4.0, 2.0, 2.0)
    assert (found["share_of_memory"], found["share_of_cache"], found["fits_cache"]) == (0.5, 0.25, False)
    assert floors(Need(300, 100, 100), 8.0, replace(machine, macs={}), "bf16", held=500)["from_cache_s"] == 0.4
    assert floors(Need(), 0.0, machine, "int8", 0.0)["share_of_memory"] is None


def test_sizes_follow_the_width_of_a_number() -> None:
    assert Sizes.of(SPEC, "fp32").layer == 4 * Sizes.of(SPEC, "int8").layer == layer_work(SPEC).weight_bytes
    assert Sizes.of(SPEC, "bf16").head == 2 * SPEC.d_model * SPEC.vocab_size
