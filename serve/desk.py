"""Where commands become requests of the engine, and its steps become events: at most one batch of them a step."""

from __future__ import annotations

import heapq
import logging
import time
from dataclasses import dataclass, replace

from calm.errors import CalmError

from .endings import visible_text
from .engine import Engine, Step
from .errors import QueueFull
from .messages import Abort, Batch, Ended, Load, Refused, Silent, Spoke, Stop, Submit
from .requests import Answer, Reason, Row, Status, Timing, one_line
from .tokenising import Ids, Tokeniser

logger = logging.getLogger(__name__)

PATIENCE = 3  # steps that may raise one after another
FAILED = "the engine could not decode this request; the others go on"


class EngineBroken(CalmError, RuntimeError):
    """Step after step raises: only a new engine helps."""


@dataclass(eq=False)
class Open:
    """A request that is not over.

    Attributes:
        row: its state in the engine; None until its text has become ids.
        chars, tokens: of its answer that were told.
        spoke: when it last did, where its pieces are not wanted; 0: it has not.
        parked: waits for company that were counted.
    """

    submit: Submit
    row: Row | None = None
    chars: int = 0
    tokens: int = 0
    spoke: float = 0.0
    parked: int = 0
    expired: bool = False


class Desk:
    """The requests of one engine. Whoever owns it hands in commands, and calls ``step`` while it is ``busy``.

    What there is to tell is in ``batch``, which is due when there is ``news``.
    """

    def __init__(self, engine: Engine, tokeniser: Tokeniser) -> None:
        self._engine, self._tokeniser = engine, tokeniser
        self._open: dict[str, Open] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; of requests that are over too
        self._events: list[Refused | Spoke | Ended] = []
        self._layers: list[int] = []
        self._gaps: list[float] = []
        self._drift = engine.drift.state
        self._stop: Stop | None = None
        self._raised = 0
        self._parked = 0
        self._executed = self._skipped = self._backfilled = self._rebatches = 0

    def take(self, command: Submit | Abort | Stop) -> None:
        """Act on a command; what it leads to comes with the next step."""
        match command:
            case Submit():
                self._submit(command)
            case Abort(name):
                self._abort(name)
            case Stop():
                self._stop = command

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do now."""
        return self._engine.has_work or self._tokeniser.has_short or bool(self._events)

    @property
    def leaving(self) -> bool:
        """Whether it is time to leave, as was asked for."""
        return self._stop is not None and not (self._stop.drain and self._open)

    @property
    def next_deadline(self) -> float:
        """When the next request expires; infinite where none does."""
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    @property
    def news(self) -> bool:
        """Whether somebody waits for what the next batch tells."""
        return bool(self._events)

    def batch(self) -> Batch:
        """What has happened since the last one."""
        events, self._events = tuple(self._events), []
        silent = Silent(tuple(self._layers), tuple(self._gaps))
        self._layers, self._gaps = [], []
        return Batch(events, self._load(), silent)

    def step(self) -> None:
        """Everything that is due: deadlines, texts, one step of the engine.

        Raises:
            EngineBroken: it raises again and again.
        """
        self._expire()
        for name, ids in self._tokeniser.found(self._chars()):
            if name in self._open:
                self._add(self._open[name], ids)
        step = self._stepped()
        self._parked = step.record.parked if step.record is not None else 0
        now = time.perf_counter()
        for name in dict.fromkeys(name for name, _ in step.tokens):
            one = self._open[name]
            self._speak(one) if one.submit.pieces else self._note(one, now)
        for answer in step.answers:
            self._end(self._open[answer.id], answer)
        if step.answers:
            self._drift = self._engine.drift.state

    # commands

    def _submit(self, asked: Submit) -> None:
        source, waiting = asked.source, self._engine.num_waiting + len(self._tokeniser)
        one = self._open[asked.id] = Open(asked)
        if asked.deadline:
            heapq.heappush(self._deadlines, (asked.deadline, asked.id))
        if not isinstance(source, str):
            self._add(one, source)
        elif waiting >= self._engine.options.max_waiting:
            self._refuse(one, QueueFull(f"{waiting} requests wait already; send it again later"))
        else:
            one.submit = replace(asked, source="")  # it may be long
            self._tokeniser.put(asked.id, source, asked.options.truncate)

    def _add(self, one: Open, ids: Ids) -> None:
        name = one.submit.id
        try:
            if isinstance(ids, Exception):
                raise ids
            self._engine.add_request(ids, one.submit.options, name=name)
        except Exception as error:
            self._refuse(one, error)
        else:
            one.row = self._engine.row(name)

    def _refuse(self, one: Open, error: Exception) -> None:
        if isinstance(error, CalmError):
            refused = Refused(one.submit.id, type(error).__name__, one_line(error))
        else:  # it may say anything
            logger.error("a request could not be taken", exc_info=error)
            refused = Refused(one.submit.id, CalmError.__name__, "the request could not be taken")
        del self._open[one.submit.id]
        self._events.append(refused)

    def _abort(self, name: str) -> None:
        one = self._open.get(name)
        if one is None or self._engine.abort(name) or one.row is not None:
            return
        self._tokeniser.drop(name)
        del self._open[name]
        timing = Timing(one.submit.arrived, 0.0, 0.0, time.perf_counter())
        self._events.append(
            Ended(name, Status.cancelled, Reason.cancelled, "", 0, 0, False, (), (), 0, timing, one.expired)
        )

    def _expire(self) -> None:
        now = time.perf_counter()
        while self._deadlines and self._deadlines[0][0] <= now:
            due, name = heapq.heappop(self._deadlines)
            if name in self._open and self._open[name].submit.deadline == due:  # not a later one of the same name
                self._open[name].expired = True
                self._abort(name)

    # a step

    def _chars(self) -> int:
        """Characters to tokenise before the next step: rows that run do not wait for more than one text."""
        options, one = self._engine.options, self._tokeniser.short_chars
        return one if self._engine.num_running else one * options.prefill_rows * options.prefill_calls

    def _stepped(self) -> Step:
        """The engine's step. One that raises costs the rows that run, for nobody knows whose fault it was."""
        try:
            step = self._engine.step()
        except Exception as error:
            self._raised += 1
            if self._raised == PATIENCE:
                raise EngineBroken(f"{PATIENCE} steps one after another raised") from error
            logger.error("a step of the engine raised; its running requests fail", exc_info=error)
            for name, one in self._open.items():
                if one.row is not None and one.row.status is Status.running:
                    self._engine.fail(name, error)
            return Step([], self._lost(), None)
        self._raised = 0
        return step

    def _lost(self) -> list[Answer]:
        """Answers of requests that ended in the step that raised, and of which the engine knows nothing any more."""
        model = self._engine.model
        rows = [one.row for name, one in self._open.items() if one.row and self._engine.row(name) is None]
        return [row.answer(model.to_text, model.spec.num_layers) for row in rows]

    def _speak(self, one: Open) -> None:
        """Tell what a row said since it was last told."""
        row, begin = one.row, one.tokens
        assert row is not None
        try:
            text = visible_text(row, self._engine.model.to_text)
        except Exception as error:
            self._engine.fail(row.id, error)
            return
        self._count(one, row)
        self._events.append(Spoke(row.id, text[one.chars :], tuple(row.tokens[begin:]), tuple(row.emission[begin:])))
        one.chars = len(text)

    def _note(self, one: Open, now: float) -> None:
        """Of a row whose pieces nobody wants: its tokens cost a step next to nothing."""
        assert one.row is not None
        fresh = one.row.emission[one.tokens :]
        self._count(one, one.row)
        self._layers += fresh
        if one.spoke:
            self._gaps += [(now - one.spoke) / len(fresh)] * len(fresh)
        one.spoke = now

    def _count(self, one: Open, row: Row) -> None:
        """Add a row's newest tokens to the sums: one a step, or several of a round."""
        layers, fresh = self._engine.model.spec.num_layers, row.emission[one.tokens :]
        self._executed += sum(row.executed[one.tokens :])
        self._skipped += sum(layers - layer for layer in fresh)
        self._backfilled += sum(layer < layers for layer in fresh) if row.fills else 0
        one.tokens = len(row.tokens)
        self._rebatches += row.parked - one.parked
        one.parked = row.parked

    def _end(self, one: Open, answer: Answer) -> None:
        del self._open[answer.id]
        assert one.row is not None
        failed, drafts = answer.status is Status.failed, one.submit.options.draft is not None
        if failed:
            logger.error("a request failed: %s", answer.error)
        self._events.append(
            Ended(
                id=answer.id,
                status=answer.status,
                reason=answer.reason,
                text=answer.text[one.chars :],
                prompt_tokens=one.row.length,
                tokens=len(answer.tokens),
                certified=answer.certified,
                emission_layers=answer.emission_layers,
                executed_layers=answer.executed_layers,
                involuntary=answer.involuntary,
                drafted=answer.drafted if drafts else None,
                accepted=answer.accepted if drafts else None,
                timing=replace(answer.timing, arrived=one.submit.arrived),
                expired=one.expired,
                error=FAILED if failed else "",
            )
        )

    def _load(self) -> Load:
        engine = self._engine
        return Load(
            beat=time.perf_counter(),
            steps=engine.clock.steps,
            running=engine.num_running,
            waiting=engine.num_waiting + len(self._tokeniser),
            parked=self._parked,
            layers_executed=self._executed,
            layers_skipped=self._skipped,
            backfilled_tokens=self._backfilled,
            rebatches=self._rebatches,
            drift=self._drift,
            blocks=engine.slots.num_blocks,
            blocks_used=engine.slots.num_blocks_used,
            preemptions=engine.preemption.count,
            preempted_bytes=engine.preemption.held_bytes,
        )
