"""What of an answer may be shown while it grows: nothing that changes later, and in the end all of it."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from calm.policies import Full
from serve.endings import end_of, visible_text
from serve.options import RequestOptions
from serve.requests import Row, Status

EOS = 1
PIECES = ["", "", "a", "b", "ab", "ba", "aab", " ", "abc", "c"]


def row(**options: Any) -> Row:
    return Row(
        id="r", number=0, source=(1,), options=RequestOptions(**options), policy=Full(), certified=True, limit=12,
        next_input=0,
    )  # fmt: skip


def spell(ids: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in ids)


def grow(one: Row, tokens: Sequence[int], to_text: Any) -> list[str]:
    """Pieces as a stream shows them."""
    shown: list[str] = []
    for token in tokens:
        one.record(token, 1, 1, 1, False)
        reason = end_of(one, EOS, to_text)
        if reason is not None:
            one.end(Status.finished, reason)
        text = visible_text(one, to_text)
        assert text.startswith("".join(shown)), "what was shown has changed"
        shown.append(text[len("".join(shown)) :])
        if one.over:
            return shown
    raise AssertionError("it never ended")


@given(
    st.lists(st.integers(1, len(PIECES) - 1), max_size=12),
    st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
    st.integers(0, 5),
)
@settings(max_examples=120, deadline=None, derandomize=True, database=None)
def test_pieces_make_the_text_and_a_stop_cuts_at_its_first_place(
    tokens: list[int], stops: list[str], least: int
) -> None:
    tokens = [*tokens, EOS] + [2] * 12
    one = row(stop=tuple(stops), min_tokens=least)
    pieces = grow(one, tokens, spell)
    said = one.answer(lambda ids: spell(ids), 4).text
    assert "".join(pieces) == said
    whole = spell(one.tokens)
    assert whole.startswith(said)
    exempt = len(spell(one.tokens[: max(0, least - 1)]))
    ends = [place + len(stop) for stop in stops for place in range(len(whole)) if whole.startswith(stop, place)]
    if one.reason is not None and one.reason.value == "stop":
        assert any(whole.startswith(stop, len(said)) for stop in stops)
        assert len(one.tokens) >= least
    else:
        assert said == whole
        assert all(end <= exempt for end in ends)


def test_half_a_character_is_not_shown() -> None:
    """A character of several bytes comes in several tokens; until it is whole it reads as U+FFFD."""
    halves = {2: "\ufffd", 3: "\ufffd\ufffd"}

    def to_text(ids: Sequence[int]) -> str:
        text = "".join("x" if token == 5 else "?" for token in ids if token not in (2, 3, 4, EOS))
        if 4 in ids:
            return text + "€"
        return text + halves.get(len([token for token in ids if token in (2, 3)]) + 1, "")

    assert grow(row(), [5, 2, 3, 4, EOS], to_text) == ["x", "", "", "€", ""]


def test_what_is_no_character_at_the_end_is_shown_at_the_end() -> None:
    assert grow(row(), [5, EOS], lambda ids: "\ufffd") == ["", "\ufffd"]


def test_eos_wins_over_stops_and_length() -> None:
    one = row(stop=("a",), stop_ids={EOS})
    grow(one, [EOS], spell)
    assert one.reason is not None and one.reason.value == "eos"
