"""Cost tables and counts of work."""

import dataclasses
import json

import pytest

from calm.config import Measure
from calm.cost import CostTable, Work, backfill_work, backfilling, checking, cross_work, head_work, layer_work
from calm.errors import CalmError, ConfigError
from calm.models.base import BiasKind, DecoderSpec


def spec_of(d_model: int, heads: int, d_ff: int, vocabulary: int = 32128, *, gated: bool = True) -> DecoderSpec:
    """Shapes without tensors: all that counting needs."""
    return DecoderSpec(
        num_layers=8, num_heads=heads, num_kv_heads=heads, d_model=d_model, d_kv=64, d_ff=d_ff,
        vocab_size=vocabulary, norm_eps=1e-6, activation="gelu_new", gated=gated,
        bias_kind=BiasKind.relative_buckets, bias_buckets=32, bias_max_distance=128, cross_attention=True,
        attention_scale=1.0, head_scale=1.0, start_token_id=0, eos_token_id=1, pad_token_id=0, tensors={},
    )  # fmt: skip


SMALL, BASE = spec_of(512, 6, 1024), spec_of(768, 12, 2048)


@pytest.mark.parametrize(("spec", "layer", "head"), [(SMALL, 2.75e6, 16.4e6), (BASE, 8.26e6, 24.7e6)])
def test_t5_v1_1_costs_what_is_known_of_it(spec: DecoderSpec, layer: float, head: float) -> None:
    assert layer_work(spec).macs == pytest.approx(layer, rel=0.005)
    assert head_work(spec).macs == pytest.approx(head, rel=0.005)
    assert backfill_work(spec).macs / layer_work(spec).macs == pytest.approx(0.14, abs=0.005)


def test_what_is_read_grows_with_the_positions() -> None:
    inner = 6 * 64
    assert layer_work(SMALL).row_bytes == 0
    work = layer_work(SMALL, keys=10, source=512)
    assert work.row_bytes == 2 * 522 * inner * 4  # K and V
    assert work.macs - layer_work(SMALL).macs == 2 * 522 * inner  # scores and mixture
    assert work.weight_bytes == layer_work(SMALL).macs * 4
    assert layer_work(SMALL, source=512, width=2).row_bytes == 2 * 512 * inner * 2
    assert head_work(SMALL, width=2) == Work(512 * 32128, 2 * 512 * 32128)
    assert cross_work(SMALL, 100).macs == 100 * 2 * 512 * inner


def test_other_shapes_have_other_parts() -> None:
    assert layer_work(SMALL).macs - layer_work(spec_of(512, 6, 1024, gated=False)).macs == 512 * 1024
    alone = dataclasses.replace(SMALL, cross_attention=False)
    assert layer_work(SMALL).macs - layer_work(alone).macs == 2 * 512 * 6 * 64
    assert layer_work(alone, source=512) == layer_work(alone, keys=512)  # the prompt is in the same sequence
    grouped = dataclasses.replace(alone, num_kv_heads=2)
    assert layer_work(alone).macs - layer_work(grouped).macs == 2 * 512 * 4 * 64
    assert layer_work(grouped, keys=3).row_bytes == 2 * 3 * 2 * 64 * 4
    assert cross_work(alone, 100).macs == 0


def test_names_of_checks() -> None:
    assert checking(()) == checking((), first=True) == "check"
    both = {Measure.state, Measure.softmax}
    assert checking(both) == checking(reversed(sorted(both))) == "check:softmax+state"
    assert checking(both, first=True) == "first_check:softmax+state"
    assert backfilling(3) == "backfill:3"


TABLE = CostTable({"layer": {1: 0.5, 8: 1.25}, "step": {1: 0.0}}, repeats=5, environment={"cpu": "some", "threads": 1})


def test_a_table_round_trips_through_json() -> None:
    text = TABLE.to_json()
    assert CostTable.from_json(text) == TABLE
    assert CostTable.from_json(text).to_json() == text
    assert json.loads(text)["environment"] == {"cpu": "some", "threads": 1}


@pytest.mark.parametrize(("name", "size", "there"), [("layer", 4, "1, 8"), ("head", 1, "no size")])
def test_what_was_not_measured_is_refused(name: str, size: int, there: str) -> None:
    with pytest.raises(CalmError, match=f"'{name}' at {there}, not at {size}") as caught:
        TABLE.at(name, size)
    assert isinstance(caught.value, ValueError)
    assert TABLE.at("layer", 8) == 1.25 and TABLE.at("step") == 0.0


def test_further_entries_join_the_table() -> None:
    wider = TABLE.plus({"layer": {4: 0.75, 8: 1.0}, "head": {1: 2.0}})
    assert (wider.at("layer", 1), wider.at("layer", 4), wider.at("layer", 8), wider.at("head")) == (0.5, 0.75, 1.0, 2.0)
    assert wider.repeats == 5 and wider.environment == TABLE.environment
    assert TABLE.at("layer", 8) == 1.25


@pytest.mark.parametrize("seconds", [-1e-9, float("nan"), float("inf")])
def test_seconds_are_numbers_from_zero_up(seconds: float) -> None:
    with pytest.raises(ConfigError, match="'layer' at 2"):
        CostTable({"layer": {2: seconds}})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"seconds": {"layer": {"one": 1}}, "repeats": 1, "environment": {}}', '{"seconds": 3}']
)
def test_other_text_is_no_table(text: str) -> None:
    with pytest.raises(ConfigError, match="no cost table"):
        CostTable.from_json(text)


def test_a_table_with_impossible_seconds_is_refused_when_read() -> None:
    with pytest.raises(ConfigError, match="-1.0 seconds"):
        CostTable.from_json(TABLE.to_json().replace("1.25", "-1.0"))
