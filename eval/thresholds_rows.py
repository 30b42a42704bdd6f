"""What eval.thresholds tells of decoded articles: points of its curves, certificates, differences, random splits.

The loss is risk consistency (CALM section 4.1): max(0, R(full) - R(early)) with R the ROUGE-L to the reference. Layers
skipped are a ratio of two sums over articles; its intervals are of its linear part, whose mean is the same number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from calm.config import Head
from calm.experiment_config import ThresholdsConfig
from calm.metrics import with_interval

from .thresholds_decode import Curve

Row = dict[str, Any]
SPLIT_SEED = 1  # beside the experiment's own, so that splits are drawn from numbers of their own


@dataclass(frozen=True)
class Answers:
    """Every article at one point: those of the calibration split first.

    Attributes:
        rouge_l: to the reference, in [0, 1].
        layers: emission layers of all its tokens together.
        tokens: EOS included.
    """

    threshold: float
    rouge_l: Float[np.ndarray, " articles"]
    layers: Int[np.ndarray, " articles"]
    tokens: Int[np.ndarray, " articles"]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Answers":
        return cls(row.get("threshold", 1.0), *(np.array(row[name]) for name in ("rouge_l", "layers", "tokens")))

    def part(self, which: "slice | Int[np.ndarray, ' chosen']") -> "Answers":
        return Answers(self.threshold, self.rouge_l[which], self.layers[which], self.tokens[which])

    def skipped(self, num_layers: int) -> Float[np.ndarray, " articles"]:
        """Per article a number whose mean is the share of layers skipped, over the tokens of all articles."""
        depth = self.layers.sum() / self.tokens.sum()
        shares: Float[np.ndarray, " articles"] = (
            1 - (depth + (self.layers - depth * self.tokens) / self.tokens.mean()) / num_layers
        )
        return shares


@dataclass(frozen=True)
class Measured:
    """All that was decoded.

    Attributes:
        calibration: how many articles at the front are of the calibration split.
        static: by depth, 1..L-1.
        curves: points from full depth down, without a gap.
    """

    config: ThresholdsConfig
    num_layers: int
    calibration: int
    full: Answers
    static: dict[int, Answers]
    curves: dict[Curve, list[Answers]]

    def losses(self, curve: Curve) -> Float[np.ndarray, "points articles"]:
        return np.stack([np.maximum(0.0, self.full.rouge_l - point.rouge_l) for point in self.curves[curve]])

    def tested(self, answers: Answers) -> Answers:
        """Those of the test split."""
        return answers.part(slice(self.calibration, None))

    def certified(self, curve: Curve, tolerance: float) -> int:
        """Index of the point that the calibration articles certify."""
        means = self.losses(curve)[:, : self.calibration].mean(axis=1)
        return certified_index(means, self.calibration, tolerance, self.config.error_prob)

    def intervals(self, name: str, values: Float[np.ndarray, " articles"]) -> dict[str, float]:
        return with_interval(name, values, self.config.seed, self.config.bootstrap)


def certified_index(means: Float[np.ndarray, " points"], n: int, tolerance: float, error_prob: float) -> int:
    """The last point that fixed-sequence testing passes; 0, full depth, has no loss by definition.

    Args:
        means: mean losses over ``n`` articles, full depth first.
    """
    from calm.calibration import fixed_sequence, hoeffding_bentkus

    p_values = np.concatenate([[0.0], np.atleast_1d(hoeffding_bentkus(means[1:], n, tolerance))])
    return int(fixed_sequence(p_values, error_prob).sum()) - 1


def rows_of(measured: Measured) -> list[Row]:
    """All rows, told apart by ``kind``: full, static, curve, certified, difference, splits."""
    found = [{"kind": "full", "threshold": 1.0, **_point(measured, measured.full)}]
    for layer, answers in measured.static.items():
        found.append({"kind": "static", "layer": layer, **_point(measured, answers)})
    for curve, points in measured.curves.items():
        losses = measured.losses(curve)
        calibration = losses[:, : measured.calibration].mean(axis=1)
        told = [
            {"index": index, "threshold": point.threshold, "calibration_loss": float(calibration[index]),
             **measured.intervals("loss", losses[index, measured.calibration :]), **_point(measured, point)}
            for index, point in enumerate(points)
        ]  # fmt: skip
        found += [{"kind": "curve", **curve.values, **each} for each in told]
        for tolerance in measured.config.tolerances:
            at = measured.certified(curve, tolerance)
            found.append({"kind": "certified", **curve.values, "tolerance": tolerance, **told[at]})
    found += differences(measured)
    return found + splits(measured)


def _point(measured: Measured, answers: Answers) -> Row:
    """ROUGE-L, the same less full depth's, and layers skipped over the test articles, with intervals."""
    tested = measured.tested(answers)
    return {
        **measured.intervals("rouge_l", tested.rouge_l),
        **measured.intervals("rouge_l_minus_full", tested.rouge_l - measured.tested(measured.full).rouge_l),
        **measured.intervals("layers_skipped", tested.skipped(measured.num_layers)),
    }


def differences(measured: Measured) -> list[Row]:
    """At each tolerance: a curve at its certified point less another at its own, over the same test articles.

    ``of`` says what differs: ``measure``, ``schedule`` (a measure's others less its own) or ``head`` (less the full
    one); ``static``: less the two static depths on either side of its mean depth, in proportion.
    """
    found = []
    own = own_curves(list(measured.curves))
    for tolerance in measured.config.tolerances:
        points = {
            curve: measured.tested(answers[measured.certified(curve, tolerance)])
            for curve, answers in measured.curves.items()
        }
        pairs = [("measure", a, b) for a, b in combinations(own.values(), 2)]
        for curve in measured.curves:
            if curve != own[curve.measure.value]:
                what = "schedule" if curve.head is Head.full else "head"
                pairs.append((what, curve, own[curve.measure.value]))
        for what, one, other in pairs:
            found.append(
                {
                    "kind": "difference", "of": what, "tolerance": tolerance, **one.values,
                    **{f"other_{name}": value for name, value in other.values.items()},
                    **measured.intervals("rouge_l", points[one].rouge_l - points[other].rouge_l),
                    **measured.intervals(
                        "layers_skipped",
                        points[one].skipped(measured.num_layers) - points[other].skipped(measured.num_layers),
                    ),
                }
            )  # fmt: skip
        for curve in own.values():
            scores = between(measured, points[curve])
            if scores is not None:
                values = measured.intervals("rouge_l", points[curve].rouge_l - scores)
                found.append({"kind": "difference", "of": "static", "tolerance": tolerance, **curve.values, **values})
    return found


def between(measured: Measured, point: Answers) -> Float[np.ndarray, " articles"] | None:
    """ROUGE-L that the static depths below and above the mean depth of a point give, in proportion.

    What as many layers buy without any confidence. None at full depth, and where a static depth failed.
    """
    depths = {layer: measured.tested(answers) for layer, answers in measured.static.items()}
    depths[measured.num_layers] = measured.tested(measured.full)
    depth = float(point.layers.sum() / point.tokens.sum())
    low, share = int(depth), depth - int(depth)
    if low == measured.num_layers or not {low, low + 1} <= depths.keys():
        return None
    mixed: Float[np.ndarray, " articles"] = (1 - share) * depths[low].rouge_l + share * depths[low + 1].rouge_l
    return mixed


def splits(measured: Measured) -> list[Row]:
    """How often what one half of all articles certifies keeps its tolerance on the other half.

    ``held``: splits in which the other half's mean loss is at most the tolerance; ``below_one``: splits in which more
    than full depth was certified, without which nothing can be lost. The same splits for every curve.
    """
    config, articles = measured.config, len(measured.full.rouge_l)
    generator, half, found = np.random.default_rng([config.seed, SPLIT_SEED]), articles // 2, list[Row]()
    orders = [generator.permutation(articles) for _ in range(config.splits)]
    for curve, points in measured.curves.items():
        losses = measured.losses(curve)
        for tolerance in config.tolerances:
            held_out, chosen, skipped = [], [], []
            for order in orders:
                one, other = order[:half], order[half:]
                at = certified_index(losses[:, one].mean(axis=1), half, tolerance, config.error_prob)
                chosen.append(at)
                held_out.append(float(losses[at, other].mean()))
                skipped.append(float(points[at].part(other).skipped(measured.num_layers).mean()))
            found.append(
                {
                    "kind": "splits", **curve.values, "tolerance": tolerance, "splits": len(orders),
                    "held": sum(loss <= tolerance for loss in held_out), "below_one": sum(at > 0 for at in chosen),
                    "loss": float(np.mean(held_out)), "worst_loss": max(held_out),
                    "layers_skipped": float(np.mean(skipped)),
                }
            )  # fmt: skip
    return found


def own_curves(curves: Sequence[Curve]) -> dict[str, Curve]:
    """The first curve of each measure."""
    found: dict[str, Curve] = {}
    for curve in curves:
        found.setdefault(curve.measure.value, curve)
    return found
