"""How much of a row a cache that grows has to hold, layer by layer."""

from dataclasses import dataclass

from calm.policies import Policy, SkipSchedule, Static


@dataclass(frozen=True)
class Extent:
    """The positions of a row whose K and V are written: of the prompt in every layer, of the answer up to a step.

    Attributes:
        prompt: tokens of the source, of which step 0 reads the last.
        limit: tokens of the answer at most; the last one is never read.
        stops: by layer, the last step that writes it; 0 where none does.
    """

    prompt: int
    limit: int
    stops: tuple[int, ...]

    def positions(self, step: int) -> list[int]:
        """By layer, those that are written once the row has taken this step."""
        return [self.prompt + min(step, stop) for stop in self.stops]

    @property
    def most(self) -> list[int]:
        """By layer, those of the longest answer."""
        return self.positions(self.limit - 1)


def last_steps(policy: Policy, fills: bool, limit: int, num_layers: int) -> tuple[int, ...]:
    """``stops`` of an Extent: a layer that no later step of the row reads is not written.

    Args:
        fills: the layers above a token's are filled in, see Exits.
    """
    last = limit - 1
    match policy:
        case SkipSchedule(schedule):  # which runs a layer at the first steps of an answer, and then never again
            return tuple(steps - 1 for steps in schedule.reach(limit, num_layers))
        case Static(depth) if not fills:
            return (last,) * depth + (0,) * (num_layers - depth)
        case _:
            return (last,) * num_layers
