"""Commands become requests and steps become events: nothing is lost, mixed up or told twice, and one fails alone."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tokenizers import decoders

from calm.config import BatchRule
from calm.drafting import Draft
from calm.policies import Full, Static
from serve.desk import FAILED, PATIENCE, Desk, EngineBroken
from serve.engine import Engine, Step
from serve.frames import wait
from serve.messages import Abort, Batch, Ended, Load, Refused, Silent, Spoke, Stop, Submit
from serve.options import RequestOptions
from serve.requests import Reason, Status
from serve.tokenising import Tokeniser

from .models import engine_of, policy_for, texts, tiny_served
from .stories import LENGTH, ONE, TEN, story_engine
from .test_poison import BAD, SOURCES, bad_model


@dataclass
class Told:
    """What one request was told."""

    spokes: list[Spoke] = field(default_factory=list)
    ended: Ended | None = None
    refused: Refused | None = None

    @property
    def text(self) -> str:
        assert self.ended is not None
        return "".join(spoke.text for spoke in self.spokes) + self.ended.text

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for spoke in self.spokes for token in spoke.tokens)


class Counter:
    """Stands at a desk: hands in commands and sorts what comes back by request."""

    def __init__(self, engine: Engine, tokeniser: Tokeniser) -> None:
        self.engine, self.tokeniser = engine, tokeniser
        self.desk = Desk(engine, tokeniser)
        self.told: dict[str, Told] = {}
        self.silent: list[Silent] = []
        self.load: Load | None = None

    def submit(
        self,
        name: str,
        source: Any,
        *,
        deadline: float = 0.0,
        arrived: float = 0.0,
        pieces: bool = True,
        **options: Any,
    ) -> None:
        arrived = arrived or time.perf_counter()
        self.desk.take(Submit(name, source, RequestOptions(**options), arrived, deadline, pieces))

    def step(self) -> Batch:
        self.desk.step()
        batch = self.desk.batch()
        self.load = batch.load
        self.silent.append(batch.silent)
        for event in batch.events:
            told = self.told.setdefault(event.id, Told())
            assert told.ended is None and told.refused is None, "told after its end"
            match event:
                case Spoke():
                    told.spokes.append(event)
                case Ended():
                    told.ended = event
                case Refused():
                    told.refused = event
        return batch

    def run(self) -> dict[str, Told]:
        """Until there is nothing to do."""
        while self.desk.busy or len(self.tokeniser):
            if not self.desk.busy:
                wait([self.tokeniser.channel], 60)
            self.step()
        return self.told


@pytest.fixture
def at() -> Iterator[Callable[..., Counter]]:
    """Makes a counter of an engine; texts above ``short`` characters go to the other process."""
    made: list[Tokeniser] = []

    def counter(engine: Engine, short: int = 4096) -> Counter:
        made.append(Tokeniser(engine.model.to_ids, short))
        return Counter(engine, made[-1])

    yield counter
    for tokeniser in made:
        tokeniser.close()


KINDS = ("full", "softmax", "static", "entropy")


@pytest.mark.parametrize("rule", [BatchRule.own, BatchRule.rebatch], ids=lambda rule: rule.value)
def test_everybody_is_told_all_of_their_own_answer_and_the_load_adds_up(
    rule: BatchRule, at: Callable[..., Counter]
) -> None:
    """Rows join and leave between any two steps, by text of both lengths and by ids."""
    asked = [RequestOptions(policy=policy_for(KINDS[number % 4], "", number)) for number in range(len(texts()))]
    expected = engine_of(BatchRule.own, max_batch=4).generate(texts(), asked)
    counter = at(engine_of(rule, max_batch=4), short=20)
    for number, source in enumerate(texts()):
        given = tuple(counter.engine.model.to_ids(source)) if number % 3 == 0 else source
        counter.submit(f"r{number}", given, policy=asked[number].policy)
        counter.step()
    found = counter.run()
    assert len(found) == len(expected)
    layers = counter.engine.model.spec.num_layers
    executed = skipped = backfilled = 0
    for number, answer in enumerate(expected):
        mine = found[f"r{number}"]
        assert mine.ended is not None and mine.ended.status is Status.finished and not mine.ended.error
        assert (mine.text, mine.tokens) == (answer.text, answer.tokens)
        assert tuple(layer for spoke in mine.spokes for layer in spoke.layers) == mine.ended.emission_layers
        assert mine.ended.emission_layers == answer.emission_layers and mine.ended.tokens == len(answer.tokens)
        assert mine.ended.prompt_tokens == len(counter.engine.model.to_ids(texts()[number]))
        executed += sum(mine.ended.executed_layers)
        skipped += sum(layers - layer for layer in answer.emission_layers)
        backfilled += sum(filled > 0 for filled in answer.backfilled_layers)
    load = counter.load
    assert load is not None and skipped > 0
    assert (load.layers_executed, load.layers_skipped, load.backfilled_tokens) == (executed, skipped, backfilled)
    assert (load.running, load.waiting, load.parked) == (0, 0, 0) and load.steps == counter.engine.clock.steps
    assert (load.rebatches > 0) is (rule is BatchRule.rebatch)


@pytest.mark.parametrize("pieces", [True, False])
def test_rounds_are_told_word_for_word(pieces: bool, at: Callable[..., Counter]) -> None:
    """A round brings several words at once: each is told and counted once, and time between them is shared out."""
    expected = engine_of(BatchRule.own, max_batch=4).generate(texts(), policy=Full())
    counter = at(engine_of(BatchRule.own, max_batch=4))
    for number, source in enumerate(texts()):
        counter.submit(f"r{number}", source, draft=Draft(3, 4), pieces=pieces)
    found = counter.run()
    for number, answer in enumerate(expected):
        mine = found[f"r{number}"]
        assert mine.ended is not None and mine.ended.status is Status.finished
        assert mine.text == answer.text and mine.ended.tokens == len(answer.tokens)
        assert mine.ended.emission_layers == answer.emission_layers
        assert mine.tokens == (answer.tokens if pieces else ())
        assert all(spoke.tokens for spoke in mine.spokes)
    tokens = sum(len(answer.tokens) for answer in expected)
    ends = [each.ended for each in found.values() if each.ended is not None]
    assert 0 < sum(ended.accepted or 0 for ended in ends) < sum(ended.drafted or 0 for ended in ends)
    load, silent = counter.load, counter.silent
    assert load is not None and load.layers_executed == tokens * counter.engine.model.spec.num_layers
    assert (load.layers_skipped, load.backfilled_tokens) == (0, 0)
    assert sum(len(each.layers) for each in silent) == (0 if pieces else tokens)
    assert all(gap >= 0 for each in silent for gap in each.gaps)
    assert any(len(spoke.tokens) > 1 for each in found.values() for spoke in each.spokes) is pieces


def test_a_whole_answer_is_told_with_its_end_and_counted_step_by_step(at: Callable[..., Counter]) -> None:
    """As one that is told in pieces; also where a stop string cut it, and where it was given up."""
    found: dict[bool, dict[str, Told]] = {}
    totals: list[list[int]] = []
    for pieces in (True, False):
        counter = at(story_engine(max_batch=3))
        counter.submit("a", "w3", pieces=pieces)
        counter.submit("cut", "w3", pieces=pieces, stop=("three",))
        found[pieces] = counter.run()
        told = found[pieces]
        assert bool(told["a"].spokes) is pieces and bool(told["cut"].spokes) is pieces
        emitted = sorted(layer for each in told.values() if each.ended for layer in each.ended.emission_layers)
        silent = sorted(layer for each in counter.silent for layer in each.layers)
        gaps = [gap for each in counter.silent for gap in each.gaps]
        assert silent == ([] if pieces else emitted) and len(gaps) == (0 if pieces else len(emitted) - 2)
        assert all(0 < gap < 60 for gap in gaps) and counter.load is not None
        assert counter.load.layers_executed + counter.load.layers_skipped >= sum(emitted)
        sums = [counter.load.layers_executed, counter.load.layers_skipped, counter.load.backfilled_tokens]
        totals.append(sums)
    for name in ("a", "cut"):
        whole, told = found[False][name].ended, found[True][name].ended
        assert whole is not None and told is not None and whole.text == found[True][name].text
        assert (whole.tokens, whole.reason, whole.emission_layers) == (told.tokens, told.reason, told.emission_layers)
    assert totals[0] == totals[1] and found[False]["a"].text != found[False]["cut"].text
    counter.submit("gone", "w3", pieces=False)
    counter.step()
    counter.step()
    counter.desk.take(Abort("gone"))
    gone = counter.run()["gone"]
    assert gone.ended is not None and gone.ended.status is Status.cancelled and gone.ended.text


def test_a_step_is_one_batch_with_the_tokens_of_all_rows(at: Callable[..., Counter]) -> None:
    counter = at(story_engine())
    for name, source in {"a": "w3", "b": "w4", "c": "w3"}.items():
        counter.submit(name, source)
    batch = counter.step()
    assert [(event.id, event.tokens) for event in batch.events if isinstance(event, Spoke)] == [
        ("a", (5,)),
        ("b", (10,)),
        ("c", (5,)),
    ]
    assert (batch.load.running, batch.load.steps) == (3, 1)


PIECES = {5: "▁", 6: "?", 7: "▁the", 8: "▁q", 9: "u", 10: "i", 11: "c", 12: "k", 13: "▁fox"}
STORIES = {
    "lone": ([5, 6, 5, 6], "? ?"),
    "letters": ([7, 5, 8, 9, 10, 11, 12, 13], "the  quick fox"),
    "blank first": ([5, 7, 13], " the fox"),
}


@pytest.mark.parametrize("cut", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("story", STORIES)
def test_pieces_make_the_text_of_all_ids(story: str, cut: int | None, at: Callable[..., Counter]) -> None:
    """Lone blanks and single letters; also where the length cuts a word."""
    ids, text = STORIES[story]
    decoder = decoders.Metaspace()

    def to_text(tokens: Sequence[int]) -> str:
        return str(decoder.decode([PIECES[token] for token in tokens if token in PIECES]))

    assert to_text(ids) == text
    limit = len(ids) + 1 if cut is None else cut
    counter = at(Engine(replace(tiny_served(), to_text=to_text), max_batch=2))
    counter.submit("a", texts()[0], ignore_eos=True, max_tokens=limit)
    script = iter([*ids, 1])
    take = counter.engine._take
    counter.engine._take = lambda spoken: take(replace(spoken, tokens=[next(script)]))  # type: ignore[method-assign]
    mine = counter.run()["a"]
    assert mine.ended is not None and mine.tokens == (*ids, 1)[:limit]
    assert mine.text == to_text(mine.tokens)
    assert cut is not None or mine.text == text


@pytest.mark.parametrize("stop", [("three",), ("two", " four"), ("five",), ("e fo",)])
def test_pieces_hold_back_what_may_become_a_stop(stop: tuple[str, ...], at: Callable[..., Counter]) -> None:
    counter = at(story_engine())
    counter.submit("a", "w3", stop=stop)
    expected = story_engine().generate(["w3"], stop=stop)[0]
    mine = counter.run()["a"]
    assert mine.ended is not None and mine.text == expected.text and mine.ended.reason is expected.reason


def test_an_aborted_request_is_told_what_was_held_back_and_its_slot_is_free_after_one_step(
    at: Callable[..., Counter],
) -> None:
    counter = at(story_engine(max_batch=1))
    counter.submit("a", "w3", stop=("one two five",))
    counter.submit("b", "w4")
    counter.step()
    counter.desk.take(Abort("a"))
    batch = counter.step()
    assert batch.load.running == 1 and counter.engine.row("a") is None
    mine = counter.told["a"]
    assert mine.ended is not None and mine.ended.status is Status.cancelled and not mine.ended.expired
    assert mine.text == "one " and mine.ended.text == "one "
    assert counter.run()["b"].tokens == TEN
    counter.desk.take(Abort("a"))
    counter.desk.take(Abort("nobody"))
    assert counter.step().events == ()


@pytest.mark.parametrize("where", ["short", "long", "waiting", "running"])
@pytest.mark.parametrize("why", ["abort", "deadline"])
def test_a_request_ends_wherever_it_is(where: str, why: str, at: Callable[..., Counter]) -> None:
    counter = at(story_engine(max_batch=1), short=100)
    if where == "waiting":
        counter.submit("first", "w4")
        counter.step()
    deadline = time.perf_counter() + 0.05 if why == "deadline" else 0.0
    counter.submit("a", "w3 " + "w3 " * 40 * (where == "long"), deadline=deadline, arrived=1.0)
    if where in ("waiting", "running"):
        counter.step()
    row = counter.engine.row("a")
    assert (where if row is None else row.status.value) == where
    if why == "abort":
        counter.desk.take(Abort("a"))
    else:
        assert counter.desk.next_deadline == deadline
        while time.perf_counter() < deadline:
            pass
    counter.step()
    ended = counter.told["a"].ended
    assert ended is not None and (ended.status, ended.reason) == (Status.cancelled, Reason.cancelled)
    assert ended.expired is (why == "deadline") and ended.timing.arrived == 1.0 and ended.timing.ended > 1.0
    assert counter.engine.row("a") is None and counter.desk.next_deadline == float("inf")
    counter.run()
    counter.submit("a", "w3")  # the name is free again, and nothing of the first is left
    counter.told.clear()
    assert counter.run()["a"].tokens == ONE


def test_a_request_that_is_late_from_the_first_is_never_run(at: Callable[..., Counter]) -> None:
    counter = at(story_engine())
    counter.submit("late", "w3", deadline=time.perf_counter() - 1)
    counter.submit("in time", "w3", deadline=time.perf_counter() + 60)
    found = counter.run()
    assert found["late"].ended is not None and found["late"].ended.expired and not found["late"].spokes
    assert found["in time"].tokens == ONE


@pytest.mark.parametrize(
    ("source", "options", "kind", "said"),
    [
        ("w3 \ud800", {}, "DataError", "lone surrogate"),
        ((5, 20), {}, "DataError", "id number 1 is none of the vocabulary"),
        (b"w3", {}, "DataError", "a text or a sequence of ids, got bytes"),
        ("w3", {"max_tokens": LENGTH + 1}, "ConfigError", "max_tokens=8 is above"),
        ("w3 " * 20, {"truncate": False}, "DataError", "the text has 21 tokens, the model takes 16"),
        ("w3 " * 200, {"truncate": False}, "DataError", "the text has 201 tokens, the model takes 16"),
        ("w3", {"tolerance": 0.05}, "CalibrationError", "no calibration"),
        ("w3", {"policy": Static(9)}, "ConfigError", "depth 9 lies outside"),
    ],
)
def test_what_cannot_be_served_is_refused_by_kind_and_in_one_line(
    source: Any, options: dict[str, Any], kind: str, said: str, at: Callable[..., Counter]
) -> None:
    counter = at(story_engine(), short=100)
    counter.submit("a", source, **options)
    counter.submit("b", "w4")
    found = counter.run()
    refused = found["a"].refused
    assert refused is not None and refused.kind == kind
    assert said in refused.message and "\n" not in refused.message and "w3" not in refused.message
    assert found["b"].tokens == TEN


def test_what_nobody_foresaw_is_refused_without_its_words(
    at: Callable[..., Counter], monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = at(story_engine())

    def broken(policy: Any, name: str) -> None:
        raise RuntimeError("of the secret prompt")

    monkeypatch.setattr(counter.engine._intake, "check", broken)
    counter.submit("a", "w3")
    assert counter.run()["a"].refused == Refused("a", "CalmError", "the request could not be taken")


def test_the_queue_is_full_with_texts_that_are_no_ids_yet(at: Callable[..., Counter]) -> None:
    counter = at(story_engine(max_batch=1, max_waiting=3), short=4)
    for number in range(3):
        counter.submit(f"r{number}", "w3" if number else "w3 w3 w3")
    counter.submit("one too many", "w3")
    counter.submit("ids", (3, 1))  # they are in the engine's queue at once
    assert counter.step().load.waiting <= 3
    found = counter.run()
    refused = found.pop("one too many").refused
    assert refused is not None and refused.kind == "QueueFull" and "3 requests wait already" in refused.message
    assert all(mine.tokens == ONE for mine in found.values()) and len(found) == 4


def test_running_rows_do_not_wait_for_more_than_one_text(at: Callable[..., Counter]) -> None:
    engine = story_engine()
    to_ids = engine.model.to_ids
    read: list[str] = []
    engine.model = replace(engine.model, to_ids=lambda text, cut=True: [read.append(text), *to_ids(text)][1:])  # type: ignore[func-returns-value]
    counter = at(engine, short=30)
    counter.submit("a", "w3")
    counter.step()
    for number in range(4):
        counter.submit(f"r{number}", "w4 " * 10)
    read.clear()
    counter.step()
    assert len(read) == 1
    for number in range(4):
        counter.submit(f"s{number}", "w4")  # of these there are several in as many characters
    counter.run()
    counter.submit("idle", "w4 " * 10)
    counter.submit("too", "w4 " * 10)
    read.clear()
    counter.step()
    assert len(read) == 2  # nobody waits


def test_a_poison_request_fails_alone_and_in_our_words(at: Callable[..., Counter]) -> None:
    expected = engine_of(BatchRule.own, max_batch=6, prefill_rows=4).generate([texts()[number] for number in SOURCES])
    counter = at(engine_of(BatchRule.own, bad_model("raise"), max_batch=6, prefill_rows=4))
    for number in SOURCES:
        counter.submit(f"r{number}", texts()[number])
    counter.submit("poison", f"w7 w{BAD} w8")
    found = counter.run()
    ended = found["poison"].ended
    assert ended is not None and (ended.status, ended.error) == (Status.failed, FAILED)
    assert [found[f"r{number}"].tokens for number in SOURCES] == [answer.tokens for answer in expected]


def test_an_answer_without_a_text_fails_alone(at: Callable[..., Counter]) -> None:
    model = tiny_served()
    bad = Engine(model, max_batch=4).generate([texts()[0]])[0].tokens

    def to_text(ids: Sequence[int]) -> str:
        if tuple(ids)[:3] == bad[:3]:
            raise RuntimeError("no text")
        return model.to_text(ids)

    expected = Engine(model, max_batch=4).generate(texts()[1:4])
    counter = at(Engine(replace(model, to_text=to_text), max_batch=4))
    for number in range(4):
        counter.submit(f"r{number}", texts()[number])
    found = counter.run()
    ended = found["r0"].ended
    assert ended is not None and ended.status is Status.failed and len(found["r0"].tokens) == 2
    assert [found[f"r{number}"].text for number in (1, 2, 3)] == [answer.text for answer in expected]


def raising(engine: Engine, turns: set[int], after: bool = False) -> None:
    """The engine's step raises in these turns; ``after`` it has done its work, whose answers are lost then."""
    real, turn = engine.step, iter(range(10**6))

    def step() -> Step:
        now = next(turn)
        if now in turns and not after:
            raise RuntimeError("of the secret prompt")
        done = real()
        if now in turns:
            raise RuntimeError("of the secret prompt")
        return done

    engine.step = step  # type: ignore[method-assign]


def test_a_step_that_raises_costs_its_running_rows_and_the_engine_goes_on(at: Callable[..., Counter]) -> None:
    counter = at(story_engine(max_batch=2))
    raising(counter.engine, {1, 2})  # twice in a row is not enough to give up
    for number in range(4):
        counter.submit(f"r{number}", "w3")
    found = counter.run()
    for name in ("r0", "r1"):
        ended = found[name].ended
        assert ended is not None and (ended.status, ended.error) == (Status.failed, FAILED)
        assert found[name].tokens == ONE[:1]
    assert found["r2"].tokens == found["r3"].tokens == ONE
    assert not counter.engine.slots.taken


def test_answers_that_a_raising_step_had_made_are_not_lost(at: Callable[..., Counter]) -> None:
    counter = at(story_engine(max_batch=2))
    raising(counter.engine, {2}, after=True)
    counter.submit("a", "w4")
    counter.submit("b", "w3")
    found = counter.run()
    first, second = found["a"].ended, found["b"].ended
    assert first is not None and first.status is Status.finished and found["a"].text == "ten eleven"
    assert second is not None and second.status is Status.failed


def test_steps_that_raise_one_after_another_end_it(at: Callable[..., Counter]) -> None:
    counter = at(story_engine())
    raising(counter.engine, set(range(1, PATIENCE + 1)))
    counter.submit("a", "w3")
    for _ in range(PATIENCE):
        counter.submit(f"r{_}", "w3")
        counter.step()
    with pytest.raises(EngineBroken, match="raised"):
        counter.step()


def test_it_leaves_at_once_or_when_everything_has_ended(at: Callable[..., Counter]) -> None:
    counter = at(story_engine(), short=1)
    counter.submit("a", "w3")
    counter.step()
    assert not counter.desk.leaving
    counter.desk.take(Stop(drain=True))
    assert not counter.desk.leaving
    counter.run()
    assert counter.desk.leaving
    counter = at(story_engine())
    counter.submit("a", "w3")
    counter.desk.take(Stop(drain=False))
    assert counter.desk.leaving
