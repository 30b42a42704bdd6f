"""What decoder-only models have in common: one sequence, in which the prompt stands before the answer."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from ..errors import DataError
from .base import DecoderSpec
from .speaking import SpeakingModel

PROMPT_CHUNK = 256  # positions of a prompt that are read at once: bounds the memory of their scores


@dataclass
class Read:
    """Prompts that have been read at full depth.

    Attributes:
        cache: true K/V of every layer at every slot; those of padding are there and must not be seen.
        hidden: residual after the last layer at each prompt's last position, (B, D).
    """

    cache: DynamicCache
    hidden: Float[Tensor, "batch d_model"]

    def stacked(self) -> tuple[Tensor, Tensor]:
        """K and V of all layers, (L, B, KV heads, prompt, d_kv) each."""
        layers = self.cache.layers
        return torch.stack([layer.keys for layer in layers]), torch.stack([layer.values for layer in layers])


class CausalModel(SpeakingModel):
    """A decoder-only model. Rows are padded on the right only, so that a position is a token's place in its row."""

    @abstractmethod
    def embed_at(
        self, ids: Int[Tensor, "batch length"], positions: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length d_model"]:
        """What the first layer reads."""

    @abstractmethod
    def run_layer(
        self,
        index: int,
        hidden: Float[Tensor, "batch length d_model"],
        positions: Int[Tensor, "batch length"],
        mask: Float[Tensor, "_ 1 length keys"] | None,
        cache: DynamicCache | None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Hugging Face's own layer ``index`` (1..L); ``mask`` is added to the scores, ``cache`` gets K and V."""

    @abstractmethod
    def key_value(
        self, index: int, hidden: Float[Tensor, "batch length d_model"], positions: Int[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch kv_heads length d_kv"], Float[Tensor, "batch kv_heads length d_kv"]]:
        """K and V of layer ``index`` as ``run_layer`` puts them into the cache, and nothing else of it."""

    @abstractmethod
    def export_spec(self) -> DecoderSpec:
        """The decoder as tensors and flags; tensors are shared with the model, not copied."""

    @property
    def num_layers(self) -> int:
        return int(self.hf.config.num_hidden_layers)

    @property
    def d_model(self) -> int:
        return int(self.hf.config.hidden_size)

    @property
    def eos_token_id(self) -> int:
        """The tokenizer's: a config may list several ends, and answers are taught this one."""
        return int(self.tokenizer.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        pad = self.hf.config.pad_token_id
        return self.eos_token_id if pad is None or pad < 0 else int(pad)

    @property
    def start_token_id(self) -> int:
        return self.eos_token_id

    def read_prompts(
        self, ids: Int[Tensor, "batch prompt"], mask: Bool[Tensor, "batch prompt"], chunk: int = PROMPT_CHUNK
    ) -> Read:
        """Read whole prompts, padded on the right, at full depth, ``chunk`` positions at a time.

        Raises:
            DataError: a prompt without a token.
        """
        lengths = mask.sum(dim=1)
        if not bool((lengths > 0).all()):
            raise DataError("an empty prompt says nothing to continue; give a text, or a folder with a source_start")
        cache, last = DynamicCache(), torch.zeros((len(ids), self.d_model), dtype=self.dtype, device=ids.device)
        for begin in range(0, ids.shape[1], chunk):
            end = min(begin + chunk, ids.shape[1])
            positions = torch.arange(begin, end, device=ids.device)[None].expand(len(ids), -1)
            hidden = self.embed_at(ids[:, begin:end], positions)
            lowest = torch.finfo(hidden.dtype).min
            ahead = torch.arange(end, device=ids.device)[None] > positions[0, :, None]  # (C, keys)
            unseen = ahead[None] | ~mask[:, None, :end]  # (B, C, keys)
            scores = torch.zeros(unseen.shape, dtype=hidden.dtype, device=ids.device).masked_fill(unseen, lowest)
            for index in range(1, self.num_layers + 1):
                hidden = self.run_layer(index, hidden, positions, scores[:, None], cache)
            at = (lengths - 1 - begin).clamp(0, end - begin - 1)
            ends_here = (lengths > begin) & (lengths <= end)
            last = torch.where(ends_here[:, None], hidden[torch.arange(len(ids), device=ids.device), at], last)
        return Read(cache, last)

    def answer_hiddens(
        self,
        source_ids: Int[Tensor, "batch source"],
        source_mask: Bool[Tensor, "batch source"],
        decoder_ids: Int[Tensor, "batch target"],
        reach: Sequence[int] | None = None,
    ) -> list[Float[Tensor, "batch target d_model"]]:
        """See SpeakingModel. The source's last token predicts the target's first; the start token is not read.

        With a ``reach`` each row has its own prompt at full depth, however long: SkipDecode (2307.02628, section 3.1)
        takes the corpus' median length for all, and so trains other positions than it decodes.
        """
        lengths, steps = source_mask.sum(dim=1), decoder_ids.shape[1]
        width = source_ids.shape[1] + steps - 1
        place = torch.arange(width, device=source_ids.device)[None].expand(len(source_ids), -1)
        behind = (place - lengths[:, None] + 1).clamp(0, steps - 1)
        padded = torch.nn.functional.pad(source_ids, (0, steps - 1))
        ids = torch.where(place < lengths[:, None], padded, decoder_ids.gather(1, behind))
        hidden = self.embed_at(ids, place)
        lowest = torch.finfo(hidden.dtype).min
        # what follows a row's last token is padding, which no token of the row looks ahead to
        causal = torch.full((width, width), lowest, dtype=hidden.dtype, device=ids.device).triu(1)[None, None]
        asked = lengths[:, None] - 1 + torch.arange(steps, device=ids.device)[None]  # (B, T)
        asked = asked[:, :, None].expand(-1, -1, self.d_model)
        hiddens: list[Tensor] = []
        for index in range(1, self.num_layers + 1):
            ends = None if reach is None else lengths - 1 + reach[index - 1]
            hidden = self._run_below(ends, index, hidden, place, causal)
            hiddens.append(hidden.gather(1, asked))
        return hiddens

    def _run_below(
        self,
        ends: Int[Tensor, " batch"] | None,
        index: int,
        hidden: Float[Tensor, "batch length d_model"],
        place: Int[Tensor, "batch length"],
        causal: Float[Tensor, "1 1 length length"],
    ) -> Float[Tensor, "batch length d_model"]:
        """Layer ``index`` at each row's positions below its end, which look at nothing behind it; others pass it by."""
        if ends is None:
            return self.run_layer(index, hidden, place, causal, None)
        n = min(int(ends.max()), hidden.shape[1])  # no row runs the layer further
        run = self.run_layer(index, hidden[:, :n], place[:, :n], causal[..., :n, :n], None)
        run = torch.where((place[:, :n] < ends[:, None])[..., None], run, hidden[:, :n])
        return torch.cat([run, hidden[:, n:]], dim=1)


@dataclass
class CausalState:
    """Everything one row carries from step to step; step s stands at position ``length - 1 + s``."""

    length: int
    hidden: Tensor
    cache: DynamicCache
    holes: dict[int, list[int]] = field(default_factory=dict)

    def position(self, step: int) -> int:
        return self.length - 1 + step


class CausalAdapter:
    """DecoderAdapter over a decoder-only model; layers count from 1."""

    def __init__(self, model: CausalModel, chunk: int = PROMPT_CHUNK) -> None:
        self.model, self.chunk = model, chunk
        self.num_layers = model.num_layers
        self.eos_token_id = model.eos_token_id
        self.start_token_id = model.start_token_id

    def prefill(self, source_ids: list[int]) -> CausalState:
        ids = torch.tensor([source_ids], dtype=torch.long, device=self.model.device)
        read = self.model.read_prompts(ids, torch.ones_like(ids, dtype=torch.bool), self.chunk)
        return CausalState(len(source_ids), read.hidden[None], read.cache)

    def prompt_hidden(self, state: CausalState) -> Float[Tensor, "1 1 d_model"]:
        return state.hidden

    def embed(self, token: int, step: int, state: CausalState) -> Float[Tensor, "1 1 d_model"]:
        return self.model.embed_at(torch.tensor([[token]], device=self.model.device), self._at(state, step))

    def layer(
        self, index: int, hidden: Float[Tensor, "1 1 d_model"], state: CausalState, step: int
    ) -> Float[Tensor, "1 1 d_model"]:
        mask = None
        if holes := state.holes.get(index):
            shape = (1, 1, 1, state.position(step) + 1)
            mask = torch.zeros(shape, dtype=hidden.dtype, device=hidden.device)
            mask[..., [state.position(hole) for hole in holes]] = torch.finfo(hidden.dtype).min
        return self.model.run_layer(index, hidden, self._at(state, step), mask, state.cache)

    def kv(
        self, index: int, hidden: Float[Tensor, "1 1 d_model"], state: CausalState, step: int
    ) -> tuple[Float[Tensor, "1 kv_heads 1 d_kv"], Float[Tensor, "1 kv_heads 1 d_kv"]]:
        return self.model.key_value(index, hidden, self._at(state, step))

    def write_kv(self, index: int, state: CausalState, step: int, key: Tensor, value: Tensor) -> None:
        at = state.position(step)
        if state.cache.get_seq_length(index - 1) == at:
            state.cache.update(key, value, index - 1)
        else:
            state.cache.layers[index - 1].keys[:, :, at : at + 1] = key
            state.cache.layers[index - 1].values[:, :, at : at + 1] = value

    def read_kv(self, index: int, state: CausalState, step: int) -> tuple[Tensor, Tensor]:
        layer, at = state.cache.layers[index - 1], state.position(step)
        return layer.keys[:, :, at : at + 1], layer.values[:, :, at : at + 1]

    def forget(self, state: CausalState, step: int) -> None:
        for layer in state.cache.layers:
            layer.crop(min(state.position(step) - layer.get_seq_length(), 0))

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        return self.model.logits(hidden)

    def _at(self, state: CausalState, step: int) -> Int[Tensor, "1 1"]:
        return torch.tensor([[state.position(step)]], device=self.model.device)
