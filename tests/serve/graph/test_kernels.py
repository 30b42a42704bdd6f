"""Every kernel beside its twin in plain torch, by Triton's interpreter where there is no GPU."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; the tests of its kernels need it")
if torch.cuda.is_available():
    pytest.skip("on a GPU eval.gpu_check compares the kernels", allow_module_level=True)

from calm.config import BatchRule, Measure, RunnerName, Stepping, Weights  # noqa: E402
from calm.policies import Static  # noqa: E402
from calm.rules import Rule  # noqa: E402
from eval.gpu_kernels import RULES  # noqa: E402
from serve import backend  # noqa: E402
from serve.engine import Engine  # noqa: E402
from serve.graph.frame import GIVEN, Frame  # noqa: E402
from serve.graph.ops import TorchOps  # noqa: E402
from serve.graph.program import Program  # noqa: E402
from serve.graph.tiles import Block, Tile, Tiles  # noqa: E402
from serve.graph.triton_ops import TritonOps  # noqa: E402

from ..models import SHAPES, confident, engine_of, texts, tiny_served, usual  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreted")
BUCKET, ROWS = 6, 5  # one row is padding
MEASURES = {
    "softmax": [Measure.softmax],
    "state": [Measure.state],
    "classifier": [Measure.classifier],
    "max_prob-entropy": [Measure.max_prob, Measure.entropy],
    "agreement": [Measure.agreement],
    "all": list(Measure),
}
WITHIN = ("hidden", "previous", "confidence", "words", "run")  # what the rows that run leave behind in a layer
Snapshot = dict[str, Tensor]


class Even(Tiles):
    """The same for every launch."""

    def __init__(self, n: int, k: int, words: int, keys: int, rows: int = 16) -> None:
        self._product, self._words, self._keys = Tile(rows, n, k), Tile(rows, words, k), Block(keys)

    def product(self, *_: Any) -> Tile:
        return self._product

    def words(self, *_: Any) -> Tile:
        return self._words

    def keys(self, *_: Any) -> Block:
        return self._keys


SMALL = Even(n=16, k=16, words=32, keys=4)  # more tiles than one of everything
LARGE = Even(n=64, k=64, words=128, keys=32, rows=64)


class Beside:
    """One frame in the middle of a step, and both ways to go on from there."""

    def __init__(
        self,
        shape: str,
        measures: list[Measure],
        tiles: Tiles = SMALL,
        before: int = 2,
        cross: Weights = Weights.model,
        bucket: int = BUCKET,
    ) -> None:
        model = tiny_served(shape)
        self.engine: Engine = engine_of(
            BatchRule.own, model, runner=RunnerName.graph, max_batch=bucket, buckets=(bucket,), poison=False,
            cross_kv=cross,
        )  # fmt: skip
        for number, text in enumerate(texts(max(1, bucket - 1))):
            measure = measures[number % len(measures)]
            self.engine.add_request(text, policy=confident(measure, usual(measure, shape)), ignore_eos=True)
        for _ in range(before):  # rows stand at their third position
            self.engine.step()
        self.machine = self.engine.machine
        self.torch: TorchOps = self.machine.ops
        self.triton = TritonOps(self.machine.parts, bucket, tiles)
        rows = self.engine._running
        self.rows = len(rows)
        self.frame: Frame = self.machine.frame(bucket)
        self.machine.hand_over(self.frame, rows, [row.step for row in rows], [False] * len(rows)).send(self.frame)
        self.asked = tuple(sorted(self.machine.parts.exits.present))
        self.triton.begin(self.frame)

    def state(self) -> Snapshot:
        slots = self.engine.slots
        kept = {each.name: getattr(self.frame, each.name) for each in fields(self.frame)}
        return kept | {name: getattr(slots, name) for name in ("keys", "values", "position", "token")}

    def after(self, act: Callable[[], Any]) -> Snapshot:
        """Everything that it may have changed; as it was before, afterwards."""
        before = {name: tensor.clone() for name, tensor in self.state().items()}
        act()
        found = {name: tensor.clone() for name, tensor in self.state().items()}
        for name, tensor in self.state().items():
            tensor.copy_(before[name])
        return found

    def alike(self, act: Callable[[TorchOps], Any], *skip: str) -> Snapshot:
        """Both do the same to all rows that are there."""
        expected = self.after(lambda: act(self.torch))
        found = self.after(lambda: act(self.triton))
        nobody = self.engine.slots.padding
        for name, tensor in expected.items():
            mine, theirs = found[name], tensor
            if name in skip:
                continue
            if name in ("keys", "values"):
                mine, theirs = mine[:, :nobody], theirs[:, :nobody]
            elif name in ("position", "token"):
                mine, theirs = mine[:nobody], theirs[:nobody]
            elif name in WITHIN:
                runs = self.frame.runs
                mine, theirs = mine[runs], theirs[runs]
            elif name == "said":
                mine, theirs = mine[:, : self.rows], theirs[:, : self.rows]
            torch.testing.assert_close(
                mine, theirs, rtol=1e-4, atol=2e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
        return expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("tiles", [SMALL, Tiles(), LARGE], ids=["small tiles", "usual tiles", "large tiles"])
@pytest.mark.parametrize("cross", Weights, ids=lambda kind: kind.value)
def test_a_layer(shape: str, holds: bool, tiles: Tiles, cross: Weights) -> None:
    beside = Beside(shape, [Measure.state], tiles, cross=cross)
    first = beside.alike(lambda ops: ops.layer(1, beside.frame, holds), "previous")
    assert not torch.equal(first["hidden"][:ROWS], beside.frame.hidden[:ROWS])
    beside.frame.crossed[1] = True  # held, or not
    beside.triton.who_runs(beside.frame, beside.frame.live & (torch.arange(BUCKET) != 3))
    beside.alike(lambda ops: ops.layer(2, beside.frame, holds))


@pytest.mark.parametrize("tiles", [SMALL, LARGE], ids=["small tiles", "large tiles"])
def test_states_are_kept_where_they_are_compared_with_later_ones(tiles: Tiles) -> None:
    beside = Beside("v1.1", [Measure.state], tiles)
    frame = beside.frame
    assert not torch.equal(frame.previous[:ROWS], frame.hidden[:ROWS])
    for keeps in (False, True):
        before = (frame.hidden if keeps else frame.previous)[:ROWS].clone()
        for ops in (beside.torch, beside.triton):
            found = beside.after(lambda ops=ops, keeps=keeps: ops.layer(1, frame, True, keeps))
            assert torch.equal(found["previous"][:ROWS], before)
    asked: list[bool] = []
    layer = beside.triton.layer
    beside.triton.layer = lambda *rest, keeps: (asked.append(keeps), layer(*rest, keeps))[1]  # type: ignore
    for measures in ((), ((Measure.softmax, 0),), ((Measure.softmax, 0), (Measure.state, 0))):
        beside.after(Program(beside.triton, frame, RULES[0], measures).whole)
    checked = [layer in beside.machine.parts.checked for layer in range(1, 5)]
    assert asked == [False] * 8 + checked and any(checked)


@pytest.mark.parametrize("measures", MEASURES.values(), ids=MEASURES)
@pytest.mark.parametrize(("shape", "tiles"), [("v1.1", SMALL), ("v1.0-tied", LARGE)], ids=["v1.1", "v1.0-tied"])
def test_confidences(shape: str, measures: list[Measure], tiles: Tiles) -> None:
    beside = Beside(shape, measures, tiles)
    frame = beside.frame
    for layer in (1, 2, 3):
        beside.triton.layer(layer, frame, True)
        found = beside.alike(lambda ops, layer=layer: ops.confide(layer, frame, beside.asked, True))
        beside.triton.confide(layer, frame, beside.asked, True)
        asked = found["confidence"][:ROWS]
        assert asked.isfinite().any() or (layer == 1 and measures == [Measure.state])


@pytest.mark.parametrize(
    ("shape", "measure"),
    [("v1.1", Measure.softmax), ("v1.0-tied", Measure.agreement), ("deeper-decoder", Measure.state)],
)
def test_a_bucket_of_one_row(shape: str, measure: Measure) -> None:
    """Its products are sums of their own."""
    beside = Beside(shape, [measure], Tiles(), bucket=1)
    frame, nothing = beside.frame, torch.zeros(1, dtype=torch.long)
    assert beside.rows == frame.size == 1
    for layer in (1, 2):
        beside.alike(lambda ops, layer=layer: ops.layer(layer, frame, True))
        beside.triton.layer(layer, frame, True)
        beside.alike(lambda ops, layer=layer: ops.confide(layer, frame, beside.asked, True))
        beside.triton.confide(layer, frame, beside.asked, True)
    assert torch.equal(beside.torch.words(frame), beside.triton.words(frame))
    beside.alike(lambda ops: ops.backfill(frame, nothing))
    frame.crossed.fill_(True)  # held
    held = beside.alike(lambda ops: ops.layer(3, frame, True))
    assert torch.equal(held["hidden"], frame.hidden)
    beside.triton.who_runs(frame, torch.zeros(1, dtype=torch.bool))
    before = {name: tensor.clone() for name, tensor in beside.state().items()}
    beside.triton.layer(3, frame, False)
    beside.triton.confide(3, frame, beside.asked, False)
    for name, tensor in beside.state().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bucket", [1, 2, 19])
def test_whole_steps_of_other_buckets(bucket: int) -> None:
    beside = Beside("v1.1", list(Measure), Tiles(), before=-(-bucket // 4) + 1, bucket=bucket)
    assert beside.rows == max(1, bucket - 1)
    beside.alike(lambda ops: Program(ops, beside.frame, RULES[bucket % 2], beside.asked).whole(), *WITHIN)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.value)
def test_who_crosses_and_who_runs_on(rule: Rule) -> None:
    """Random flags, many times; a step that has ended stays ended."""
    beside, draw = Beside("v1.1", [Measure.softmax]), torch.Generator().manual_seed(3)
    frame, seen = beside.frame, set()
    for number in range(60):
        layer = 1 + number % 4
        frame.crossed.copy_((torch.rand(BUCKET, generator=draw) < 0.3) & frame.live)
        frame.crossing.copy_(torch.randint(1, 5, (BUCKET,), generator=draw))
        frame.depths.copy_(torch.randint(0, 5, (BUCKET,), generator=draw))
        frame.confidence.copy_(torch.rand(BUCKET, generator=draw))
        frame.confidence[number % BUCKET] = float("nan")
        frame.thresholds.copy_(torch.rand(BUCKET, 4, generator=draw))
        frame.stopped.fill_(number % 7 == 0)
        frame.layers.fill_(number % 3)
        beside.torch.who_runs(frame, frame.live & (torch.rand(BUCKET, generator=draw) < 0.8))
        confident_layer = number % 5 != 0
        found = beside.alike(lambda ops, at=layer, on=confident_layer: ops.settle(at, frame, rule, on))
        assert int(found["active"]) == int(found["runs"].sum())
        seen.add((bool(found["stopped"]), int(found["active"]) > 0))
    assert {(True, False), (False, True)} <= seen


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, which the interpreter counts with
def test_words_and_rows_without_a_number() -> None:
    beside = Beside("v1.1", [Measure.softmax])
    frame = beside.frame
    beside.triton.layer(1, frame, True)
    assert torch.equal(beside.torch.words(frame)[:ROWS], beside.triton.words(frame)[:ROWS])
    frame.hidden[2] = float("nan")
    frame.hidden[4] = float("inf")
    mine, theirs = beside.triton.words(frame)[:ROWS], beside.torch.words(frame)[:ROWS]
    assert torch.equal(mine, theirs) and mine[2] == mine[4] == -1 and (mine[[0, 1, 3]] >= 0).all()


def test_of_equal_words_the_first_wins_in_and_across_tiles() -> None:
    model = tiny_served("v1.1")
    head = model.spec.tensors["head"].clone()
    head[7, 3] = head[30, 5] = 9.0  # of rows that are one number each, so that no sum is rounded
    head[70] = head[7]
    head[9] = head[7]
    same = replace(model, spec=replace(model.spec, tensors={**model.spec.tensors, "head": head}))
    engine = engine_of(BatchRule.own, same, runner=RunnerName.graph, max_batch=2, buckets=(2,))
    ops = TritonOps(engine.machine.parts, 2, SMALL)
    frame = engine.machine.frame(2)
    frame.live.fill_(True)
    frame.hidden.zero_()
    frame.hidden[[0, 1], [3, 5]] = 1.0
    ops._live.fill_(2)
    assert ops.words(frame).tolist() == engine.machine.ops.words(frame).tolist() == [7, 30]
    frame.measures.fill_(list(Measure).index(Measure.softmax))
    ops.who_runs(frame, frame.live)
    ops.confide(1, frame, ((Measure.softmax, 0),), True)
    assert frame.confidence.tolist() == [0.0, pytest.approx(0.5, abs=0.5)]  # the second best is its twin
    assert frame.confidence[1] > 0


@pytest.mark.parametrize("measures", [[Measure.agreement], list(Measure)], ids=["agreement", "all"])
def test_agreement_counts_by_each_rows_own_run_length(measures: list[Measure]) -> None:
    """Words that change and words that stay, over three checks; rows of one step ask for runs of 2, 3 and 4."""
    beside, draw = Beside("v1.1", measures), torch.Generator().manual_seed(8)
    frame, index = beside.frame, list(Measure).index(Measure.agreement)
    frame.measures.fill_(index)
    frame.run_lengths.copy_(torch.tensor([2, 3, 4, 2, 3, 0]))
    others = tuple((each, 0) for each in measures if each is not Measure.agreement)
    asked = ((Measure.agreement, 2), (Measure.agreement, 3), (Measure.agreement, 4), *others)
    frame.words.fill_(-7)  # of another step
    frame.run.fill_(9)
    runs = []
    for layer in (1, 2, 3):
        told = beside.alike(lambda ops, layer=layer: ops.confide(layer, frame, asked, True))
        beside.triton.confide(layer, frame, asked, True)
        runs.append(told["run"][:ROWS].tolist())
        expected = (told["run"][:ROWS] / frame.run_lengths[:ROWS]).clamp(max=1.0)
        assert torch.equal(frame.confidence[:ROWS], expected)
        frame.hidden[0] = torch.randn(frame.hidden.shape[1], generator=draw)
    assert runs[0] == [1] * ROWS and runs[2][1:] == [3] * (ROWS - 1) and runs[2][0] < 3


@pytest.mark.parametrize(
    "asked", [(Measure.state,), (Measure.softmax,), (Measure.state, Measure.softmax), tuple(Measure)]
)
def test_rows_that_are_asked_nothing_have_no_confidence(asked: tuple[Measure, ...]) -> None:
    """Whatever an earlier layer or step has left there; rows that do not run keep it."""
    beside = Beside("v1.1", list(Measure))
    frame, index = beside.frame, [list(Measure).index(each) for each in asked]
    frame.measures.copy_(torch.tensor([index[0], -1, index[-1], -1, index[0], -1]))
    frame.run_lengths.fill_(0)
    beside.triton.who_runs(frame, torch.tensor([True, True, True, True, False, False]))
    beside.triton.layer(2, frame, True)
    frame.confidence.fill_(0.75)
    found = beside.alike(lambda ops: ops.confide(2, frame, tuple((each, 0) for each in asked), True))
    assert found["confidence"][:4].isnan().tolist() == [False, True, False, True]
    beside.triton.confide(2, frame, tuple((each, 0) for each in asked), True)
    assert frame.confidence[4] == 0.75


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")  # numpy's
def test_rows_without_a_number_are_sure_of_nothing() -> None:
    beside = Beside("v1.1", list(Measure))
    frame = beside.frame
    spoilt = torch.tensor([False, True, False, True, False, False])
    for measure in Measure:
        frame.measures.fill_(list(Measure).index(measure))
        beside.triton.layer(2, frame, True)
        asked = ((measure, 0),)
        calm = beside.alike(lambda ops, asked=asked: ops.confide(2, frame, asked, True))["confidence"]
        kept = frame.hidden.clone()
        frame.hidden[1], frame.hidden[3] = float("nan"), float("inf")
        found = beside.after(lambda asked=asked: beside.triton.confide(2, frame, asked, True))["confidence"]
        frame.hidden.copy_(kept)
        torch.testing.assert_close(found[:ROWS][~spoilt[:ROWS]], calm[:ROWS][~spoilt[:ROWS]], rtol=1e-4, atol=2e-5)
        if measure is not Measure.agreement:  # it counts that they say nothing again
            assert not (found[spoilt] < 1.0).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")  # numpy's
def test_rows_of_any_size_and_rows_without_numbers_beside_each_other() -> None:
    """Squares and products are summed before they are scaled: neither large rows nor small ones nor zeros are lost."""
    beside = Beside("v1.1", [Measure.softmax])
    frame, sizes = beside.frame, torch.tensor([1e4, 1e-6, 0.0, 1e12, 1.0, 1.0])
    frame.hidden.mul_(sizes[:, None])
    calm = beside.alike(lambda ops: frame.said[0].copy_(ops.words(frame)), "said")
    assert calm["hidden"].isfinite().all()
    assert torch.equal(beside.triton.words(frame)[:ROWS], beside.torch.words(frame)[:ROWS])
    nothing = torch.zeros(BUCKET, dtype=torch.long)
    beside.alike(lambda ops: ops.backfill(frame, nothing))
    found = beside.after(lambda: beside.triton.backfill(frame, nothing))
    layer = beside.after(lambda: beside.triton.layer(1, frame, True))
    frame.hidden[4] = float("nan")
    spoilt = beside.after(lambda: beside.triton.backfill(frame, nothing))
    other = beside.after(lambda: beside.triton.layer(1, frame, True))
    slots, mine = frame.slots[:4], int(frame.slots[4])
    for name in ("keys", "values"):
        assert torch.equal(spoilt[name][:, slots], found[name][:, slots])
        assert spoilt[name][:, mine, :, frame.steps[4]].isnan().all()
    assert torch.equal(other["hidden"][:4], layer["hidden"][:4]) and other["hidden"][4].isnan().all()


def test_weights_hold_their_norms_gains_and_the_model_keeps_its_own() -> None:
    beside = Beside("v1.1", [Measure.softmax])
    tensors, packed = beside.machine.parts.spec.tensors, beside.triton._packed
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, layer, norm, found in (
        ("self_k", 3, "3.self_norm", packed.qkv[2].chunk(3)[1]), ("cross_q", 1, "1.cross_norm", packed.cross_q[0]),
        ("ffn_gate", 2, "2.ffn_norm", packed.inner[1][0::2]), ("ffn_up", 4, "4.ffn_norm", packed.inner[3][1::2]),
    ):  # fmt: skip
        torch.testing.assert_close(found, tensors[f"{layer}.{name}"] * tensors[norm], rtol=0, atol=0)
    torch.testing.assert_close(packed.head, tensors["head"] * tensors["final_norm"], rtol=0, atol=0)
    plain = Beside("v1.0-tied", [Measure.softmax])
    up, gain = (plain.machine.parts.spec.tensors[f"2.{name}"] for name in ("ffn_up", "ffn_norm"))
    torch.testing.assert_close(plain.triton._packed.inner[1], up * gain, rtol=0, atol=0)
    packed.head.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_backfill_fills_what_each_row_lacks_and_nothing_else() -> None:
    beside = Beside("v1.1", [Measure.softmax])
    executed = torch.tensor([1, 4, 2, 3, 1, 0])
    before = beside.engine.slots.keys.clone()
    found = beside.alike(lambda ops: ops.backfill(beside.frame, executed))
    changed = (found["keys"] != before).any(dim=(2, 3, 4))  # (layers, slots)
    for row, slot in enumerate(beside.frame.slots[:ROWS].tolist()):
        assert changed[:, slot].tolist() == [layer > int(executed[row]) for layer in range(1, 5)]


def test_a_step_begins_with_what_it_is_given_or_where_its_slot_was_left() -> None:
    beside = Beside("v1.1", list(Measure))
    frame, given = beside.frame, dict(zip(GIVEN, beside.frame.given, strict=True))
    given["steps"].copy_(torch.tensor([1, 5, 2, 0, 9, 0]))
    given["tokens"].copy_(torch.tensor([7, 3, 11, 0, 90, 0]))
    given["chained"].copy_(torch.tensor([0, 1, 0, 1, 0, 0]))
    beside.engine.slots.position[:BUCKET] = torch.tensor([3, 4, 5, 6, 7, 8])
    beside.engine.slots.token[:BUCKET] = torch.tensor([30, 40, 50, 60, 70, 80])
    frame.stopped.fill_(True)
    frame.crossed.fill_(True)
    found = beside.alike(lambda ops: ops.begin(frame), "previous", "confidence", "words")
    assert found["steps"][:ROWS].tolist() == [1, 4, 2, 6, 9] and found["tokens"][:ROWS].tolist() == [7, 40, 11, 60, 90]
    assert int(found["active"]) == ROWS and not found["stopped"] and not found["crossed"].any()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.value)
def test_rows_speak_and_their_slots_know_what_comes_next(rule: Rule) -> None:
    beside, draw = Beside("v1.1", [Measure.softmax]), torch.Generator().manual_seed(5)
    frame = beside.frame
    for layers in (1, 2, 4):
        frame.layers.fill_(layers)
        frame.crossing.copy_(torch.randint(1, 5, (BUCKET,), generator=draw))
        frame.crossed.copy_(frame.crossing <= layers)
        beside.machine.parts.exits.fills[frame.slots[:ROWS]] = torch.rand(ROWS, generator=draw) < 0.5
        found = beside.alike(lambda ops: ops.speak(frame, rule))
        assert found["position"][frame.slots[:ROWS]].tolist() == (frame.steps[:ROWS] + 1).tolist()
        assert found["token"][frame.slots[:ROWS]].tolist() == found["said"][0, :ROWS].tolist()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.value)
def test_a_whole_step(rule: Rule) -> None:
    beside = Beside("v1.1", list(Measure))
    found = beside.alike(lambda ops: Program(ops, beside.frame, rule, beside.asked).whole(), *WITHIN)
    assert len(set(found["said"][1, :ROWS].tolist())) > 1


def test_nobody_left_costs_launches_only() -> None:
    """After the rule has ended a step no kernel changes a number of its rows."""
    beside = Beside("v1.1", [Measure.softmax])
    frame = beside.frame
    frame.depths.fill_(1)
    beside.triton.layer(1, frame, True)
    beside.triton.settle(1, frame, RULES[0], False)
    assert int(frame.active) == 0
    before = {name: tensor.clone() for name, tensor in beside.state().items()}
    beside.triton.layer(2, frame, True)
    beside.triton.settle(2, frame, RULES[0], False)
    for name, tensor in beside.state().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


def test_nobody_launches_ahead_unless_it_is_chosen_and_no_branch_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = engine_of(BatchRule.own, runner=RunnerName.graph, max_batch=2).machine.parts
    monkeypatch.setattr(backend, "step_kernels", lambda device: "triton")
    for chosen in (False, True):
        ops = [backend._step_ops(parts, 2, stepping) for stepping in Stepping]
        ahead = [isinstance(each, TritonOps) and each._turn["AHEAD"] for each in ops]
        assert ahead == [chosen and stepping is not Stepping.branches for stepping in Stepping]
        monkeypatch.setattr(backend, "LAUNCHED_AHEAD", True)


def test_an_engine_of_kernels_says_what_the_twins_say() -> None:
    policies = {name: confident(measures[0], usual(measures[0])) for name, measures in MEASURES.items()}
    policies["static"] = Static(2)  # type: ignore[assignment]
    asked = list(zip(policies.items(), texts(len(policies)), strict=True))

    def answers(swap: bool) -> list[Any]:
        engine = engine_of(
            BatchRule.compact, runner=RunnerName.graph, max_batch=4, buckets=(4,), poison=True, overlap=True
        )
        if swap:
            engine.machine.ops = TritonOps(engine.machine.parts, 4, Even(n=32, k=32, words=128, keys=16))
        for (name, policy), text in asked:
            engine.add_request(text, policy=policy, name=name, max_tokens=3)
        found = []
        while engine.has_work:
            found += engine.step().answers
        return sorted((each.id, each.tokens, each.crossing_layers) for each in found)

    assert answers(swap=True) == answers(swap=False)
