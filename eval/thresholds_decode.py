"""What eval.thresholds decodes: grids of thresholds from dev, and every article at one point of a curve."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calm.config import DecoderName, Head, Measure, Schedule
from calm.experiment_config import ThresholdsConfig

from .common import choose_runner, decoder_maker

if TYPE_CHECKING:
    from calm.decode_spec import Decode
    from calm.models.speaking import SpeakingModel
    from calm.policies import Confident, Policy
    from calm.records import DecodeTrace, Example


@dataclass(frozen=True)
class Curve:
    """Thresholds of a measure, from full depth down."""

    measure: Measure
    schedule: Schedule
    head: Head

    @property
    def values(self) -> dict[str, str]:
        """Columns of its rows."""
        return {"measure": self.measure.value, "schedule": self.schedule.value, "head": self.head.value}

    def policy(self, threshold: float, config: ThresholdsConfig, length: int) -> "Confident":
        from calm.policies import Confident
        from calm.thresholds import ThresholdSchedule

        schedule = ThresholdSchedule(threshold, self.schedule, config.tau, length)
        return Confident(self.measure, schedule, config.agreement_k)


def curves(config: ThresholdsConfig, measures: Sequence[Measure]) -> list[Curve]:
    """The first of each measure is its own; then its other schedules; last other heads, by the first that reads one.

    ``state`` decays under no schedule, so it has one curve.
    """
    from calm.confidence import HEAD_MEASURES
    from calm.thresholds import measure_schedule

    found = [
        Curve(measure, measure_schedule(measure, schedule), Head.full)
        for measure in measures
        for schedule in config.schedules
    ]
    reading = [measure for measure in measures if measure in HEAD_MEASURES][:1]
    others = [head for head in config.heads if head is not Head.full]
    found += [Curve(measure, config.schedules[0], head) for head in others for measure in reading]
    return list(dict.fromkeys(found))


class Decoders:
    """A decoder for each head, opened when it is first asked for; one is open at a time.

    Use it as a context manager: leaving it ends the decoder's processes.
    """

    def __init__(self, folder: str, device: str, config: ThresholdsConfig) -> None:
        self.folder, self.device, self.config = folder, device, config
        self._open: tuple[Head, bool] | None = None
        self._decode: Decode | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Decoders":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, head: Head, confidences: bool = False) -> "Decode":
        """The decoder with that head.

        Raises:
            CalmError: it cannot be had here.
        """
        if self._decode is None or self._open != (head, confidences):
            from calm.parallel_decode import ParallelDecoder

            self._stack.close()
            self._decode, self._open = None, (head, confidences)
            spec = self._spec(head, confidences)
            self._decode = self._stack.enter_context(ParallelDecoder(spec, self.config.processes))
        return self._decode

    def _spec(self, head: Head, confidences: bool) -> Any:
        from calm.config import BatchRule
        from calm.decode_spec import DecodeSpec

        wanted, engine = self.config, self.config.decoder is DecoderName.engine
        return DecodeSpec(
            self.folder,
            self.device,
            "float32",
            wanted.decoder,
            wanted.batch_size,
            record_confidences=confidences,
            head=head,
            head_k=wanted.head_k,
            rule=BatchRule.compact if engine else BatchRule.own,  # the same tokens sooner
            **choose_runner(wanted.decoder, wanted.runner, self.device, self.folder),
            make=decoder_maker(wanted.decoder),
        )


class Points:
    """Decodes the articles of an experiment.

    Args:
        articles: those of the calibration split, then those of the test split.
    """

    def __init__(
        self,
        config: ThresholdsConfig,
        model: "SpeakingModel",
        decoders: Decoders,
        dev: "Sequence[Example]",
        articles: "Sequence[Example]",
    ) -> None:
        self.config, self.decoders, self.dev, self.articles = config, decoders, list(dev), list(articles)
        self.exit_layers = model.settings.exit_layers
        self.length = model.settings.max_target_tokens
        self._on_dev: dict[tuple[Measure, Head], list[DecodeTrace]] = {}

    def grid(self, curve: Curve) -> list[dict[str, Any]]:
        """One row with ``thresholds``: 1.0 and quantiles of the confidences that dev has at full depth.

        Raises:
            CalibrationError: the measure says nothing at any layer.
        """
        from calm.calibration.grid import collect_flips, scalar_grid

        key = (curve.measure, curve.head)
        if key not in self._on_dev:
            policy = curve.policy(1.0, self.config, self.length)
            self._on_dev[key] = self.decoders.of(curve.head, confidences=True)(self.dev, policy)
        flips = collect_flips(self._on_dev[key], self.exit_layers, curve.schedule, self.config.tau, self.length)
        return [{"thresholds": scalar_grid(flips, self.config.grid_size)}]

    def at(self, curve: Curve, threshold: float) -> list[dict[str, Any]]:
        """One row: every article at a threshold of a curve."""
        policy = curve.policy(threshold, self.config, self.length)
        return [{"threshold": threshold, **self.answered(policy, curve.head)}]

    def answered(self, policy: "Policy", head: Head = Head.full) -> dict[str, Any]:
        """By article: ROUGE-L to the reference, emission layers of all its tokens together, tokens."""
        from calm.calibration.consistency import check_rows
        from calm.metrics import rouge_l_many

        traces = self.decoders.of(head)(self.articles, policy)
        check_rows(traces, self.articles, "decode")
        scores = rouge_l_many([trace.text for trace in traces], [each.target for each in self.articles])
        return {
            "rouge_l": [float(score) for score in scores],
            "layers": [sum(trace.emission_layers) for trace in traces],
            "tokens": [len(trace.tokens) for trace in traces],
        }
