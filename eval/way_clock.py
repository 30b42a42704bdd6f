"""Ways of decoding on one clock: interleaved, and refused where the clock is coarser than the work."""

from collections.abc import Sequence
from typing import Protocol

from calm.errors import CalmError
from calm.metrics import with_median

from .clocks import Clocked, Contender, Rounds, paired, until_quiet
from .serving_cells import load_of
from .trials import Row


class Timing(Rounds, Protocol):
    """Of a config: how often, and from which token to which."""

    few: int
    many: int


def clock_rows(contenders: Sequence[Contender], timing: Timing, where: str) -> list[Row]:
    """A row for each, the first of them the baseline.

    Returns:
        ``decode_tokens_ratio``, ``call_over_full``: how many times as fast as the baseline, medians over the rounds;
        ``decode_tokens_ratio_low``, ``_high``: the interval of the first; ``full_s``, ``own_s``: seconds of a decode
        step of every round, of the baseline and of the way; ``noisy``, ``again``.

    Raises:
        CalmError: the machine stays busy through all attempts and that is not allowed, or a round has no time to
            compare.
    """
    found = until_quiet(
        timing,
        lambda: paired(
            contenders, timing.few, timing.many, timing.repeats, timing.warmups, allow_noisy=None,
            load=load_of(timing.allow_noisy),
        ),
    )  # fmt: skip
    rows = []
    for name in [each.name for each in contenders]:
        over, under = found.seconds(contenders[0].name, Clocked.decode), found.seconds(name, Clocked.decode)
        if min(*over, *under) <= 0.0:
            raise CalmError(
                f"{where}, {name}: {timing.many} tokens took no longer than {timing.few} in some round; stop what else "
                "runs, or give a larger many="
            )
        rows.append(
            {
                "way": name,
                "noisy": found.noise.noisy,
                "again": found.noise.again[Clocked.decode],
                "full_s": over,
                "own_s": under,
                **with_median("decode_tokens_ratio", [above / below for above, below in zip(over, under, strict=True)]),
                "call_over_full": found.speedup(name, contenders[0].name, Clocked.call),
            }
        )
    return rows
