"""Bytes of exits against every batch there can be; and the verdict at known winners."""

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest

from calm.config import Measure
from calm.models.base import DecoderSpec
from calm.models.t5 import export_spec
from eval.ceilings import Sizes, step_need
from eval.exit_bytes import bounds, expected, parts
from eval.verdict import ENDED, WORTH, Evidence, Says, verdict

from ..scripted import early_exit, random_t5

KEYS, SOURCE, LAYERS = 3, 7, 4


def spec_of(vocabulary: int = 40, layers: int = LAYERS) -> DecoderSpec:
    return export_spec(early_exit(random_t5(vocabulary=vocabulary, decoder_layers=layers)))


SPEC = spec_of()


def step(depths: list[int], measure: Measure | None = None) -> float:
    return step_need(SPEC, Sizes.of(SPEC, "fp32"), depths, KEYS, SOURCE, 4, measure).bytes


@pytest.mark.parametrize("batch", [1, 8])
def test_the_parts_of_a_step_are_the_step(batch: int) -> None:
    found = parts(SPEC, batch, KEYS, SOURCE)
    assert found["step"] * batch == pytest.approx(step([LAYERS] * batch))
    assert sum(found[name] for name in ("layers", "head", "self_kv", "cross_kv")) == pytest.approx(found["step"])
    left = step([LAYERS - 1] * batch, Measure.state) / batch
    one = (found["layers"] + found["self_kv"] + found["cross_kv"]) / LAYERS
    assert found["step"] - left == pytest.approx(one - found["backfill"])


@pytest.mark.parametrize("measure", [Measure.state, Measure.softmax])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_expected_bytes_are_the_mean_over_every_batch(measure: Measure, batch: int) -> None:
    shares = np.array([0.4, 0.1, 0.2, 0.3])
    mean = 0.0
    for depths in product(range(1, LAYERS + 1), repeat=batch):
        mean += prod(shares[depth - 1] for depth in depths) * step(list(depths), measure) / batch
    assert float(expected(SPEC, shares, batch, KEYS, SOURCE, measure)) == pytest.approx(mean)


def test_bounds_are_full_depth_over_exits_with_intervals_over_articles() -> None:
    counts = np.array([[6, 0, 0, 2], [0, 4, 0, 0], [1, 1, 1, 1]])
    found = bounds(SPEC, counts, [1, 8], KEYS, SOURCE, 0, 200)
    moved = sum(n * step([depth], Measure.state) for depth, n in enumerate(counts.sum(axis=0), 1)) / counts.sum()
    assert found[0]["bound"] == pytest.approx(step([LAYERS]) / moved) and found[0]["bytes"] == pytest.approx(moved)
    assert found[0]["most"] == pytest.approx(step([LAYERS]) / step([1], Measure.state))
    assert all(row["bound_low"] < row["bound"] < row["bound_high"] < row["most"] for row in found)
    alike = bounds(SPEC, np.array([[1, 2, 3, 4]] * 5), [2], KEYS, SOURCE, 0, 50)
    assert alike[0]["bound_low"] == pytest.approx(alike[0]["bound_high"])
    at_full = bounds(SPEC, np.array([[0, 0, 0, 9]]), [1, 8], KEYS, SOURCE, 0, 5)
    assert [row["bound"] for row in at_full if row["checks"] == "state"] == pytest.approx([1, 1])
    assert all(row["bound"] < 1 for row in at_full if row["checks"] == "softmax")


def evidence(counts: list[int], spec: DecoderSpec = SPEC, articles: int = 50, ours: bool = True) -> Evidence:
    """Of articles that all have these tokens by layer."""
    number, per_article = np.arange(1, spec.num_layers + 1), np.array(counts)
    made_of = {batch: parts(spec, batch, KEYS, SOURCE) for batch in (1, 8)}
    return Evidence(
        num_layers=spec.num_layers,
        ours=ours,
        first=float(per_article @ number / per_article.sum()),
        settled=float(per_article @ number / per_article.sum()),
        head_share={batch: each["head"] / each["step"] for batch, each in made_of.items()},
        ended=1.0,
        bounds=bounds(spec, np.stack([per_article] * articles), [1, 8], KEYS, SOURCE, 0, 100),
    )


def test_tokens_that_leave_at_once_are_worth_it() -> None:
    found = verdict(evidence([10, 0, 0, 0]))
    assert found.says is Says.worth
    assert found.because.startswith("an oracle would skip 75 % of the layers; by bytes at batch 1 that bounds")
    assert found.because.endswith("worth certifying thresholds")
    assert verdict(evidence([10, 0, 0, 0], ours=False)).because.endswith("worth training exits")


def test_a_vocabulary_that_is_the_step_is_not_worth_it_wherever_tokens_leave() -> None:
    wide = spec_of(vocabulary=20_000)
    found = verdict(evidence([10, 0, 0, 0], wide))
    share = evidence([1, 0, 0, 0], wide).head_share[8]
    assert found.says is Says.no and share > 0.5
    assert f"not for this model: the head alone is {100 * share:.0f} % of a step" in found.because


def test_tokens_that_settle_late_are_not_worth_it_and_a_plain_t5_may_be_moved() -> None:
    found = verdict(evidence([0, 0, 2, 8]))
    assert found.says is Says.no and found.because.startswith("not for this model: tokens settle at layer 3.8 of 4")
    plain = verdict(evidence([0, 0, 2, 8], ours=False))
    assert plain.says is Says.no and plain.because.startswith("not for this model as it is: tokens settle at layer 3.8")
    assert "training exits moves that" in plain.because


def test_an_interval_that_holds_the_threshold_is_undecided_and_a_batch_that_falls_short_is_named() -> None:
    base = evidence([10, 0, 0, 0])

    def said(batch_1: float, batch_8: float, half: float) -> Evidence:
        to = {1: batch_1, 8: batch_8}
        ends = {"bound": 0.0, "bound_low": -half, "bound_high": half}
        rows = [{**row, **{name: to[row["batch"]] + by for name, by in ends.items()}} for row in base.bounds]
        return replace(base, bounds=rows)

    near = verdict(said(WORTH + 0.01, 1.0, 0.05))
    assert near.says is Says.undecided and "at batch 1" in near.because and "(n=)" in near.because
    assert verdict(said(WORTH, WORTH, 0.0)).says is Says.worth
    assert verdict(said(WORTH - 0.06, 1.0, 0.05)).says is Says.no
    assert "; at batch 8 it is 1.10, not surely 1.25; worth" in verdict(said(2.0, 1.1, 0.01)).because
    assert "by bytes at batch 8 that bounds the speed-up to 2.00" in verdict(said(1.1, 2.0, 0.01)).because


def test_answers_that_never_end_decide_nothing_but_the_head_still_does() -> None:
    found = evidence([10, 0, 0, 0])
    assert verdict(replace(found, ended=ENDED)).says is Says.worth
    circles = verdict(replace(found, ended=0.2))
    assert circles.says is Says.undecided and "only 20 % of the answers end" in circles.because
    wide = replace(evidence([10, 0, 0, 0], spec_of(vocabulary=20_000)), ended=0.2)
    assert verdict(wide).says is Says.no
