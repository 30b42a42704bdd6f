"""Ways of computing that eval.invariance compares batches under: dtype and runner, each with its threshold.

Answers come from an engine; those of a row alone (batch 1, rule ``own``) are what others of the same way are held to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from calm.config import BatchRule, Consistency, DecoderName, Head, RunnerName, Weights
from calm.engine_config import served_numbers
from calm.errors import ConfigError
from calm.experiment_config import InvarianceConfig

from .backfill import certified
from .common import choose_runner

if TYPE_CHECKING:
    from calm.calibration import Artifact, ConsistencyLoss, ModelIdentity
    from calm.calibration.grid import Threshold
    from calm.models.speaking import SpeakingModel
    from calm.policies import Policy
    from calm.records import DecodeTrace, Example
    from serve.model import ServedModel


@dataclass(frozen=True)
class Way:
    """How numbers are computed, and the threshold that is used there.

    Attributes:
        dtype: fp32, bf16 or int8.
        runner: native, eager or graph; never auto.
        arithmetic: as certificates name it.
        artifact: that the threshold comes from.
        certified: whether that artifact speaks of this arithmetic; else it is fp32's, and the risk has no certificate.
        beside: plain torch beside the runner that was asked for.
    """

    dtype: str
    runner: RunnerName
    arithmetic: str
    artifact: str
    threshold: "Threshold"
    certified: bool
    policy: "Policy"
    beside: bool

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.runner.value}"

    def told(self) -> dict[str, Any]:
        from calm.calibration.grid import point_to_json

        return {
            "way": self.name,
            "dtype": self.dtype,
            "runner": self.runner.value,
            "arithmetic": self.arithmetic,
            "artifact": self.artifact,
            "threshold": point_to_json(self.threshold),
            "certified": self.certified,
        }


def ways_of(
    config: InvarianceConfig, folder: Path, device: str, identity: "ModelIdentity"
) -> tuple[list[Way], list[str]]:
    """Those asked for that can be had here, and what cannot.

    Args:
        identity: of the model decoded in plain fp32.

    Raises:
        CalibrationError: nothing below full depth is certified in fp32.
        ConfigError: nothing asked for can be had.
        NativeError: native was asked for and cannot be had.
    """
    from calm.calibration import load_artifacts
    from calm.calibration.identity import arithmetic

    plain = certified(folder, identity, config.measure, config.tolerance)
    artifacts, ways, left_out = load_artifacts(folder), list[Way](), list[str]()
    asked = [(dtype, config.runner, False) for dtype in config.dtypes]
    for dtype, runner, beside in [*asked, *((dtype, RunnerName.eager, True) for dtype in config.eager_dtypes)]:
        found = choose_runner(DecoderName.engine, runner, device, folder)
        number, weights = served_numbers(dtype)
        if weights is Weights.int8 and found["runner"] is not RunnerName.native:
            left_out.append(f"int8 needs runner=native, and here it is {found['runner'].value}")
            continue
        numbers = arithmetic(number, found["runner"], weights, kernels=found["kernels"])
        same = identity.served_by(Head.full, 0, numbers)
        own = [
            each for each in artifacts if not each.identity.differences(same) and like(each, plain, config.tolerance)
        ]
        artifact = own[0] if own else plain
        threshold = artifact.threshold_for(config.tolerance)
        way = Way(
            dtype, found["runner"], numbers, artifact.name, threshold, bool(own), artifact.policy(threshold), beside
        )
        if way.name not in [each.name for each in ways]:
            ways.append(way)
    if not ways:
        raise ConfigError("; ".join(left_out))
    return ways, left_out


def like(artifact: "Artifact", plain: "Artifact", tolerance: float) -> bool:
    """Whether it certifies a threshold of the same measure and consistency for this tolerance that skips anything."""
    fitting = [each for each in artifact.certificates if math.isclose(each.tolerance, tolerance, rel_tol=1e-9)]
    return any(each.certified_below_one for each in fitting) and (artifact.measure, artifact.consistency) == (
        plain.measure,
        plain.consistency,
    )


@dataclass(frozen=True)
class Alone:
    """What a way answers row by row: batch 1, rule ``own``, articles in the order given.

    Attributes:
        loss: of other traces of the same articles against this way's own full depth.
        losses: of these.
    """

    traces: "list[DecodeTrace]"
    loss: "ConsistencyLoss"
    losses: Float[np.ndarray, " articles"]


class Decoder:
    """Engines of one model folder over the same articles; nothing is loaded or decoded before it is asked for.

    Args:
        model: in fp32, on the device.
    """

    def __init__(
        self, config: InvarianceConfig, folder: Path, device: str, model: "SpeakingModel", articles: "Sequence[Example]"
    ) -> None:
        self.config, self.folder, self.device, self.model, self.articles = config, folder, device, model, articles
        self._served: dict[str, ServedModel] = {}
        self._alone: dict[Way, Alone] = {}

    def traces(
        self, way: Way, rule: BatchRule, batch: int, order: str, policy: "Policy | None" = None
    ) -> "list[DecodeTrace]":
        """Answers, in the order of the articles whatever order they arrive in.

        Raises:
            CalmError: the engine cannot be had, or an answer failed.
        """
        from serve.decoder import trace_of
        from serve.engine import Engine

        engine = Engine(
            self._model(way.dtype), rule=rule, quantile=self.config.quantile, max_batch=batch, runner=way.runner,
            weights=served_numbers(way.dtype)[1],
        )  # fmt: skip
        arrival = self.arrival(order)
        asked = [self.articles[number] for number in arrival]
        names, sources = [each.id for each in asked], [each.source for each in asked]
        answers = engine.generate(sources, names=names, policy=way.policy if policy is None else policy)
        found = {number: trace_of(answer) for number, answer in zip(arrival, answers, strict=True)}
        return [found[number] for number in range(len(found))]

    def arrival(self, order: str) -> list[int]:
        """Numbers of the articles as they come; ``shuffled`` gives each other mates."""
        count = len(self.articles)
        if order == "shuffled":
            return [int(each) for each in np.random.default_rng(self.config.seed).permutation(count)]
        return list(range(count))

    def alone(self, way: Way) -> Alone:
        """What every batch of this way is compared with, decoded once."""
        from calm.calibration import ConsistencyLoss
        from calm.policies import Full

        if way not in self._alone:
            full = self.traces(way, BatchRule.own, 1, "given", Full())
            traces = self.traces(way, BatchRule.own, 1, "given")
            loss = ConsistencyLoss(Consistency.risk, self.articles, full)
            self._alone[way] = Alone(traces, loss, loss(traces))
        return self._alone[way]

    def _model(self, dtype: str) -> "ServedModel":
        import torch

        from calm.models.folder import load
        from serve.model import served

        number = served_numbers(dtype)[0]
        if number not in self._served:
            same = number == "float32"
            self._served[number] = served(
                self.model if same else load(self.folder, self.device, getattr(torch, number))
            )
        return self._served[number]
