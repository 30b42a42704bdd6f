"""What running rows go through in a step: a wave, rounds, bands, and what prompts say.

Whatever raises costs those rows alone for which it raises again: a step writes nothing that a repetition does not write
again, so each row is tried by itself and the sound ones go on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from calm.config import Measure
from calm.drafting import Draft
from calm.policies import SkipSchedule
from calm.rules import Rule, next_parked

from .accounting import Clock
from .backend import Backend
from .bands import bands_of
from .choice import RuleChoice
from .prompts import first_words
from .requests import Row
from .rounds import Round
from .wave import Spoken


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
        """Everything of a step. ``running`` changes on the way, as rows end."""
        drafting = [row for row in self._decoding(running) if row.options.draft is not None]
        self.rule = None
        if climbing := self._climbing(running):
            self._clock("schedule")
            self.rule = self.choice.rule(len(climbing), bool(self.parked), self._measures)
            self._clock("choice")
            spoken = self._wave(self.rule, running)
            self.choice.saw(spoken.crossing, [row.number for row in spoken.rows])
            yield spoken
        for draft in dict.fromkeys(row.options.draft for row in drafting if row.options.draft is not None):
            yield self._round([row for row in drafting if row.options.draft == draft], draft)
        for layers, band in bands_of(self._decoding(running), self._machine.num_layers).items():
            yield from self._band(band, layers)
        yield from self._first_words([row for row in running if self._prompted and not row.tokens])

    @property
    def _measures(self) -> list[Measure]:
        return [measure for measure, _ in self._exits.present]

    def _decoding(self, running: list[Row]) -> list[Row]:
        """Rows whose next token is not for their prompt to say."""
        return [row for row in running if row.tokens or not self._prompted]

    def _climbing(self, running: list[Row]) -> list[Row]:
        """Rows whose next token is for the layers to say, one token at a time."""
        return [
            row
            for row in self._decoding(running)
            if row.options.draft is None and not isinstance(row.policy, SkipSchedule)
        ]

    # waves

    def _wave(self, rule: Rule, running: list[Row]) -> Spoken:
        """The wave whose turn it is, taken through the layers."""
        waiting = {id(row) for wave in self.parked for row in wave.rows}
        fresh = [row for row in self._climbing(running) if id(row) not in waiting]
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
        except Exception:
            return self._without_poison(involved, rule, running)

    def _without_poison(self, rows: list[Row], rule: Rule, running: list[Row]) -> Spoken:
        """After a wave raised: each of its rows by itself finds those that raise; the others go on together.

        Rows that had joined the wave on its way are parked no more and start their step anew.
        """
        self.parked.clear()
        sound = []
        for row in self._climbing(running):
            try:
                self._climbed([row], rule, self._machine.bucket(len(rows)))
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

    def _round(self, rows: list[Row], draft: Draft) -> list[Round]:
        assert self.rounds is not None
        try:
            return self.rounds(rows, draft)
        except Exception as error:
            if len(rows) == 1:
                self._fail(rows[0], error)
                return []
            return [found for row in rows for found in self._round([row], draft)]

    def _band(self, rows: list[Row], layers: Sequence[int]) -> Iterator[Spoken]:
        assert self.bands is not None
        try:
            yield self.bands(rows, layers)
        except Exception as error:
            if len(rows) == 1:
                self._fail(rows[0], error)
                return
            for row in rows:
                yield from self._band([row], layers)

    def _first_words(self, rows: list[Row]) -> Iterator[Spoken]:
        """What the prompts say of rows that have no token yet."""
        if not rows:
            return
        try:
            yield first_words(self._machine, rows)
        except Exception:
            bucket = self._machine.bucket(len(rows))
            for row in rows:
                try:
                    yield first_words(self._machine, [row], bucket)
                except Exception as own:
                    self._fail(row, own)
