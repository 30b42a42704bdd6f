"""The engine: requests in, one step at a time, answers out.

    engine = Engine("runs/demo/model")
    answers = engine.generate(["a text", "another"], tolerance=0.05)

Iteration-level continuous batching for early-exit models: between any two steps rows may join and
leave, and within a step the batch rule says who waits for whom (calm.rules). For one thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calm.cost import CostTable
from calm.drafting import accepted
from calm.errors import CalmError, ConfigError, DataError
from calm.policies import Policy, SkipSchedule, fills_above
from calm.rules import ROW_EXACT

from .accounting import Clock, StepRecord
from .backend import decoding_identity, make_backend
from .certified import Certificates
from .choice import RuleChoice
from .drift import Drift, Reference
from .endings import end_of, visible_text
from .extent import last_steps
from .heads import NOTHING
from .intake import Intake, Source
from .measure import measure, measure_check, setting_of
from .model import ServedModel, served
from .options import EngineOptions, RequestOptions
from .preempt import Preemption
from .prefill import CrossCache, CrossKV, source_key
from .requests import Answer, Reason, Row, Status, one_line
from .rounds import Round
from .sampling import choose
from .scheduler import Waiting
from .turns import Turns
from .wave import Spoken

if TYPE_CHECKING:
    from calm.models.speaking import SpeakingModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What one step brought.

    Attributes:
        tokens: (request id, token id) of each row that spoke.
        answers: of the requests that ended.
        record: where the time went; None when there was nothing to do.
    """

    tokens: list[tuple[str, int]]
    answers: list[Answer]
    record: StepRecord | None


class Engine:
    """Decodes many requests at once.

    Args:
        model: a model folder, or a loaded model.
        options: see EngineOptions; single ones can be given by name: ``Engine(folder, rule=BatchRule.compact)``.
        device, dtype: for a folder: where and in what arithmetic.
        costs: what ``rule=auto``, and ``rebatch`` with company 0, decide by; None measures it here and now.

    Raises:
        ConfigError, CheckpointError, CalibrationError.
    """

    def __init__(
        self,
        model: str | Path | SpeakingModel | ServedModel,
        options: EngineOptions | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        costs: CostTable | None = None,
        **named: Any,
    ) -> None:
        self.options = replace(options or EngineOptions(), **named)
        self.model = model if isinstance(model, ServedModel) else served(model, device, dtype)
        options = self.options
        self.clock = Clock()
        backend = make_backend(self.model, options, self.clock)
        self.slots, self.prefill, self.machine = backend.slots, backend.prefill, backend.machine
        self._exits, self.runner_name = backend.exits, backend.name
        self.most_drafted = backend.most_drafted
        self.turns = Turns(backend, self.clock, self._fail)
        self.preemption = Preemption(options.preempt, self.slots, self.machine)
        most = self.slots.held_bytes if options.cross_cache_bytes is None else options.cross_cache_bytes
        self.cross_cache = CrossCache(options.cross_cache_rows, most)
        identity = decoding_identity(self.model, options)
        self.drift = Drift(options.on_drift, options.requests_per_alarm, options.drift_patience)
        self.certificates = Certificates(self.model.artifacts, identity, options.rule, self.drift, self.model.usual)
        self._intake = Intake(self.model)
        self._waiting = Waiting(options.max_waiting)
        self._running: list[Row] = []
        self._rows: dict[str, Row] = {}
        self._ended: list[Row] = []
        self._kept: list[Answer] = []  # of others, while a stream was read
        self._arrivals = 0
        if not RuleChoice.decides(options):
            costs = None
        elif costs is None:
            costs = self._measured()
        check = partial(measure_check, self.machine, repeats=3)
        self.turns.choice = RuleChoice(options, setting_of(self), costs, check)

    # requests

    def add_request(
        self, source: Source, options: RequestOptions | None = None, *, name: str | None = None, **named: Any
    ) -> str:
        """Queue a request; returns its id, which is ``name`` if that is given.

        Single options can be given by name: ``tolerance=0.05``.

        Raises:
            QueueFull: too many requests wait.
            ConfigError, DataError, CalibrationError: the request cannot be served as it is asked for.
        """
        asked = replace(options or RequestOptions(), **named)
        name = self._name(name)
        limit = self._intake.limit(asked)
        resolved = self.certificates.resolve(asked, limit)
        self._intake.check(resolved.policy, name)
        if asked.draft is not None:
            if not self.most_drafted:
                raise ConfigError(f"draft needs runner=native or eager, and this engine's is {self.runner_name.value}")
            self._intake.check_draft(asked.draft, self.most_drafted)
        if isinstance(resolved.policy, SkipSchedule) and self.turns.bands is None:
            raise ConfigError(
                f"policy skip_schedule needs runner=native or eager, and this engine's is {self.runner_name.value}"
            )
        ids = self._intake.ids(source, asked.truncate)
        fills = self._fills(resolved.policy)
        row = Row(
            id=name,
            number=self._arrivals,
            source=ids,
            options=asked,
            policy=resolved.policy,
            certified=resolved.certified,
            watch=resolved.watch,
            limit=limit,
            next_input=self.model.spec.start_token_id,
            fills=fills,
            stops=last_steps(resolved.policy, fills, limit, self.model.spec.num_layers),
            key=source_key(ids),
        )
        self.slots.check(row.extent)
        self._waiting.add(row)
        self._rows[name] = row
        self._arrivals += 1
        return name

    def abort(self, name: str) -> bool:
        """Cancel a request wherever it is; its answer comes with the next step. False when it is over or unknown."""
        return self._give_up(name, Status.cancelled, Reason.cancelled)

    def fail(self, name: str, error: Exception) -> bool:
        """End a request as failed wherever it is, for what went wrong outside; otherwise as ``abort``."""
        return self._give_up(name, Status.failed, Reason.failed, one_line(error))

    def row(self, name: str) -> Row | None:
        """The state of a request whose answer has not been given yet; its owner may read it and go on reading it."""
        return self._rows.get(name)

    def _fills(self, policy: Policy) -> bool:
        """Whether layers above a token's are filled in; see Exits."""
        if isinstance(policy, SkipSchedule):  # its bands follow no rule
            return False
        return fills_above(policy) or self.options.rule not in ROW_EXACT

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to tell."""
        return bool(self._waiting or self._running or self._ended or self._kept)

    # decoding

    @torch.inference_mode()
    def step(self) -> Step:
        """Admit who fits, take one wave through the layers and rows that draft through a round, end who is done."""
        if not self.has_work:
            return Step([], [], None)
        self.clock.begin()
        self._make_room()
        admitted, calls = self._admit()
        rows, said, turns = len(self._running), list[tuple[str, int]](), self.turns
        for spoken in turns.of(self._running):
            said += self._take(spoken) if isinstance(spoken, Spoken) else self._hear(spoken)
        parked, rule = turns.num_parked, turns.rule
        answers = self._answers()
        record = self.clock.end(rows, len(said), rule.name if rule else None, parked, admitted, calls)
        return Step(said, answers, record)

    def generate(
        self,
        sources: Sequence[Source],
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        names: Sequence[str] | None = None,
        **named: Any,
    ) -> list[Answer]:
        """Answers in the order of ``sources``; requests that fail have status ``failed``. The queue may be shorter.

        Args:
            options: of all of them, or one for each.
            names: ids of the requests, one a source.

        Raises:
            ConfigError: the engine has other work, or the options cannot be served.
            DataError: a source that cannot be read; nothing is answered then.
        """
        if isinstance(sources, str):
            raise DataError("generate takes a list of sources, got one text; write generate([text])")
        if self.has_work:
            raise ConfigError("generate needs an idle engine; use add_request and step beside other requests")
        each = list(options) if isinstance(options, Sequence) else [options or RequestOptions()] * len(sources)
        called = [None] * len(sources) if names is None else names
        todo = [(s, replace(o, **named), n) for s, o, n in zip(sources, each, called, strict=True)][::-1]
        order: list[str] = []
        answers: dict[str, Answer] = {}
        try:
            while todo or self.has_work:
                while todo and len(self._waiting) < self.options.max_waiting:
                    source, asked, name = todo.pop()
                    order.append(self.add_request(source, asked, name=name))
                answers.update((answer.id, answer) for answer in self.step().answers)
        except BaseException:  # of one source, or Ctrl-C: leave the engine idle
            for added in order:
                self.abort(added)
            self._answers()
            raise
        return [answers[name] for name in order]

    def stream(self, source: Source, options: RequestOptions | None = None, **named: Any) -> Iterator[str]:
        """Pieces of one answer's text as they come; other requests go on beside it and keep their answers waiting.

        The request is queued at once, and what ``add_request`` raises is raised here. Iterating raises CalmError when
        the request fails.
        """
        return self._pieces(self._rows[self.add_request(source, options, **named)])

    def _pieces(self, row: Row) -> Iterator[str]:
        name, told = row.id, ""
        others: list[Answer] = []
        try:
            while True:
                text = visible_text(row, self.model.to_text)
                if len(text) > len(told):
                    piece, told = text[len(told) :], text
                    yield piece
                elif row.over:
                    break
                else:
                    others += [answer for answer in self.step().answers if answer.id != name]
        finally:
            if self.abort(name):  # nobody reads on
                others += [answer for answer in self._answers() if answer.id != name]
            self._kept += others
        if row.status is Status.failed:
            raise CalmError(row.error)

    # the parts of a step

    def _make_room(self) -> None:
        """Where slots grow: room for what each running row writes next, or the newest rows go back to the queue."""
        if not self.slots.grows:
            return
        for row in self.preemption.victims(self._running):
            self.preemption.keep(row)
            self._vacate(row)
            row.slot, row.status = -1, Status.waiting
            self._waiting.put_back([row])

    def _admit(self) -> tuple[int, int]:
        """Fill free slots from the queue, first come first served; returns admitted rows and encoder calls."""
        admitted = calls = 0
        while self._waiting and self.slots.fit([self._waiting.first.reaches]):
            first = self._waiting.first
            known = self.preemption.has(first) or first.key in self.cross_cache
            if not known and calls == self.options.prefill_calls:
                break  # decoding rows do not wait for more than this
            calls += 0 if known else 1
            room = min(self.options.prefill_rows, self.slots.free)
            group = self._waiting.group(room, self.prefill.alike, self.cross_cache)
            fitting = self.slots.fit([row.reaches for row in group])
            self._waiting.put_back(group[fitting:])
            del group[fitting:]
            self.clock("schedule")
            try:
                admitted += sum(self._seat(row, kv) for row, kv in self._encoded(group))
            except BaseException:  # such as Ctrl-C: nobody is lost between the queue and the slots
                self._waiting.put_back([row for row in group if row.status is Status.waiting])
                raise
            self.clock("prefill")
        return admitted, calls

    def _seat(self, row: Row, kv: CrossKV) -> bool:
        """Give a row its slot; one for which that raises fails alone. Whether it is running now."""
        slot = self.slots.take(row.extent)
        try:
            if not row.tokens:
                self._heed_drift(row)
            self.slots.put_source(slot, *kv)
            self.preemption.back(row, slot)
            self._exits.put(slot, row.policy, row.id)
        except BaseException as error:
            self._exits.clear(slot)
            self.slots.give_back(slot)
            if not isinstance(error, Exception):
                raise
            self._fail(row, error)
            return False
        row.slot, row.status, row.admitted = slot, Status.running, row.admitted or time.perf_counter()
        self._running.append(row)
        return True

    def _heed_drift(self, row: Row) -> None:
        """An alarm that came while a row waited is for that row too."""
        if row.watch is None or self.drift.threshold(*row.watch[:2]) == row.watch[2]:
            return
        resolved = self.certificates.resolve(row.options, row.limit)
        row.policy, row.certified, row.watch = resolved.policy, resolved.certified, resolved.watch

    def _encoded(self, rows: list[Row]) -> list[tuple[Row, CrossKV]]:
        """Cross K/V of rows that were just taken from the queue; a row whose encoding raises fails alone.

        Of a decoder-only model it is the prompts' own K/V; of a row that was preempted, its answer's too.
        """
        if self.preemption.has(rows[0]):
            return [(rows[0], self.preemption.copy(rows[0]))]
        kept = self.cross_cache.get(rows[0].key)
        if kept is not None:
            return [(rows[0], kept)]
        try:
            found = self.prefill([row.source for row in rows])
        except Exception as error:
            if len(rows) == 1:
                self._fail(rows[0], error)
                return []
            return [pair for row in rows for pair in self._encoded([row])]
        for row, kv in zip(rows, found, strict=True):
            self.cross_cache.put(row.key, kv)
        return list(zip(rows, found, strict=True))

    def _hear(self, rounds: list[Round]) -> list[tuple[str, int]]:
        """Hand the words of rounds to their rows, each of them one of full depth; what follows an end is not said."""
        said = []
        now, layers = time.perf_counter(), self.model.spec.num_layers
        for each in rounds:
            row, right = each.row, accepted(each.guesses, each.words)
            row.rounds, row.drafted = row.rounds + 1, row.drafted + len(each.guesses)
            try:
                for place, token in enumerate(each.words[: right + 1]):
                    if token == NOTHING:
                        raise CalmError("the logits are not finite")
                    row.record(token, layers, layers, layers, False)
                    row.accepted += place < right
                    if self.options.record_confidences:
                        row.confidences.append((float("nan"),) * layers)
                    row.first_token = row.first_token or now
                    said.append((row.id, token))
                    reason = end_of(row, self.model.spec.eos_token_id, self.model.to_text)
                    if reason is not None:
                        self._end(row, Status.finished, reason)
                        break
            except Exception as error:
                self._fail(row, error)
        return said

    def _take(self, spoken: Spoken) -> list[tuple[str, int]]:
        """Hand tokens and layers to their rows; end those that are done. A row for which that raises fails alone."""
        said = []
        logits: Tensor | None = None
        now, eos = time.perf_counter(), self.model.spec.eos_token_id
        for i, row in enumerate(spoken.rows):
            try:
                token: int | None = spoken.tokens[i]
                if not row.options.greedy or row.step + 1 < row.options.min_tokens:
                    logits = spoken.logits() if logits is None else logits
                    token = choose(logits[i], row.step, row.options, row.seed, [eos])
                if token is None or token == NOTHING:
                    raise CalmError("the logits are not finite")
                row.record(token, spoken.crossing[i], spoken.emission[i], spoken.executed[i], spoken.involuntary[i])
                if spoken.confidences is not None:
                    row.confidences.append(tuple(spoken.confidences[i]))
                row.first_token = row.first_token or now
                reason = end_of(row, eos, self.model.to_text)
            except Exception as error:
                self._fail(row, error)
                continue
            said.append((row.id, token))
            if reason is not None:
                self._end(row, Status.finished, reason)
        return said

    def _fail(self, row: Row, error: Exception) -> None:
        self._end(row, Status.failed, Reason.failed, one_line(error))

    def _give_up(self, name: str, status: Status, reason: Reason, error: str = "") -> bool:
        row = self._rows.get(name)
        if row is None or row.over:
            return False
        if row.status is Status.waiting:
            self._waiting.remove(row)
        self._end(row, status, reason, error)
        return True

    def _end(self, row: Row, status: Status, reason: Reason, error: str = "") -> None:
        """A row is over, wherever it was: its slot is free at once."""
        row.end(status, reason, error)
        if row.watch is not None and status is Status.finished:
            self._watch(row)
        if row.slot >= 0:
            self._vacate(row)
        self.preemption.forget(row)
        self._ended.append(row)

    def _vacate(self, row: Row) -> None:
        self._running.remove(row)
        self.turns.forget(row)
        self.clock("host")
        self._exits.clear(row.slot)
        self.slots.give_back(row.slot)
        self.clock("slots")

    def _watch(self, row: Row) -> None:
        """Whether its depth is like that of the articles that its threshold was certified on."""
        assert row.watch is not None
        artifact, asked, used = row.watch
        if self.drift.saw(artifact, asked, used, row.emission):
            logger.warning(
                "drift: answers at the threshold certified by %s are no longer as deep as at calibration (%.3f of the "
                "layers skipped then); on_drift=%s",
                artifact.name, Reference.of(artifact, used).mean, self.options.on_drift.value,
            )  # fmt: skip

    def _answers(self) -> list[Answer]:
        """Answers of the rows that ended; the others move together, so that a batch is the first slots."""
        answers, self._kept = self._kept, []
        for row in self._ended:
            answers.append(self._answer(row))
            del self._rows[row.id]
        self._ended.clear()
        if self.slots.neighbours and not self.turns.parked:  # a parked wave knows its slots by number
            self._running.sort(key=lambda row: row.slot)
            for place, row in enumerate(self._running):
                if row.slot != place:
                    self.clock("host")
                    self.slots.move(row.slot, place)
                    self._exits.move(row.slot, place)
                    row.slot = place
                    self.clock("slots")
        return answers

    def _answer(self, row: Row) -> Answer:
        """The answer of a row that is over; it has no text, and failed, where its ids cannot be read."""
        layers = self.model.spec.num_layers
        try:
            return row.answer(self.model.to_text, layers)
        except Exception as error:
            row.end(Status.failed, Reason.failed, row.error or one_line(error))
            return row.answer(lambda ids: "", layers)

    def _measured(self) -> CostTable:
        """The cost table of this engine; a model keeps those that were measured for it."""
        options = self.options
        arithmetic = (self.runner_name, options.weights, options.cross_kv)
        shape = (options.ladder, options.block_size, options.cache_blocks, options.head, options.head_k, *arithmetic)
        if shape not in self.model.costs:
            self.model.costs[shape] = measure(self, 3, measures=())
        return self.model.costs[shape]

    # checks of a request

    def _name(self, name: str | None) -> str:
        """The id of a new request: as asked for, else one that is free."""
        if name is None:
            number = self._arrivals
            while (free := f"request-{number}") in self._rows:
                number += 1
            return free
        if not isinstance(name, str):
            raise ConfigError(f"a request id must be a string, got {name!r:.40}")
        if name in self._rows:
            raise ConfigError(f"request id {name!r} is in use; give another")
        return name
