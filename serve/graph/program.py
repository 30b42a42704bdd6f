"""A step as a list of verbs, in the order in which a device runs them: calm.rules.climb with nobody asking the host.

Where ``climb`` reads a flag and breaks off, every later verb of a program finds that no row runs any more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from calm.config import Measure
from calm.rules import Rule

from .frame import Frame
from .ops import Asked, TorchOps

Act = Callable[[], None]


@dataclass(frozen=True)
class Program:
    """The step of a bucket under a rule, for rows of these measures.

    ``begin``, then ``layer`` 1 to L, then ``end``; layers after the one where the rule stopped change nothing.
    """

    ops: TorchOps
    frame: Frame
    rule: Rule
    asked: Asked

    @property
    def num_layers(self) -> int:
        return self.ops.parts.spec.num_layers

    def begin(self) -> None:
        self.ops.begin(self.frame)

    def layer(self, layer: int) -> None:
        """Run the layer, ask the confidences, and settle who goes on."""
        confident = layer in self.ops.parts.checked and bool(self.asked)
        compares = confident and any(measure is Measure.state for measure, _ in self.asked)
        self.ops.layer(layer, self.frame, self.rule.holds, keeps=compares)
        if confident:
            self.ops.confide(layer, self.frame, self.asked, self.rule.holds)
        self.ops.settle(layer, self.frame, self.rule, confident)

    def end(self) -> None:
        self.ops.speak(self.frame, self.rule)

    def layers(self) -> list[Act]:
        return [partial(self.layer, layer) for layer in range(1, self.num_layers + 1)]

    def whole(self) -> None:
        """All of it, predicated on the device."""
        self.begin()
        for act in self.layers():
            act()
        self.end()
