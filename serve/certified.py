"""Which policy a request decodes with, and whether the certificate of the model speaks of its answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from calm.calibration.artifact import Artifact, choose_artifact, served_as
from calm.calibration.identity import ModelIdentity, independent_of_batch
from calm.config import BatchRule, Consistency, Measure
from calm.errors import CalibrationError, ConfigError
from calm.policies import Confident, Full, Policy
from calm.rules import ROW_EXACT

from .drift import Drift, Watch
from .options import RequestOptions


@dataclass(frozen=True)
class Resolved:
    """How a request decodes.

    Attributes:
        certified: whether the certificate speaks of its answer.
        watch: of a certified tolerance below full depth: the artifact, the threshold asked for and the one it got.
    """

    policy: Policy
    certified: bool
    watch: Watch | None = None


class Certificates:
    """The artifacts of a model folder as far as they belong to how an engine decodes.

    Args:
        artifacts: all of the folder.
        identity: how the engine decodes: dtype, head, exit layers, lengths.
        rule: its batch rule.
        usual: the policy of requests that ask for nothing.
        drift: may hand out a safer threshold than the one for a tolerance.
    """

    def __init__(
        self,
        artifacts: Sequence[Artifact],
        identity: ModelIdentity | None,
        rule: BatchRule,
        drift: Drift | None = None,
        usual: Policy | None = None,
    ) -> None:
        self._drift, self._usual = drift or Drift(), usual or Full()
        self._artifacts = list(artifacts) if identity is None else served_as(artifacts, identity)
        self._foreign = {a.name: a.identity.differences(identity) if identity else [] for a in self._artifacts}
        self._row_exact = rule in ROW_EXACT
        self._any_batch = identity is None or independent_of_batch(identity.dtype)
        self._cuts = rule is BatchRule.quantile  # even a row at full depth may have to speak early

    def resolve(self, options: RequestOptions, limit: int) -> Resolved:
        """The policy that a request asks for, and whether its answer, of at most ``limit`` tokens, is certified.

        Certified are full depth, and thresholds of a certified set under greedy decoding to EOS or N with a
        row-exact rule, in an arithmetic that no batch size changes, on an engine that decodes as the artifact says.

        Raises:
            CalibrationError: no artifact has what is asked for; it names what there is.
            ConfigError: ``measure`` is none.
        """
        policy, watch = self._policy(options)
        if isinstance(policy, Full) or (isinstance(policy, Confident) and policy.schedule.exits_off):
            return Resolved(policy, not self._cuts, None if self._cuts or not options.plain else watch)
        sound = options.plain and self._row_exact and self._any_batch and self._speaks_of(policy, limit)
        return Resolved(policy, sound, watch if sound else None)

    @property
    def picked(self) -> Artifact | None:
        """That of the measure that dev picked, for the first consistency that there is; None without any."""
        for consistency in Consistency:
            if any(artifact.consistency is consistency for artifact in self._artifacts):
                return choose_artifact(self._artifacts, consistency)
        return None

    def tolerances(self, limit: int) -> dict[str, tuple[float, ...]]:
        """By consistency, the tolerances for which a plain request of ``limit`` tokens gets a certified answer."""
        found: dict[str, set[float]] = {}
        for artifact in self._artifacts:
            for certificate in artifact.certificates:
                asked = RequestOptions(tolerance=certificate.tolerance, consistency=artifact.consistency)
                try:
                    certified = self.resolve(asked, limit).certified
                except CalibrationError:
                    continue
                if certified:
                    found.setdefault(artifact.consistency.value, set()).add(certificate.tolerance)
        return {consistency: tuple(sorted(tolerances)) for consistency, tolerances in found.items()}

    def _policy(self, options: RequestOptions) -> tuple[Policy, Watch | None]:
        if options.policy is not None:
            return options.policy, None
        if options.draft is not None:
            return Full(), None
        if options.threshold is None and options.tolerance is None:
            return self._usual, None
        measure = None if options.measure is None else _measure(options.measure)
        artifact = choose_artifact(self._artifacts, options.consistency, measure, options.tolerance)
        if options.threshold is not None:
            return artifact.policy(options.threshold), None
        assert options.tolerance is not None
        if self._foreign[artifact.name]:
            raise CalibrationError(
                f"tolerance={options.tolerance:g} cannot be served: the calibration {artifact.name} belongs to another "
                f"way of decoding ({'; '.join(self._foreign[artifact.name])}); calibrate as it is served, or ask for a "
                "threshold, which is answered as not certified"
            )
        asked = artifact.threshold_for(options.tolerance, options.consistency)
        used = self._drift.threshold(artifact, asked)
        watched = artifact.certificate(options.tolerance).certified_below_one
        return artifact.policy(used), (artifact, asked, used) if watched else None

    def _speaks_of(self, policy: Policy, limit: int) -> bool:
        return isinstance(policy, Confident) and any(
            policy == artifact.policy(threshold)
            for artifact in self._artifacts
            if not self._foreign[artifact.name] and limit >= artifact.identity.max_target_tokens
            for certificate in artifact.certificates
            for threshold in certificate.certified
        )


def _measure(name: str) -> Measure:
    try:
        return Measure(name)
    except ValueError:
        raise ConfigError(f"measure={name!r} is none; choose from {', '.join(m.value for m in Measure)}") from None
