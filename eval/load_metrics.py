"""What a load brought: latencies, throughput, goodput, peaks. Pure functions over samples; knows no server and no file.

Matched are the definitions of ``vllm bench serve`` (0.32), under its names, where they are counted from ``sent``:
- ttft: from just before the request is sent to the first chunk with choices. itl: from each such chunk to the next,
  pooled over all requests. e2el: to the last such chunk; so e2el - ttft is the sum of a request's itl.
- tpot: (e2el - ttft) / (tokens - 1) of a request of more than one token. One of fewer has none; for goodput it is 0.
- duration: from the schedule's zero (one gap before the first request) until everything was back. Throughputs are
  sums by duration. Goodput counts requests that keep all limits.
- mean, median, population standard deviation, linear percentiles.
- peaks: buckets of one second after the first request sent; a chunk counts as one token there, and a request in every
  bucket that it touches.
Only requests that were answered count; what failed is counted beside them, by its kind.

Other than there: prompt tokens are those that the server says, not those of a tokenizer here; an empty distribution is
null, not 0.

The same latencies are told from ``scheduled``, when the request was due: there a client that falls behind, or a server
that stalls it, cannot hide that a user would have waited longer (coordinated omission).

Of others: ``concurrency`` is SGLang's sum(e2el) / duration (Little's law), ``slo_attainment`` its share of good
requests in all that were sent; ``inner_token_latency`` is that of arXiv 2407.20272, sum(last - first) / all tokens, and
``decode_concurrency`` its product with the throughput. Where a server tells them, ``mean_exit_layer`` and
``layers_skipped`` are means over all tokens, and ``certified`` is the share of answers that a certificate speaks of.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from .load_samples import Sample, answered

LATE = 0.05  # of the median e2el: a client later than this, at its 99th percentile, disturbs what it measures
MS = 1000.0


class Since(str, Enum):
    """Where a latency is counted from."""

    scheduled = "scheduled"
    sent = "sent"


def ttft(sample: Sample, since: Since) -> float:
    return sample.first - _start(sample, since)


def e2el(sample: Sample, since: Since) -> float:
    return sample.last - _start(sample, since)


def tpot(sample: Sample) -> float | None:
    """None for an answer of one token."""
    return (sample.last - sample.first) / (sample.tokens - 1) if sample.tokens > 1 else None


def itl(sample: Sample) -> list[float]:
    return [after - before for before, after in zip(sample.chunks, sample.chunks[1:], strict=False)]


def _start(sample: Sample, since: Since) -> float:
    return sample.scheduled if since is Since.scheduled else sample.sent


def distribution(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """``mean_NAME_ms`` and so on, of values in seconds; None where there are no values."""
    array = MS * np.asarray(values, dtype=np.float64)
    there = len(array) > 0
    told = {
        f"mean_{name}_ms": float(array.mean()) if there else None,
        f"median_{name}_ms": float(np.median(array)) if there else None,
        f"std_{name}_ms": float(array.std()) if there else None,
    }
    for percentile in percentiles:
        key = f"p{percentile:g}_{name}_ms"
        told[key] = float(np.percentile(array, percentile, method="linear")) if there else None
    return told


def good(sample: Sample, limits_ms: Mapping[str, float], since: Since) -> bool:
    """Whether an answered request keeps every limit."""
    values = {"ttft": ttft(sample, since), "tpot": tpot(sample) or 0.0, "e2el": e2el(sample, since)}
    return all(values[name] <= limit / MS for name, limit in limits_ms.items())


def peaks(samples: Sequence[Sample]) -> tuple[float, int]:
    """Most tokens, and most requests at once, in any bucket of one second."""
    done = answered(samples)
    if not done:
        return 0.0, 0
    start = min(sample.sent for sample in done)
    size = math.ceil(max(sample.last for sample in done) - start) + 1
    chunks = np.concatenate([np.asarray(sample.chunks) for sample in done]) - start
    tokens = np.bincount(chunks.astype(np.int64), minlength=size)
    steps = np.zeros(size + 1, dtype=np.int64)  # +1 where a request begins, -1 after its last bucket
    for sample in done:
        steps[int(sample.sent - start)] += 1
        steps[int(sample.last - start) + 1] -= 1
    return float(tokens.max()), int(np.cumsum(steps).max())


def latencies(
    samples: Sequence[Sample],
    duration: float,
    since: Since,
    percentiles: Sequence[float],
    limits_ms: Mapping[str, float],
) -> dict[str, Any]:
    """What depends on where one counts from; goodput only where there are limits."""
    done = answered(samples)
    told: dict[str, Any] = distribution("ttft", [ttft(sample, since) for sample in done], percentiles)
    told |= distribution("e2el", [e2el(sample, since) for sample in done], percentiles)
    if limits_ms:
        kept = sum(good(sample, limits_ms, since) for sample in done)
        told |= {"request_goodput": kept / duration, "slo_attainment": kept / len(samples)}
    return told


def measures(
    samples: Sequence[Sample], duration: float, percentiles: Sequence[float], limits_ms: Mapping[str, float]
) -> dict[str, Any]:
    """Everything of one rate and way, JSON-ready.

    Args:
        duration: seconds from the schedule's zero until everything was back.
    """
    done = answered(samples)
    tokens = sum(sample.tokens for sample in done)
    prompts = [sample.prompt_tokens for sample in done]
    prompt_tokens = sum(each for each in prompts if each is not None) if None not in prompts else None
    decoding = sum(sample.last - sample.first for sample in done)
    tpots = [each for each in map(tpot, done) if each is not None]
    most_tokens, most_requests = peaks(samples)
    return {
        "duration_s": duration,
        "completed": len(done),
        "failed": len(samples) - len(done),
        "errors": dict(Counter(sample.error.value for sample in samples if sample.error is not None)),
        "lost": sum(sample.lost for sample in samples),
        "retried": sum(sample.retries for sample in samples),
        "tokens_from": dict(Counter(sample.counted.value for sample in done if sample.counted is not None)),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": len(done) / duration,
        "output_throughput": tokens / duration,
        "total_token_throughput": None if prompt_tokens is None else (prompt_tokens + tokens) / duration,
        "max_output_tokens_per_s": most_tokens,
        "max_concurrent_requests": most_requests,
        "concurrency": sum(e2el(sample, Since.sent) for sample in done) / duration,
        "inner_token_latency_ms": MS * decoding / tokens if tokens else None,
        "decode_concurrency": decoding / duration,
        **distribution("tpot", tpots, percentiles),
        **distribution("itl", [gap for sample in done for gap in itl(sample)], percentiles),
        "from_scheduled": latencies(samples, duration, Since.scheduled, percentiles, limits_ms),
        "from_sent": latencies(samples, duration, Since.sent, percentiles, limits_ms),
        **depths(done),
        **lateness(samples),
    }


def depths(done: Sequence[Sample]) -> dict[str, float | None]:
    """How deep the tokens of answers went; None where the server does not say it of all."""

    def mean(values: Sequence[float | bool | None], weights: Sequence[int]) -> float | None:
        told = [value for value in values if value is not None]
        if len(told) < len(done) or not sum(weights):
            return None
        return sum(value * weight for value, weight in zip(told, weights, strict=True)) / sum(weights)

    tokens = [sample.tokens for sample in done]
    return {
        "mean_exit_layer": mean([sample.exit_layer for sample in done], tokens),
        "layers_skipped": mean([sample.layers_skipped for sample in done], tokens),
        "certified": mean([sample.certified for sample in done], [1] * len(done)),
    }


def lateness(samples: Sequence[Sample]) -> dict[str, Any]:
    """How much later than due the client itself sent, and whether that is too much to trust what it measured."""
    lags = np.array([sample.sent - sample.scheduled for sample in samples])
    p99 = float(np.percentile(lags, 99, method="linear"))
    ends = [e2el(sample, Since.sent) for sample in answered(samples)]
    return {
        "max_client_lag_ms": MS * float(lags.max()),
        "p99_client_lag_ms": MS * p99,
        "client_late": bool(ends) and p99 > LATE * float(np.median(ends)),
    }
