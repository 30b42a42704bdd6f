"""What running rows go through in a step: a wave, rounds, bands, and what prompts say.

Whatever raises costs those rows alone for which it raises again: a step writes nothing that a repetition does not write
again, so each row is tried by itself and the sound ones go on. A step that the device does not record is no row's
doing: those that it was for fail, with the one reason.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from calm.config import Measure
from calm.drafting import Draft
from calm.policies import SkipSchedule
from calm.rules import Rule, next_parked

from .accounting import Clock
from .backend import Backend
from .bands import bands_of
from .choice import RuleChoice
from .errors import CaptureError
from .prompts import first_words
from .requests import Row
from .rounds import Round
from .wave import Spoken

logger = logging.getLogger(__name__)

Said = TypeVar("Said")


class Turns:
    """The rows' turns in an engine's steps.

    Args:
        fail: ends a row as failed; it is among the running ones no more.

    Attributes:
        choice: of each wave's rule; set before the first step.
        parked: waves that wait for company between two layers.
        rule: of this step's wave; None where there was none.
        rounds, bands: as of Backend.
    """

    choice: RuleChoice

    def __init__(self, backend: Backend, clock: Clock, fail: Callable[[Row, Exception], None]) -> None:
        self._machine, self._new_wave, self._exits = backend.machine, backend.wave, backend.exits
        self._prompted: bool = backend.slots.prompted
        self.rounds, self.bands = backend.rounds, backend.bands
        self._clock, self._fail = clock, fail
        self.parked: list[Any] = []
        self.rule: Rule | None = None

    @property
    def num_parked(self) -> int:
        """Rows that wait."""
        return sum(wave.size for wave in self.parked)

    def forget(self, row: Row) -> None:
        """A row that is over, or that lost its slot, waits no more."""
        self.parked = [wave for wave in self.parked if wave.drop(row)]

    def of(self, running: list[Row]) -> Iterator[Spoken | list[Round]]:
        """Everything of a step. ``running`` changes on the way, as rows end, each of them in its own turn."""
        climbing, scheduled, unsaid = list[Row](), list[Row](), list[Row]()
        drafting: dict[Draft, list[Row]] = {}
        for row in running:
            if self._prompted and not row.tokens:  # its next token is for its prompt to say
                unsaid.append(row)
            elif row.options.draft is not None:
                drafting.setdefault(row.options.draft, []).append(row)
            elif isinstance(row.policy, SkipSchedule):
                scheduled.append(row)
            else:
                climbing.append(row)
        self.rule = None
        if climbing:
            self._clock("schedule")
            self.rule = self.choice.rule(len(climbing), bool(self.parked), self._measures)
            self._clock("choice")
            spoken = self._wave(self.rule, climbing)
            self.choice.saw(spoken.crossing, [row.number for row in spoken.rows])
            yield spoken
        for draft, rows in drafting.items():
            assert self.rounds is not None
            yield from self._sound(rows, self.rounds, draft)
        for layers, rows in bands_of(scheduled, self._machine.num_layers).items():
            assert self.bands is not None
            yield from self._sound(rows, self.bands, layers)
        if unsaid:
            yield from self._sound(unsaid, partial(first_words, self._machine), self._machine.bucket(len(unsaid)))

    @property
    def _measures(self) -> list[Measure]:
        return [measure for measure, _ in self._exits.present]

    # waves

    def _wave(self, rule: Rule, rows: list[Row]) -> Spoken:
        """The wave whose turn it is, taken through the layers."""
        waiting = {id(row) for wave in self.parked for row in wave.rows}
        fresh = [row for row in rows if id(row) not in waiting]
        resumed = next_parked(self.parked, rule, len(fresh))
        if resumed is not None:
            self.parked.remove(resumed)
        involved = fresh if resumed is None else resumed.rows
        self._clock("schedule")
        if not involved:
            return Spoken.nothing()
        try:
            wave = self._new_wave(rule, fresh, None) if resumed is None else resumed
            return self._up(wave, rule, self.parked, patient=resumed is None)
        except CaptureError as error:
            for row in rows:
                self._fail(row, error)
            return Spoken.nothing()
        except Exception:
            logger.warning("a wave raised, so each of its rows goes by itself", exc_info=True)
            return self._without_poison(rows, rule, self._machine.bucket(len(involved)))

    def _without_poison(self, rows: list[Row], rule: Rule, bucket: int) -> Spoken:
        """After a wave raised: each of its rows by itself finds those that raise; the others go on together.

        Rows that had joined the wave on its way are parked no more and start their step anew.
        """
        self.parked.clear()
        sound = []
        for row in rows:
            try:
                self._climbed([row], rule, bucket)
                sound.append(row)
            except Exception as own:
                self._fail(row, own)
        try:
            return self._climbed(sound, rule)
        except Exception as still:  # it takes several of them: none can be told to be sound
            for row in sound:
                self._fail(row, still)
            return Spoken.nothing()

    def _climbed(self, rows: list[Row], rule: Rule, bucket: int | None = None) -> Spoken:
        """One wave of these rows to its end, without parking."""
        if not rows:
            return Spoken.nothing()
        return self._up(self._new_wave(rule, rows, bucket), rule, [], patient=False)

    @staticmethod
    def _up(wave: Any, rule: Rule, parked: list[Any], *, patient: bool) -> Spoken:
        wave.climb(rule, parked, patient)
        spoken: Spoken | None = wave.spoken
        assert spoken is not None
        return spoken

    # other ways

    def _sound(self, rows: list[Row], say: Callable[..., Said], how: object) -> Iterator[Said]:
        """What these rows say; where that raises, what each of them says by itself that does not raise again."""
        try:
            yield say(rows, how)
        except Exception:
            for row in rows:
                try:
                    yield say([row], how)
                except Exception as own:
                    self._fail(row, own)
