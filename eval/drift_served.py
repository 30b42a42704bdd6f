"""Traffic through an engine with a certified tolerance: what each request decoded with, and when drift was alarmed."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from calm.calibration.artifact import Artifact
from calm.calibration.grid import Threshold
from calm.errors import CalibrationError
from calm.records import DecodeTrace, Example
from serve.drift import Drift
from serve.engine import Engine
from serve.options import RequestOptions
from serve.requests import Answer, Row, Status


@dataclass
class Served:
    """One stretch of traffic. Lists are in the order in which the requests came.

    Attributes:
        traces: what they were answered.
        thresholds: that they decoded with.
        after: whether the engine had raised an alarm before they began, on this stretch or an earlier one.
        alarms: answers of this stretch that were given when each alarm was raised, that of the alarm among them.
    """

    traces: list[DecodeTrace] = field(default_factory=list)
    thresholds: list[Threshold] = field(default_factory=list)
    after: list[bool] = field(default_factory=list)
    alarms: list[int] = field(default_factory=list)


class Client:
    """Sends requests of one tolerance to an idle engine, as many at a time as it has rows, the next as one ends.

    Attributes:
        artifact, asked: the certificate that the tolerance means, and its threshold.

    Raises:
        CalibrationError: the engine has no certificate for it, or none below full depth, where nothing can be seen.
    """

    def __init__(self, engine: Engine, options: RequestOptions) -> None:
        self._engine, self._options = engine, options
        watch = engine.certificates.resolve(options, engine.model.max_target).watch
        if watch is None:
            raise CalibrationError(
                f"only full depth is certified at tolerance {options.tolerance:g}, where depth cannot drift; "
                "choose a larger tolerance="
            )
        self.artifact: Artifact = watch[0]
        self.asked: Threshold = watch[1]
        # sees the same answers in the same order, so that it tells at which of a step's answers the alarm came
        asked = engine.options
        self._twin = Drift(asked.on_drift, asked.requests_per_alarm, asked.drift_patience)

    def serve(self, examples: Sequence[Example], on_rows: Callable[[int], None] = lambda rows: None) -> Served:
        """All of them, to the last answer. ``on_rows`` is told how many answers a step brought.

        Raises:
            CalmError: one failed.
        """
        from serve.decoder import trace_of

        engine, served = self._engine, Served()
        todo, answers = deque(examples), dict[str, Answer]()
        rows: dict[str, Row] = {}
        after: dict[str, bool] = {}
        while todo or engine.has_work:
            while todo and engine.num_running + engine.num_waiting < engine.options.max_batch:
                example = todo.popleft()
                rows[example.id] = self._add(example)
                after[example.id] = bool(engine.drift.alarms)
            ended = engine.step().answers
            for answer in ended:
                answers[answer.id] = answer
                if self._twin.saw(self.artifact, self.asked, _used(rows[answer.id]), answer.emission_layers):
                    served.alarms.append(len(answers))
                    after |= {name: True for name, row in rows.items() if row.status is Status.waiting}
            assert self._twin.alarms == engine.drift.alarms
            on_rows(len(ended))
        served.traces = [trace_of(answers[example.id]) for example in examples]
        served.thresholds = [_used(rows[example.id]) for example in examples]
        served.after = [after[example.id] for example in examples]
        return served

    def _add(self, example: Example) -> Row:
        row = self._engine.row(self._engine.add_request(example.source, self._options, name=example.id))
        assert row is not None
        return row


def _used(row: Row) -> Threshold:
    """What a row decodes with, or did: an alarm may still change it while the row waits."""
    assert row.watch is not None
    return row.watch[2]
