"""Bytes that a decode step moves per token, and how far exits could lower them: a bound by bytes, not a measurement.

At small batches a decode step takes the time that its bytes take to be read. Where products take the time it is no
bound: for debian_tiny at batch 32 the bytes of the certified thresholds of `state` give 1.66, and 2.20 was measured
(results/debian_tiny, results/engine_debian). Encoder, tokenizer and host are left out: they only make the gain smaller.
Rows of a batch are independent tokens of the same articles, each batch full: a layer's weights are read when the
deepest row needs it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from calm.config import Measure
from calm.cost import backfill_work, head_work, layer_work

from .ceilings import Sizes, step_need

if TYPE_CHECKING:
    from calm.models.base import DecoderSpec

WIDTH, ARITHMETIC = 4, "fp32"  # as measured here; another width of everything changes no ratio
STATE, SOFTMAX = Measure.state, Measure.softmax  # a check that reads no vocabulary, and one that reads all of it


def parts(spec: "DecoderSpec", batch: int, keys: int, source: int) -> dict[str, float]:
    """Of a step at full depth, per token, by what is read; ``backfill`` is what each skipped layer would cost instead.

    Args:
        keys: self-attention positions of a row; ``source``: tokens of its source.
    """
    layer = layer_work(spec, width=WIDTH)
    found = {
        "layers": spec.num_layers * layer.weight_bytes / batch,
        "head": head_work(spec, WIDTH).weight_bytes / batch,
        "self_kv": float(spec.num_layers * layer_work(spec, keys, 0, WIDTH).row_bytes),
        "cross_kv": float(spec.num_layers * layer_work(spec, 0, source, WIDTH).row_bytes),
    }
    return {**found, "step": sum(found.values()), "backfill": backfill_work(spec, WIDTH).weight_bytes / batch}


def expected(
    spec: "DecoderSpec", shares: Float[np.ndarray, "*many layers"], batch: int, keys: int, source: int, measure: Measure
) -> Float[np.ndarray, "*many"]:
    """Bytes per token where ``shares`` of the tokens leave at layers 1..L, averaged over all batches of ``batch`` rows.

    What is read once for the batch depends on its deepest row alone (``eval.ceilings.step_need``), whose depth is the
    maximum of so many draws; what is read for each row depends on its own.
    """
    sizes = Sizes.of(spec, ARITHMETIC)
    needs = [step_need(spec, sizes, [depth], keys, source, WIDTH, measure) for depth in range(1, spec.num_layers + 1)]
    below = np.cumsum(shares, axis=-1) ** batch
    deepest = np.diff(below, axis=-1, prepend=0.0)
    weights, rows = np.array([need.weights for need in needs]), np.array([need.rows for need in needs])
    found: np.ndarray = deepest @ weights / batch + shares @ rows
    return found


def bounds(
    spec: "DecoderSpec",
    counts: Int[np.ndarray, "articles layers"],
    batches: Sequence[int],
    keys: int,
    source: int,
    seed: int,
    resamples: int,
) -> list[dict[str, Any]]:
    """Bytes of full depth over those of exits, for each batch and kind of check; 95 % intervals over the articles.

    Args:
        counts: tokens of each article that leave at layers 1..L.

    Returns:
        records of ``batch``, ``checks``, ``bytes`` per token, ``bound``, ``bound_low``, ``bound_high``; and ``most``,
        the bound if every token left at layer 1.
    """
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=resamples)
    totals = np.concatenate([counts.sum(axis=0)[None], drawn @ counts]).astype(np.float64)
    shares = totals / totals.sum(axis=1, keepdims=True)
    at_once = np.eye(spec.num_layers)[0]
    found = []
    for batch in batches:
        full = parts(spec, batch, keys, source)["step"]
        for measure in (STATE, SOFTMAX):
            moved = expected(spec, shares, batch, keys, source, measure)
            low, high = np.quantile(full / moved[1:], [0.025, 0.975])
            most = full / float(expected(spec, at_once, batch, keys, source, measure))
            found.append(
                {
                    "batch": batch, "checks": measure.value, "bytes": float(moved[0]),
                    "bound": float(full / moved[0]), "bound_low": float(low), "bound_high": float(high), "most": most,
                }
            )  # fmt: skip
    return found


def of_checks(found: Sequence[Mapping[str, Any]], measure: Measure) -> dict[int, Mapping[str, Any]]:
    """The bounds with this kind of check, by batch."""
    return {row["batch"]: row for row in found if row["checks"] == measure.value}
