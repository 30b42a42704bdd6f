"""Examples as pairs of ids, tokenised when they are looked at."""

from collections.abc import Sequence
from typing import overload

from calm.data.text import encode_source, encode_target
from calm.models.speaking import SpeakingModel
from calm.records import Example

Row = tuple[Sequence[int], Sequence[int]]


class EncodedRows(Sequence[Row]):
    """(source ids, target ids), EOS last in both, of a split too large to tokenise whole."""

    def __init__(self, model: SpeakingModel, examples: Sequence[Example]) -> None:
        self._model, self._examples = model, examples

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        example, settings = self._examples[index], self._model.settings
        source = encode_source(self._model.tokenizer, example.source, settings)
        return source, encode_target(self._model.tokenizer, example.target, settings.max_target_tokens)
