"""Whether traffic is still like the articles that a threshold was certified on, and what to do when it is not.

A certificate speaks of articles like those of its calibration (CALM section 4: exchangeable). Whether answers are still
as good cannot be seen without references; how deep they go can. Each answer's share of layers skipped is compared with
the mean that the certificate recorded. The comparison is an e-detector (Shin, Ramdas & Rinaldo, 2022, arXiv
2203.03532): a bet against the recorded mean whose capital starts anew whenever it falls below one, so that a change is
seen however late it comes, and traffic that has not changed raises an alarm no more than once in ``requests_per_alarm``
answers on average, whatever their distribution and however often one looks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, sqrt

from calm.calibration.artifact import Artifact
from calm.calibration.grid import Threshold
from calm.config import OnDrift

from .messages import DriftState

Watch = tuple[Artifact, Threshold, Threshold]  # a certificate, the threshold asked for, the one that was used
BETS = (0.05, 0.1, 0.2, 0.4, 0.8)  # of the largest stake; their mean is bet, so that none has to be chosen
WINDOW = 200  # answers that "now" means in what is told


@dataclass(frozen=True)
class Reference:
    """Share of layers skipped by an answer at calibration: mean and standard deviation over ``n`` articles."""

    mean: float
    deviation: float
    n: int

    @property
    def slack(self) -> float:
        """What the mean may differ by without meaning anything: its own error, three times, and a hundredth."""
        return 0.01 + 3.0 * self.deviation / sqrt(max(1, self.n))

    @classmethod
    def of(cls, artifact: Artifact, threshold: Threshold) -> "Reference":
        """Of a threshold that the calibration decoded with."""
        mean, deviation = artifact.article_skips[list(artifact.grid).index(threshold)]
        return cls(mean, deviation, artifact.n)


def share_skipped(emission_layers: Sequence[int], num_layers: int) -> float:
    """Share of layers above the emission layers of one answer's tokens, in [0, 1)."""
    return 1.0 - sum(emission_layers) / len(emission_layers) / num_layers


class ShiftDetector:
    """Alarms when values in [0, 1] no longer have the mean of a reference, up to its slack.

    Attributes:
        alarmed: since the last ``reset``.
    """

    def __init__(self, reference: Reference, requests_per_alarm: float) -> None:
        # two bets, on more and on less: each may go wrong half as often
        self._limit = 2.0 * requests_per_alarm
        self._low = max(0.0, reference.mean - reference.slack)
        self._high = min(1.0, reference.mean + reference.slack)
        self.reset()

    def reset(self) -> None:
        self._more, self._less = [1.0] * len(BETS), [1.0] * len(BETS)
        self.alarmed = False

    @property
    def evidence(self) -> float:
        """Capital of the better bet; an alarm is raised at twice ``requests_per_alarm``."""
        return max(sum(self._more), sum(self._less)) / len(BETS)

    def saw(self, value: float) -> bool:
        """One more answer; True when this one raises the alarm."""
        for i, bet in enumerate(BETS):
            # a stake never loses more than all: value lies in [0, 1]
            if self._high < 1.0:
                self._more[i] = self._won(self._more[i], bet * (value - self._high) / max(self._high, 1e-9))
            if self._low > 0.0:
                self._less[i] = self._won(self._less[i], bet * (self._low - value) / (1.0 - self._low + 1e-9))
        first = not self.alarmed and self.evidence >= self._limit
        self.alarmed = self.alarmed or first
        return first

    def _won(self, capital: float, share: float) -> float:
        """Capital after a round. One bet that reaches the cap raises the alarm by itself, so the cap delays none.

        Above it capital says nothing more, grows out of a float's range, and takes as long to be lost again.
        """
        return min(self._limit * len(BETS), max(1.0, capital) * (1.0 + share))


@dataclass
class _Watched:
    """One threshold of one certificate."""

    reference: Reference
    detector: ShiftDetector
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    since: int = 0  # answers since it was last changed to


@dataclass(frozen=True)
class Told:
    """How one certificate's traffic is now.

    Attributes:
        steps_back: thresholds safer than asked that requests decode with; -1: at full depth.
        calibrated, now: mean share of layers skipped by an answer; None before any.
        evidence: of the detector, 1 or less without any.
    """

    name: str
    drifted: bool
    steps_back: int
    calibrated: float
    now: float | None
    evidence: float
    alarms: int


class Drift:
    """Watches the answers of certified requests and says which threshold the next ones decode with.

    Args:
        action: warn changes nothing; conservative goes one certified threshold back toward full depth at each alarm;
            full decodes at full depth.
        requests_per_alarm: answers of unchanged traffic that a false alarm takes on average, at least.
        patience: answers at a safer threshold without an alarm after which the one before is tried again.
    """

    def __init__(
        self, action: OnDrift = OnDrift.warn, requests_per_alarm: float = 100_000.0, patience: int = 1_000
    ) -> None:
        self._action, self._requests, self._patience = action, requests_per_alarm, patience
        self._watched: dict[tuple[str, Threshold], _Watched] = {}
        self._back: dict[str, int] = {}  # by certificate
        self._idle: dict[str, int] = {}  # answers at full depth, where nothing can be seen
        self.alarms: dict[str, int] = {}

    def threshold(self, artifact: Artifact, asked: Threshold) -> Threshold:
        """Of the next request that asks for a certified threshold: that one, or a safer one of the same set."""
        back = self._back.get(artifact.name, 0)
        if not back:
            return asked
        order = list(artifact.grid)
        place = order.index(asked) if asked in order else 0
        return order[max(0, place - back)] if self._action is OnDrift.conservative else order[0]

    def saw(self, artifact: Artifact, asked: Threshold, used: Threshold, emission_layers: Sequence[int]) -> bool:
        """The answer of a request that asked for one threshold and decoded with this one; True when it alarms."""
        if not emission_layers:
            return False
        order = list(artifact.grid)
        if used not in order or asked not in order or order.index(used) >= len(artifact.article_skips):
            return False
        if used != self.threshold(artifact, asked):  # it was under way when the last alarm was raised
            return False
        if order.index(used) == 0:  # full depth skips nothing, whatever it is given
            return self._rest(artifact)
        watched = self._of(artifact, used)
        share = share_skipped(emission_layers, artifact.identity.num_layers)
        watched.recent.append(share)
        watched.since += 1
        if watched.detector.saw(share):
            self.alarms[artifact.name] = self.alarms.get(artifact.name, 0) + 1
            self._step(artifact, +1)
            return True
        if self._back.get(artifact.name, 0) and used != asked and watched.since >= self._patience:
            self._step(artifact, -1)
        return False

    def told(self, artifact: Artifact, asked: Threshold) -> Told:
        """How it stands with the requests of a certified threshold."""
        used = self.threshold(artifact, asked)
        order = list(artifact.grid)
        at_full = order.index(used) == 0
        watched = self._of(artifact, asked if at_full else used)
        now = sum(watched.recent) / len(watched.recent) if watched.recent else None
        back = self._back.get(artifact.name, 0)
        return Told(
            name=artifact.name,
            drifted=bool(back) or watched.detector.alarmed,
            steps_back=-1 if back and at_full else back,
            calibrated=watched.reference.mean,
            now=now,
            evidence=watched.detector.evidence,
            alarms=self.alarms.get(artifact.name, 0),
        )

    @property
    def state(self) -> DriftState:
        """How it stands now, over all certificates."""
        detectors = [watched.detector for watched in self._watched.values()]
        return DriftState(
            alarm=any(self._back.values()) or any(detector.alarmed for detector in detectors),
            alarms=sum(self.alarms.values()),
            log_evidence=log(max([1.0, *(detector.evidence for detector in detectors)])),
        )

    def _of(self, artifact: Artifact, threshold: Threshold) -> _Watched:
        key = (artifact.name, threshold)
        if key not in self._watched:
            reference = Reference.of(artifact, threshold)
            self._watched[key] = _Watched(reference, ShiftDetector(reference, self._requests))
        return self._watched[key]

    def _rest(self, artifact: Artifact) -> bool:
        """At full depth nothing shows: after a while a threshold is tried again."""
        if self._back.get(artifact.name, 0):
            self._idle[artifact.name] = self._idle.get(artifact.name, 0) + 1
            if self._idle[artifact.name] >= self._patience:
                self._step(artifact, -1)
        return False

    def _step(self, artifact: Artifact, by: int) -> None:
        """Toward full depth, or back; every detector of the certificate begins anew."""
        if self._action is OnDrift.warn:
            return
        back = self._back.get(artifact.name, 0) + by
        self._back[artifact.name] = max(0, min(back, len(artifact.grid) - 1))
        self._idle[artifact.name] = 0
        for (name, _), watched in self._watched.items():
            if name == artifact.name:
                watched.detector.reset()
                watched.since = 0
