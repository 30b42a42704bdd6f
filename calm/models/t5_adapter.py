"""The reference side of T5: Hugging Face's own modules, one sequence, one layer at a time."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from .t5 import EarlyExitT5


@dataclass
class RowState:
    """Everything one row carries from step to step.

    ``holes[i]`` are the positions of layer i (1..L) that have no K/V (backfill ``mask``).
    """

    encoder_hidden: Tensor
    cache: EncoderDecoderCache
    holes: dict[int, list[int]] = field(default_factory=dict)


class T5Adapter:
    """DecoderAdapter over an EarlyExitT5; layers count from 1."""

    def __init__(self, model: EarlyExitT5) -> None:
        self.model = model
        self.num_layers = model.num_layers
        self.eos_token_id = model.eos_token_id
        self.start_token_id = model.start_token_id
        self._blocks = model.hf.decoder.block

    def prefill(self, source_ids: list[int]) -> RowState:
        ids = torch.tensor([source_ids], device=self.model.device)
        hidden = self.model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
        # sized as it is filled: a cache sized from the config would get the encoder's number of layers
        return RowState(hidden, EncoderDecoderCache(DynamicCache(), DynamicCache()))

    def prompt_hidden(self, state: RowState) -> None:
        return None

    def embed(self, token: int, step: int, state: RowState | None = None) -> Float[Tensor, "1 1 d_model"]:
        hidden: Tensor = self.model.hf.decoder.embed_tokens(torch.tensor([[token]], device=self.model.device))
        return hidden

    def layer(
        self, index: int, hidden: Float[Tensor, "1 1 d_model"], state: RowState, step: int
    ) -> Float[Tensor, "1 1 d_model"]:
        attention = self._blocks[0].layer[0].SelfAttention
        bias = attention.compute_bias(1, step + 1, past_seen_tokens=step)  # (1, H, 1, step+1)
        mask = None
        if holes := state.holes.get(index):
            mask = torch.zeros((1, 1, 1, step + 1), dtype=bias.dtype, device=bias.device)
            mask[..., holes] = torch.finfo(bias.dtype).min
        out: Tensor = self._blocks[index - 1](
            hidden,
            attention_mask=mask,
            position_bias=bias,
            encoder_hidden_states=state.encoder_hidden,
            cache=state.cache,
            use_cache=True,
        )[0]
        return out

    def kv(
        self, index: int, hidden: Float[Tensor, "1 1 d_model"], state: RowState | None = None, step: int = 0
    ) -> tuple[Float[Tensor, "1 heads 1 d_kv"], Float[Tensor, "1 heads 1 d_kv"]]:
        """K and V of layer ``index``; those of a T5 know neither positions nor the rest of the row."""
        sublayer = self._blocks[index - 1].layer[0]
        normed, attention = sublayer.layer_norm(hidden), sublayer.SelfAttention
        shape = (1, 1, -1, attention.key_value_proj_dim)
        return attention.k(normed).view(shape).transpose(1, 2), attention.v(normed).view(shape).transpose(1, 2)

    def write_kv(self, index: int, state: RowState, step: int, key: Tensor, value: Tensor) -> None:
        own = state.cache.self_attention_cache
        if own.get_seq_length(index - 1) == step:
            own.update(key, value, index - 1)
        else:
            own.layers[index - 1].keys[:, :, step : step + 1] = key
            own.layers[index - 1].values[:, :, step : step + 1] = value

    def read_kv(self, index: int, state: RowState, step: int) -> tuple[Tensor, Tensor]:
        layer = state.cache.self_attention_cache.layers[index - 1]
        return layer.keys[:, :, step : step + 1], layer.values[:, :, step : step + 1]

    def forget(self, state: RowState, step: int) -> None:
        for layer in state.cache.self_attention_cache.layers:
            layer.crop(min(step - layer.get_seq_length(), 0))

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        return self.model.logits(hidden)
