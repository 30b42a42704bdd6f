"""Heads by themselves: int8 screening against the full head, rows against their mates, rows that are no numbers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calm.confidence import CONFIDENCE, LayerView
from calm.config import BatchRule, Head, Measure
from calm.decode_batch import BatchDecoder
from calm.layer_math import before_head
from calm.models.t5 import export_spec
from calm.policies import Replay
from serve import screen
from serve.engine import Engine
from serve.heads import NOTHING, CandidateHead, FullHead, HeadState, ScreenedHead, Vocabulary, make_head
from serve.runner import EagerRunner
from serve.screen import Screen, int_product, quantised, slow_int_product
from serve.slots import Slots
from tests.scripted import early_exit, random_t5

from .models import COUPLED, EXACT, confident, rows, texts, tiny

BASE = export_spec(early_exit(random_t5(decoder_layers=1)))
DTYPES = [torch.float32, torch.bfloat16]


def runner(words: Tensor) -> EagerRunner:
    """A runner whose head is ``words`` (V, d_model) and whose final norm changes lengths only."""
    vocabulary, width = words.shape
    tensors = {**BASE.tensors, "head": words, "final_norm": torch.ones(width, dtype=words.dtype)}
    spec = replace(BASE, d_model=width, vocab_size=vocabulary, tensors=tensors)
    return EagerRunner(spec, Slots(spec, 1, 2, 2, torch.device("cpu")))


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def emitted(head: Vocabulary, hidden: Tensor, state: HeadState | None = None, early: bool = False) -> list[int]:
    return head.emit(hidden, torch.full((len(hidden),), early), state or HeadState()).tolist()


def twins(count: int, width: int, seed: int, apart: float = 1e-3) -> Tensor:
    """Words that differ by less than a step of int8, which is about 0.02."""
    word = drawn(1, width, seed=seed)
    return word + apart * drawn(count, width, seed=seed + 1)


# screening


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 33),
    width=st.sampled_from([1, 7, 32, 100]),
    vocabulary=st.sampled_from([2, 3, 20, 97]),
    k=st.sampled_from([2, 5, 200]),
    crowded=st.booleans(),
    outlier=st.sampled_from([1.0, 100.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_screened_head_emits_the_full_heads_argmax(
    seed: int, count: int, width: int, vocabulary: int, k: int, crowded: bool, outlier: float, dtype: torch.dtype
) -> None:
    words = (twins(vocabulary, width, seed) if crowded else drawn(vocabulary, width, seed=seed)).to(dtype)
    words[0] = 0.0
    words[-1] = words[vocabulary // 2]  # of equals the first is the argmax
    hidden = drawn(count, width, seed=seed + 2, dtype=dtype)
    hidden[:, 0] *= outlier
    hidden[-1] = 0.0  # every logit is the same
    served = runner(words)
    assert emitted(ScreenedHead(served, k), hidden) == emitted(FullHead(served), hidden)


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_that_int8_puts_in_order_need_no_full_head(dtype: torch.dtype) -> None:
    words = drawn(300, 64, seed=0, dtype=dtype)
    hidden = words[torch.arange(0, 300, 20)] + 0.3 * drawn(15, 64, seed=1, dtype=dtype)
    head, state = ScreenedHead(runner(words), 8), HeadState()
    assert emitted(head, hidden, state) == list(range(0, 300, 20))
    assert state.fallbacks == 0


def test_a_wrong_int8_order_among_the_rescored_is_put_right() -> None:
    words = drawn(200, 64, seed=2)
    words[:6] = twins(6, 64, seed=3, apart=0.01)
    hidden = words[:1] + 0.1 * drawn(12, 64, seed=4)
    served, state = runner(words), HeadState()
    expected = emitted(FullHead(served), hidden)
    assert emitted(ScreenedHead(served, 8), hidden, state) == expected
    assert state.fallbacks == 0
    normed = before_head(served.spec, hidden)
    assert Screen(words).approximate(quantised(normed)).argmax(dim=-1).tolist() != expected


def test_rows_whose_winner_int8_hides_take_the_full_head() -> None:
    words = drawn(200, 64, seed=5)
    words[:60] = twins(60, 64, seed=6)
    hidden = torch.cat([words[:1] + 0.1 * drawn(9, 64, seed=7), words[100:103]])  # the last three are clear
    served, state = runner(words), HeadState()
    normed = before_head(served.spec, hidden)
    expected = emitted(FullHead(served), hidden)
    chosen = Screen(words).approximate(quantised(normed)).topk(4).indices
    assert any(word not in ids for word, ids in zip(expected, chosen.tolist(), strict=True))
    assert emitted(ScreenedHead(served, 4), hidden, state) == expected
    assert state.fallbacks == 9


def test_near_ties_are_left_to_the_full_head() -> None:
    """Sums of the same numbers in another order: which is largest is a matter of rounding."""
    generator, values = torch.Generator().manual_seed(24), drawn(64, seed=25)
    words = torch.stack([values[torch.randperm(64, generator=generator)] for _ in range(40)])
    hidden = torch.ones(7, 64) * torch.arange(1, 8)[:, None]
    served, state = runner(words), HeadState()
    assert emitted(ScreenedHead(served, 64), hidden, state) == emitted(FullHead(served), hidden)
    assert state.fallbacks == 7


def test_of_logits_that_bf16_makes_equal_the_smallest_id_wins_without_the_full_head() -> None:
    words = drawn(100, 64, seed=26, dtype=torch.bfloat16)
    words[50:] = words[:50]
    hidden = words[torch.arange(60, 70)]
    served, state = runner(words), HeadState()
    assert emitted(ScreenedHead(served, 8), hidden, state) == list(range(10, 20))
    assert emitted(FullHead(served), hidden) == list(range(10, 20))
    assert state.fallbacks == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.sampled_from([5, 64, 300]), dtype=st.sampled_from(DTYPES))
def test_int8_logits_and_margins_keep_within_the_bound(seed: int, width: int, dtype: torch.dtype) -> None:
    words, hidden = drawn(50, width, seed=seed, dtype=dtype), drawn(9, width, seed=seed + 1, dtype=dtype)
    hidden[0, 0] = 1000.0
    served = runner(words)
    normed = before_head(served.spec, hidden)
    thin, quantities = Screen(words), quantised(normed)
    approximate = thin.approximate(quantities)
    off = thin.highest(normed, quantities, approximate) - approximate
    true = normed.double() @ words.double().t()
    assert ((approximate - true).abs() <= off).all()
    assert (served.logits(hidden).float() <= (approximate + off).to(dtype).float()).all()
    # each probability is off by a factor of at most exp(2 e) when each logit is off by at most e
    logits = ScreenedHead(served, 4).check(hidden, HeadState())
    screened, full = (margins(each) for each in (logits, served.logits(hidden).float()))
    rounding = torch.finfo(dtype).eps * true.abs().amax(dim=-1)
    slack = torch.expm1(2 * (off.amax(dim=-1) + rounding))
    assert ((screened - full).abs() <= slack).all()


def margins(logits: Tensor) -> Tensor:
    view = LayerView(1, logits, None, lambda hidden: hidden, lambda hidden: hidden)
    return CONFIDENCE[Measure.softmax](view)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_screened_check_is_exact_on_its_best_and_int8_elsewhere(dtype: torch.dtype) -> None:
    words, hidden = drawn(90, 48, seed=8, dtype=dtype), drawn(6, 48, seed=9, dtype=dtype)
    served = runner(words)
    logits, full = ScreenedHead(served, 5).check(hidden, HeadState()), served.logits(hidden).float()
    tail = Screen(words).approximate(quantised(before_head(served.spec, hidden)))
    best = tail.topk(5).indices
    assert torch.allclose(logits.gather(1, best), full.gather(1, best), rtol=torch.finfo(dtype).eps, atol=1e-5)
    rest = torch.ones_like(logits, dtype=torch.bool).scatter(1, best, False)
    assert torch.equal(logits[rest], tail[rest])
    assert not torch.equal(logits, tail)


def test_int8_products_are_exact_on_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(10)
    for count, width, vocabulary in [(1, 16, 16), (5, 1040, 32), (33, 2064, 48)]:
        left, right = (
            torch.randint(-127, 128, (size, width), generator=generator).to(torch.int8) for size in (count, vocabulary)
        )
        expected = left.long() @ right.long().t()
        assert torch.equal(slow_int_product(left, right).long(), expected)
        assert torch.equal(int_product(left, right).long(), expected)

    def saturating(left: Tensor, right: Tensor) -> Tensor:
        return slow_int_product(left, right).clamp(-(2**15), 2**15 - 1)

    words, hidden = drawn(60, 32, seed=11), drawn(5, 32, seed=12)
    expected_logits = Screen(words).approximate(quantised(hidden))
    monkeypatch.setattr(screen, "int_product", saturating)
    assert torch.equal(Screen(words).approximate(quantised(hidden)), expected_logits)


# rows and their mates


def looked(head: Vocabulary, first: Tensor, hidden: Tensor) -> list[Tensor]:
    """All that a step can learn of rows: two checks, their words, both kinds of emission."""
    state, told = HeadState(), []
    for each in (first, hidden):
        turn = HeadState(state.candidates)
        logits = head.check(each, turn)
        told += [logits, head.words(logits.argmax(dim=-1), turn)]
        state = turn
    for early in (True, False):
        told.append(head.emit(hidden, torch.full((len(hidden),), early), HeadState(state.candidates)))
    return told


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(Head))
def test_an_outlier_beside_a_row_changes_none_of_its_bits(kind: Head, dtype: torch.dtype) -> None:
    words = drawn(97, 40, seed=13, dtype=dtype)
    words[:30] = twins(30, 40, seed=14).to(dtype)
    first, hidden = drawn(8, 40, seed=15, dtype=dtype), drawn(8, 40, seed=16, dtype=dtype)
    hidden[::2] = words[0] + 0.1 * hidden[::2]  # some of the rows need the full head
    head = make_head(kind, 5, runner(words))
    alone = looked(head, first, hidden)
    for place in range(8):
        spoilt, spoilt_first = hidden.clone(), first.clone()
        spoilt[place, 3] = spoilt_first[place, 3] = 1e4
        mates = [row for row in range(8) if row != place]
        beside = looked(head, spoilt_first, spoilt)
        assert all(torch.equal(a[mates], b[mates]) for a, b in zip(alone, beside, strict=True))
        assert not torch.equal(alone[0][place], beside[0][place])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(Head))
def test_a_row_that_is_no_number_says_nothing_and_no_mate_notices(kind: Head, dtype: torch.dtype, value: float) -> None:
    words = drawn(50, 24, seed=17, dtype=dtype)
    first, hidden = drawn(6, 24, seed=18, dtype=dtype), drawn(6, 24, seed=19, dtype=dtype)
    head = make_head(kind, 5, runner(words))
    sound = looked(head, first, hidden)
    for place in range(6):
        poor, poor_first = hidden.clone(), first.clone()
        poor[place, 1] = poor_first[place, 1] = value
        told = looked(head, poor_first, poor)
        mates = [row for row in range(6) if row != place]
        assert all(torch.equal(a[mates], b[mates]) for a, b in zip(sound, told, strict=True))
        assert [each[place].item() for each in told[-2:]] == [NOTHING, NOTHING]
        assert not bool(margins(told[0])[place] >= 0.0)  # it never leaves early


@pytest.mark.parametrize("kind", [Head.candidates, Head.screened])
def test_padding_asks_nobody(kind: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    words = drawn(50, 24, seed=20)
    hidden = torch.cat([words[3:5] * 2, torch.full((2, 24), float("nan"))])
    served = runner(words)
    head = make_head(kind, 5, served)
    state = HeadState(live=torch.tensor([True, True, False, False]))
    head.check(hidden, state)
    monkeypatch.delattr(EagerRunner, "logits")
    early = torch.tensor([True, True, False, False])
    assert head.emit(hidden, early, state)[:2].tolist() == [3, 4]
    assert state.fallbacks == 0


# candidates


def test_candidates_are_those_of_the_first_check() -> None:
    words = drawn(60, 32, seed=21)
    head, full = CandidateHead(runner(words), 3), FullHead(runner(words))
    first, hidden = words[[7, 8]], words[[30, 31]]
    state = HeadState()
    logits = head.check(first, state)
    assert torch.equal(logits, full.check(first, HeadState()))
    kept = logits.topk(3).indices
    assert head.words(torch.tensor([7, 8]), state).tolist() == [7, 8]
    later = HeadState(state.candidates)
    assert torch.allclose(head.check(hidden, later), full.check(hidden, HeadState()).gather(1, kept), atol=1e-5)
    assert head.words(torch.tensor([0, 2]), later).tolist() == [kept[0, 0], kept[1, 2]]
    best = full.check(hidden, HeadState()).gather(1, kept).argmax(dim=-1)
    assert emitted(head, hidden, later, early=True) == [int(kept[0, best[0]]), int(kept[1, best[1]])]
    assert emitted(head, hidden, later) == [30, 31]
    mixed = head.emit(hidden, torch.tensor([True, False]), later)
    assert mixed.tolist() == [int(kept[0, best[0]]), 31]


@pytest.mark.parametrize("kind", list(Head))
def test_k_is_capped_at_the_vocabulary(kind: Head) -> None:
    words, hidden = drawn(6, 16, seed=22), drawn(5, 16, seed=23)
    served = runner(words)
    head = make_head(kind, 1000, served)
    state, full = HeadState(), served.logits(hidden)
    assert torch.allclose(head.check(hidden, state), full, atol=1e-5)
    assert emitted(head, hidden, state, early=True) == full.argmax(dim=-1).tolist()
    assert isinstance(head, {Head.full: FullHead, Head.candidates: CandidateHead, Head.screened: ScreenedHead}[kind])


# the screened head in whole engines


@pytest.mark.parametrize("rule", [*EXACT, *COUPLED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_screened_engine_says_what_the_full_head_says(rule: BatchRule, dtype: torch.dtype) -> None:
    told = [
        [answer.tokens for answer in Engine(tiny(dtype=dtype), head=head, head_k=3, rule=rule).generate(texts())]
        for head in (Head.full, Head.screened)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize("measure", [Measure.softmax, Measure.agreement])
def test_a_screened_row_emits_the_full_argmax_of_where_it_left(measure: Measure) -> None:
    """Its depths are those of int8 margins; its tokens are what the full head says at these depths."""
    policy = confident(measure, 0.5)
    answers = Engine(tiny(), head=Head.screened, head_k=3, max_batch=4).generate(texts(), policy=policy)
    assert len({layer for answer in answers for layer in answer.crossing_layers}) > 1
    layers = {row.id: answer.crossing_layers for row, answer in zip(rows(), answers, strict=True)}
    traces = BatchDecoder(tiny())(rows(), Replay(layers))
    assert [trace.tokens for trace in traces] == [answer.tokens for answer in answers]


def test_steps_count_what_the_screen_left_to_the_full_head(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny(), head=Head.screened, head_k=3, max_batch=4, runner="eager")
    emit = engine.machine.head.emit

    def undecided(hidden: Tensor, early: Tensor, state: HeadState) -> Tensor:
        state.fallbacks += 2
        return emit(hidden, early, state)

    engine.generate(texts())
    before = sum(record.fallbacks for record in engine.clock.history)
    steps = engine.clock.steps
    monkeypatch.setattr(engine.machine.head, "emit", undecided)
    engine.generate(texts())
    assert engine.clock.steps == 2 * steps
    assert sum(record.fallbacks for record in engine.clock.history) == 2 * before + 2 * steps
