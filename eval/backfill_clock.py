"""What filling skipped layers takes on the clock, of what running them would: ``project`` by ``true``."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.config import BatchRule
from calm.cost import backfilling
from calm.experiment_config import BackfillConfig

from .shallow_ways import engine_of
from .trials import Row

if TYPE_CHECKING:
    from calm.drafting import Draft
    from calm.models.t5 import EarlyExitT5
    from calm.policies import Policy
    from calm.records import Example
    from serve.engine import Engine
    from serve.rounds import Round

RULE = BatchRule.compact


def passes(
    config: BackfillConfig, folder: Path, model: "EarlyExitT5", articles: "Sequence[Example]", positions: Sequence[int]
) -> list[Row]:
    """``true`` at batch 1 as the engine can do it: several positions that left early, one pass of the layers above.

    A round of drafts is such a pass. All of it is timed in answers of the engine, in turns: between two steps weights
    move away from the core, which a loop of passes alone would not show.

    Returns:
        ``pass_s``: of so many positions through so many layers, left out where an answer has fewer; ``of_layers``: by
        as many steps at full depth, their share of these layers; ``fill_of_pass``: projecting keys and values in as
        many steps instead, of the pass. Medians, of an fp32 engine, a thread's own processor time where it has one.
    """
    from calm.drafting import Draft
    from calm.policies import Full, Replay

    engine, _ = timed_engine(folder, model, articles, 1)
    last, longest = engine.model.spec.num_layers, engine.model.max_target
    fitting = [count for count in positions if 1 < count <= min(longest, engine.most_drafted + 1)]
    read, sources = Readings(engine), [article.source for article in articles[: config.clock_repeats]]
    for source in sources:
        read.steps("layer", source, Full())
        for above in range(1, last):
            read.steps(f"fill {above}", source, Replay({"clock": [last - above] * longest}))
            for count in fitting:
                read.rounds(f"{above} {count}", source, Draft(last - above, count - 1), count)
    layer, rows = read.median("layer") / last, list[Row]()
    for above in range(1, last):
        fill = read.median(f"fill {above}")
        for count in fitting:
            taken = read.median(f"{above} {count}")
            rows.append(
                {
                    "kind": "pass", "batch": 1, "skipped": above, "positions": count,
                    "runner": engine.runner_name.value, "pass_s": taken, "fill_s": fill, "layers_s": above * layer,
                    "of_layers": taken / (count * above * layer), "fill_of_pass": count * fill / taken,
                }
            )  # fmt: skip
    return rows


class Readings:
    """Seconds of an idle engine's steps and rounds, by what was asked of it."""

    def __init__(self, engine: "Engine") -> None:
        self._engine, self._rounds = engine, engine.turns.rounds
        self._seconds: dict[str, list[float]] = {}

    def median(self, name: str) -> float:
        return statistics.median(self._seconds[name])

    def steps(self, name: str, source: str, policy: "Policy") -> None:
        """Of each step but the first: its layers at full depth, else what filled in the layers above."""
        phase = "layers" if name == "layer" else "backfill"
        before = self._engine.clock.steps
        self._engine.generate([source], policy=policy, names=["clock"], ignore_eos=True)
        steps = list(self._engine.clock.history)[before - self._engine.clock.steps :][1:]
        self._seconds.setdefault(name, []).extend(step.seconds[phase] for step in steps)

    def rounds(self, name: str, source: str, draft: "Draft", positions: int) -> None:
        """Of each round but the first that had so many positions: its layers above the draft."""
        assert self._rounds is not None
        found = self._seconds.setdefault(name, [])
        called, seen = self._rounds, list[float]()

        def heard(rows: "Sequence[Any]", asked: "Draft") -> "list[Round]":
            said = called(rows, asked)
            if len(said[0].words) == positions:
                seen.append(called.verify_s)
            return said

        self._engine.turns.rounds = heard  # type: ignore[assignment]
        try:
            self._engine.generate([source], draft=draft, ignore_eos=True)
        finally:
            self._engine.turns.rounds = called
        found += seen[1:] or seen


def timed_engine(
    folder: Path, model: "EarlyExitT5", articles: "Sequence[Example]", batch: int
) -> "tuple[Engine, list[int]]":
    """An fp32 engine whose clock is its thread's own where it has one, and the articles' lengths."""
    import torch

    from serve.model import served

    target = served(model, folder=folder)
    engine = engine_of(target, RULE, "fp32", batch, batch)
    if torch.get_num_threads() == 1:
        engine.clock.now = time.thread_time
    return engine, [len(target.to_ids(each.source)) for each in articles[:64]]


def clocks(
    config: BackfillConfig, folder: Path, model: "EarlyExitT5", articles: "Sequence[Example]", batch: int
) -> list[Row]:
    """For each number of skipped layers, by a cost table of an fp32 engine of this batch size.

    Returns:
        ``fill_s``: projecting the keys and values of so many layers; ``layers_s``: running them; ``of_true``: the
        first by the second. A thread's own processor time where the engine has one thread.
    """
    from serve.measure import measure, setting_of

    engine, lengths = timed_engine(folder, model, articles, batch)
    table, packed = measure(engine, config.clock_repeats, None, lengths), setting_of(engine).packed
    layer, filled = table.at("layer", batch), dict[int, float]()
    for skipped in range(1, engine.model.spec.num_layers):
        once = table.at(backfilling(skipped if packed else 1), batch)
        filled[skipped] = once if packed else skipped * once
    return [
        {
            "kind": "clock", "batch": batch, "skipped": skipped, "runner": engine.runner_name.value,
            "fill_s": fill, "layers_s": skipped * layer, "of_true": fill / (skipped * layer),
        }
        for skipped, fill in filled.items()
    ]  # fmt: skip
