"""What the tests of decoders over T5s and over decoder-only models compare by."""

from calm.config import Measure, Schedule
from calm.decode_batch import BatchDecoder
from calm.models.speaking import SpeakingModel
from calm.policies import Confident
from calm.records import DecodeTrace
from calm.thresholds import ThresholdSchedule
from tests.scripted import examples

V = 97


def confident(measure: Measure, threshold: float, kind: Schedule = Schedule.constant, length: int = 12) -> Confident:
    return Confident(measure, ThresholdSchedule(threshold, kind=kind, length=length))


def usual(model: SpeakingModel, measure: Measure) -> float:
    """A threshold that about half of the checks reach."""
    if measure is Measure.agreement:
        return 0.5  # it takes few values: a run of two of three
    traces = BatchDecoder(model, record_confidences=True)(examples(V, 16, seed=20), confident(measure, 0.999999))
    seen = sorted(c for trace in traces for step in trace.confidences for c in step if c == c)
    return min(seen[len(seen) // 2], 0.999)


def essence(trace: DecodeTrace) -> tuple[object, ...]:
    return trace.id, trace.tokens, trace.crossing_layers, trace.backfilled_layers, trace.finished
