"""What a draft is, and which of its words are kept."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm.config import Measure
from calm.drafting import Draft, accepted, said
from calm.errors import ConfigError

EOS = 1
words = st.lists(st.integers(0, 4), max_size=6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(layer=0), "layer must be a whole number of at least 1, got 0"),
        (dict(layer=True), "layer must be a whole number of at least 1, got True"),
        (dict(layer=2, length=0), "length must be a whole number of at least 1, got 0"),
        (dict(layer=2, measure=Measure.softmax, threshold=1.5), r"threshold must lie in \[0, 1\], got 1.5"),
        (dict(layer=2, measure=Measure.softmax, threshold=float("nan")), r"threshold must lie in \[0, 1\], got nan"),
        (dict(layer=2, threshold=0.5), "threshold=0.5 of which measure"),
        (dict(layer=2, measure=Measure.agreement, threshold=0.5), "'agreement' compares layers"),
        (dict(layer=1, measure=Measure.state, threshold=0.5), "'state' says nothing at layer 1"),
    ],
)
def test_wrong_drafts_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"draft: .*{message}"):
        Draft(**values)


def test_a_draft_fits_its_model() -> None:
    Draft(3).check_depth(4)
    with pytest.raises(ConfigError, match=r"draft: layer 4 lies outside 1\.\.3: the model has 4 decoder layers"):
        Draft(4).check_depth(4)
    asks = Draft(2, measure=Measure.classifier, threshold=0.5)
    asks.check_classifier(True)
    Draft(2).check_classifier(False)
    with pytest.raises(ConfigError, match="needs a trained exit classifier"):
        asks.check_classifier(False)


def test_what_a_round_says() -> None:
    assert said([5, 6, 7], [5, 6, 8, 9], EOS) == (5, 6, 8)
    assert said([5, 6], [5, 6, 9], EOS) == (5, 6, 9)
    assert said([], [7], EOS) == (7,)
    assert said([5, EOS], [5, EOS], EOS) == (5, EOS)  # a drafted end is read by nobody, so there is no next word
    assert said([5, EOS], [5, 6], EOS) == (5, 6)
    assert said([5, 6, 7], [5, EOS, 9, 9], EOS) == (5, EOS)
    assert accepted([5, 6, 7], [5, 6, 8, 9]) == 2 and accepted([], [7]) == 0


@given(words, words)
def test_only_the_full_models_words_are_said(drafted: list[int], right: list[int]) -> None:
    right += [0] * (len(drafted) + 1 - len(right))
    spoken = said(drafted, right, EOS)
    assert spoken == tuple(right[: len(spoken)]) and spoken
    assert accepted(drafted, right) + 1 >= len(spoken)
    assert EOS not in spoken[:-1]
