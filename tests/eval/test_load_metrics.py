"""Latencies, throughput, goodput and peaks: by hand, and against vLLM's formulas written out request by request."""

import math
from typing import Any

import numpy as np
import pytest

from eval.load_metrics import Since, distribution, itl, lateness, measures, peaks, tpot, ttft
from eval.load_samples import Counted, ErrorKind, Sample

ONE = Sample(0, scheduled=1.0, sent=1.5, ended=4.1, chunks=(2.0, 2.5, 4.0), tokens=3, prompt_tokens=10)
TWO = Sample(1, scheduled=2.0, sent=2.0, ended=2.5, chunks=(2.4,), tokens=1, prompt_tokens=20)
REFUSED = Sample(2, scheduled=3.0, sent=3.0, ended=3.1, error=ErrorKind.refused, status=429)
CUT = Sample(3, scheduled=3.5, sent=3.6, ended=9.0, chunks=(4.0, 8.0), error=ErrorKind.timeout)


def test_one_requests_latencies_by_hand() -> None:
    assert ttft(ONE, Since.sent) == 0.5 and ttft(ONE, Since.scheduled) == 1.0
    assert itl(ONE) == [0.5, 1.5] and tpot(ONE) == 1.0
    assert itl(TWO) == [] and tpot(TWO) is None


def test_a_loads_figures_by_hand() -> None:
    told = measures([ONE, TWO, REFUSED, CUT], 10.0, [50, 99], {"ttft": 400.0, "tpot": 1000.0})
    assert (told["completed"], told["failed"], told["lost"], told["errors"]) == (2, 2, 1, {"refused": 1, "timeout": 1})
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (30, 4)
    assert (told["request_throughput"], told["output_throughput"], told["total_token_throughput"]) == (0.2, 0.4, 3.4)
    sent, due = told["from_sent"], told["from_scheduled"]
    assert (sent["mean_ttft_ms"], due["mean_ttft_ms"]) == (pytest.approx(450.0), pytest.approx(700.0))
    assert (sent["mean_e2el_ms"], due["mean_e2el_ms"]) == (pytest.approx(1450.0), pytest.approx(1700.0))
    assert sent["p99_ttft_ms"] == pytest.approx(400 + 0.99 * 100)  # linear between the two
    assert told["mean_tpot_ms"] == 1000.0 and told["std_tpot_ms"] == 0.0  # of the one that has one
    assert (told["mean_itl_ms"], told["std_itl_ms"]) == (1000.0, 500.0)
    assert told["concurrency"] == pytest.approx((2.5 + 0.4) / 10)
    assert told["inner_token_latency_ms"] == pytest.approx(1000 * 2.0 / 4)
    assert told["decode_concurrency"] == pytest.approx(0.4 * 0.5)
    assert (sent["request_goodput"], due["request_goodput"]) == (0.1, 0.1)  # TWO: one token counts as tpot 0
    assert sent["slo_attainment"] == 0.25


def test_limits_are_kept_when_they_are_met_exactly_and_all_must_be() -> None:
    whole = measures([ONE, TWO], 2.0, [99], {"ttft": 500.0, "e2el": 2500.0})
    assert whole["from_sent"]["request_goodput"] == 1.0 and whole["from_scheduled"]["request_goodput"] == 0.5
    part = measures([ONE, TWO], 2.0, [99], {"ttft": 500.0, "e2el": 2499.0})
    assert part["from_sent"]["request_goodput"] == 0.5
    assert "request_goodput" not in measures([ONE], 2.0, [99], {})["from_sent"]


def test_peaks_are_of_one_second_buckets_after_the_first_request() -> None:
    # buckets from 1.5: ONE in 0..2 with chunks in 0, 1, 2; TWO in 0 with a chunk in 0
    assert peaks([ONE, TWO]) == (2.0, 2)
    # from 2.0: a chunk each in buckets 0, 0, 2, 2, 2
    three = Sample(0, 2.0, 2.0, 5.0, chunks=(2.4, 2.5, 4.1, 4.2, 4.9), tokens=5)
    assert peaks([three]) == (3.0, 1)
    assert peaks([three, Sample(1, 4.5, 4.5, 4.9, chunks=(4.8,), tokens=1)]) == (4.0, 2)
    assert peaks([REFUSED, CUT]) == (0.0, 0)


def test_what_failed_is_never_mixed_in() -> None:
    with_failures = measures([ONE, TWO, REFUSED, CUT], 10.0, [90], {})
    without = measures([ONE, TWO], 10.0, [90], {})
    counted = {"failed", "lost", "errors", "max_client_lag_ms", "p99_client_lag_ms", "client_late"}
    assert {k: v for k, v in with_failures.items() if k not in counted} == {
        k: v for k, v in without.items() if k not in counted
    }


def test_a_load_of_which_nothing_came_back_has_no_latencies() -> None:
    told = measures([REFUSED], 5.0, [50], {"ttft": 1.0})
    assert told["completed"] == 0 and told["output_throughput"] == 0.0
    assert told["mean_itl_ms"] is None and told["inner_token_latency_ms"] is None
    assert told["from_sent"]["median_e2el_ms"] is None and told["from_sent"]["request_goodput"] == 0.0
    assert told["client_late"] is False


def test_a_server_that_says_no_prompt_tokens_has_no_total() -> None:
    told = measures([ONE, Sample(1, 0, 0, 1, chunks=(1.0,), tokens=1, counted=Counted.chunks)], 5.0, [50], {})
    assert told["total_input_tokens"] is None and told["total_token_throughput"] is None
    assert told["total_output_tokens"] == 4 and told["tokens_from"] == {"chunks": 1}


def test_a_stalled_client_cannot_hide_what_a_user_waits() -> None:
    """Ten due a second apart; the client is stuck for ten seconds and then sends all at once to a fast server."""
    stuck = [Sample(i, float(i), 10.0, 10.1, chunks=(10.1,), tokens=1) for i in range(10)]
    told = measures(stuck, 10.1, [99], {})
    assert told["from_sent"]["mean_ttft_ms"] == pytest.approx(100.0)
    assert told["from_scheduled"]["mean_ttft_ms"] == pytest.approx(5600.0)
    assert told["client_late"] is True and told["max_client_lag_ms"] == pytest.approx(10_000.0)


def test_the_client_is_late_above_five_percent_of_the_median_latency() -> None:
    def lag(seconds: float) -> dict[str, Any]:
        return lateness([Sample(i, 0.0, seconds, 1.1, chunks=(1.0 + seconds,), tokens=1) for i in range(3)])

    assert lag(0.049)["client_late"] is False and lag(0.051)["client_late"] is True
    assert lag(0.049)["p99_client_lag_ms"] == pytest.approx(49.0)


def test_depths_are_means_over_all_tokens_where_every_answer_tells_them() -> None:
    def of(tokens: int, layer: float | None, certified: bool | None = True) -> Sample:
        skipped = None if layer is None else 1 - layer / 8
        return Sample(0, 0, 0, 1, (1.0,), tokens, exit_layer=layer, layers_skipped=skipped, certified=certified)

    told = measures([of(3, 2.0), of(1, 6.0, False), REFUSED], 1.0, [50], {})
    assert (told["mean_exit_layer"], told["layers_skipped"], told["certified"]) == (3.0, 1 - 3 / 8, 0.5)
    told = measures([of(3, 2.0), of(1, None, None)], 1.0, [50], {})
    assert (told["mean_exit_layer"], told["layers_skipped"], told["certified"]) == (None, None, None)
    assert measures([REFUSED], 1.0, [50], {})["certified"] is None


def test_percentiles_are_numpys_linear_ones() -> None:
    values = [0.001 * value for value in (3, 1, 4, 1, 5, 9, 2, 6)]
    told = distribution("x", values, [25, 50, 99, 99.9])
    assert told["p50_x_ms"] == told["median_x_ms"] == 3.5 and told["mean_x_ms"] == 3.875
    assert told["p25_x_ms"] == pytest.approx(1.75) and told["p99_x_ms"] == pytest.approx(6 + 3 * 0.93)
    assert set(told) == {"mean_x_ms", "median_x_ms", "std_x_ms", "p25_x_ms", "p50_x_ms", "p99_x_ms", "p99.9_x_ms"}


def literal(samples: list[Sample], duration: float, limits: dict[str, float]) -> dict[str, float]:
    """vLLM's definitions, one request after the other."""
    ttfts, tpots, all_tpots, itls, ends, lengths, prompts = [], [], [], [], [], [], []  # type: ignore[var-annotated]
    for sample in samples:
        if sample.error is not None:
            continue
        start = sample.sent
        first = sample.chunks[0] - start
        latency = sample.chunks[-1] - start
        ttfts.append(first)
        for before, after in zip(sample.chunks[:-1], sample.chunks[1:], strict=True):
            itls.append(after - before)
        per_token = 0.0
        if sample.tokens > 1:
            per_token = (latency - first) / (sample.tokens - 1)
            tpots.append(per_token)
        all_tpots.append(per_token)
        ends.append(latency)
        lengths.append(sample.tokens)
        prompts.append(sample.prompt_tokens or 0)
    good = 0
    for values in zip(ttfts, all_tpots, ends, strict=True):
        good += all(value <= limits[name] / 1000 for name, value in zip(("ttft", "tpot", "e2el"), values, strict=True))
    done = [sample for sample in samples if sample.error is None]
    begin = min(sample.sent for sample in done)
    buckets = math.ceil(max(sample.chunks[-1] for sample in done) - begin) + 1
    tokens, running = [0] * buckets, [0] * buckets
    for sample in done:
        for at in sample.chunks:
            tokens[int(at - begin)] += 1
        for bucket in range(int(sample.sent - begin), int(sample.chunks[-1] - begin) + 1):
            running[bucket] += 1
    told = {
        "request_throughput": len(done) / duration,
        "output_throughput": sum(lengths) / duration,
        "total_token_throughput": (sum(prompts) + sum(lengths)) / duration,
        "request_goodput": good / duration,
        "max_output_tokens_per_s": max(tokens),
        "max_concurrent_requests": max(running),
    }
    for name, seconds in {"ttft": ttfts, "tpot": tpots, "itl": itls, "e2el": ends}.items():
        told[f"mean_{name}_ms"] = np.mean(seconds) * 1000
        told[f"median_{name}_ms"] = np.median(seconds) * 1000
        told[f"std_{name}_ms"] = np.std(seconds) * 1000
        for percentile in (50, 99):
            told[f"p{percentile}_{name}_ms"] = np.percentile(seconds, percentile) * 1000
    return told


@pytest.mark.parametrize("seed", range(5))
def test_everything_equals_vllms_definitions_written_out(seed: int) -> None:
    draw = np.random.default_rng(seed)
    samples = []
    for number in range(60):
        sent = float(draw.uniform(0, 9))
        count = int(draw.integers(1, 12))
        chunks = tuple(float(at) for at in sent + np.cumsum(draw.exponential(0.2, size=count)))
        error = [None, None, None, ErrorKind.status][int(draw.integers(4))]
        tokens = count + int(draw.integers(0, 3))  # several tokens may come in one chunk
        samples.append(
            Sample(number, sent - 0.01, sent, chunks[-1], chunks, tokens, int(draw.integers(1, 99)), error=error)
        )
    limits = {"ttft": 250.0, "tpot": 200.0, "e2el": 1500.0}
    found = measures(samples, 12.5, [50, 99], limits)
    flat = {**found, **found["from_sent"]}
    expected = literal(samples, 12.5, limits)
    assert {name: flat[name] for name in expected} == pytest.approx(expected)
    assert 0 < expected["request_goodput"] < expected["request_throughput"]
