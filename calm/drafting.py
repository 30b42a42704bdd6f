"""Self-speculative decoding: what a draft is, and which of its words are kept.

A row's first layers draft words, its other layers then read all of them at once, and what is said is what the full
model says there (LayerSkip, Elhoushi et al., 2404.16710, section 4.3; ending a draft by confidence is Kangaroo's, Liu
et al., 2404.18911). Unlike an exit, a draft changes no answer: every K and V that is kept is a true one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .config import Measure, check_range
from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Draft:
    """How a row drafts.

    Attributes:
        layer: the last one that runs while drafting, 1..L-1; its words are the draft.
        length: words of a draft, at most.
        measure: what ends a draft early; None: nothing but its length, EOS and the answer's limit.
        threshold: of ``measure``, in [0, 1]. A word is drafted where confidence >= threshold, so at 0 every one.

    Raises:
        ConfigError: a number is out of range, or the measure has nothing to say at this layer.
    """

    layer: int
    length: int = 4
    measure: Measure | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layer", "length"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ConfigError(f"draft: {name} must be a whole number of at least 1, got {value!r:.40}")
        if type(self.threshold) not in (int, float):
            raise ConfigError(f"draft: threshold must be a number, got {self.threshold!r:.40}")
        check_range("draft: threshold", self.threshold, 0, 1)
        if self.measure is not None and type(self.measure) is not Measure:
            known = ", ".join(measure.value for measure in Measure)
            raise ConfigError(f"draft: measure {self.measure!r:.40} is no Measure: {known}")
        if self.measure is None and self.threshold:
            raise ConfigError(f"draft: threshold={self.threshold:g} of which measure? give measure= too")
        if self.measure is Measure.agreement:
            raise ConfigError("draft: measure 'agreement' compares layers and a draft asks one; choose another measure")
        if self.measure is Measure.state and self.layer == 1:
            raise ConfigError("draft: measure 'state' says nothing at layer 1; give layer=2 or another measure")

    def check_depth(self, num_layers: int) -> None:
        """Raise ConfigError where nothing is left above the draft."""
        if self.layer >= num_layers:
            raise ConfigError(
                f"draft: layer {self.layer} lies outside 1..{num_layers - 1}: the model has {num_layers} decoder "
                "layers, and some must be left to check what is drafted"
            )

    def check_classifier(self, present: bool) -> None:
        """Raise ConfigError where the draft asks a classifier that the model does not have."""
        if self.measure is Measure.classifier and not present:
            raise ConfigError("draft: measure 'classifier' needs a trained exit classifier and this model has none")


def accepted(drafted: Sequence[int], words: Sequence[int]) -> int:
    """How many drafted words the full model says too, up to the first that it does not.

    Args:
        drafted: d_0, d_1, ...
        words: the full model's at the same positions, at least as many.
    """
    pairs = enumerate(zip(drafted, words, strict=False))
    return next((i for i, (mine, right) in pairs if mine != right), len(drafted))


def said(drafted: Sequence[int], words: Sequence[int], eos_token_id: int) -> tuple[int, ...]:
    """What a round says: the accepted words and the full model's next one, to the end of the answer.

    So one word at least, and always the full model's.
    """
    spoken = tuple(words[: accepted(drafted, words) + 1])
    return spoken[: spoken.index(eos_token_id) + 1] if eos_token_id in spoken else spoken
