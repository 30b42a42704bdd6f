"""Which batch rule the next wave follows."""

from calm.rules import Rule

from .options import EngineOptions
from .wave import Machine


class RuleChoice:
    """The rule of an engine's options."""

    def __init__(self, options: EngineOptions, machine: Machine) -> None:
        self._options, self._machine = options, machine

    def rule(self, running: int, parked: bool) -> Rule:
        options = self._options
        return Rule(options.rule, options.quantile, options.company or max(1, running // 4), options.max_age)
