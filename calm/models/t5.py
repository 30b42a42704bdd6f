"""A T5 (v1.0, FLAN, v1.1) whose every decoder layer can speak through the shared norm and head.

Weights, config and tokenizer are Hugging Face's; the loop over decoder layers is ours.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import T5ForConditionalGeneration

from ..errors import ConfigError
from .base import BiasKind, DecoderSpec, EncoderSpec
from .speaking import SpeakingModel


class EarlyExitT5(SpeakingModel):
    """A T5, its tokenizer, its exit classifier and its settings."""

    hf: T5ForConditionalGeneration

    @property
    def num_layers(self) -> int:
        return int(self.hf.config.num_decoder_layers)

    @property
    def d_model(self) -> int:
        return int(self.hf.config.d_model)

    @property
    def eos_token_id(self) -> int:
        return int(self.hf.config.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        return int(self.hf.config.pad_token_id)

    @property
    def start_token_id(self) -> int:
        start = self.hf.config.decoder_start_token_id
        return self.pad_token_id if start is None else int(start)

    @property
    def head_scale(self) -> float:
        """d^-0.5 for v1.0 checkpoints (tied head), else 1."""
        return float(self.d_model**-0.5) if self.hf.config.scale_decoder_outputs else 1.0

    def encode(
        self, input_ids: Int[Tensor, "batch source"], attention_mask: Bool[Tensor, "batch source"]
    ) -> Float[Tensor, "batch source d_model"]:
        output = self.hf.encoder(input_ids=input_ids, attention_mask=attention_mask.long())
        return cast(Tensor, output.last_hidden_state)

    def decoder_hiddens(
        self,
        encoder_hidden: Float[Tensor, "batch source d_model"],
        attention_mask: Bool[Tensor, "batch source"],
        decoder_input_ids: Int[Tensor, "batch target"],
        reach: Sequence[int] | None = None,
    ) -> list[Float[Tensor, "batch target d_model"]]:
        """Teacher forcing: the raw residual stream after every decoder layer.

        Args:
            reach: as ``answer_hiddens`` has it.
        """
        decoder = self.hf.decoder
        hidden = decoder.dropout(decoder.embed_tokens(decoder_input_ids))
        length = decoder_input_ids.shape[1]
        # autocast may run attention in bf16: a mask in the residual's dtype keeps the sum there
        lowest = torch.finfo(hidden.dtype).min
        causal = torch.full((length, length), lowest, device=hidden.device, dtype=hidden.dtype).triu(1)[None, None]
        source_mask = torch.zeros(attention_mask.shape, device=hidden.device, dtype=hidden.dtype)
        source_mask = source_mask.masked_fill(~attention_mask, lowest)[:, None, None]  # (B, 1, 1, S)
        bias = decoder.block[0].layer[0].SelfAttention.compute_bias(length, length)  # (1, H, T, T)
        no_bias = torch.zeros((1, bias.shape[1], length, attention_mask.shape[1]), device=bias.device, dtype=bias.dtype)
        hiddens: list[Tensor] = []
        for number, block in enumerate(decoder.block):
            # no later position runs the layer, so what these attend to is whole; positionally for checkpointing
            n = length if reach is None else min(reach[number], length)
            mask, near = causal[..., :n, :n], bias[..., :n, :n]
            run = block(hidden[:, :n], mask, near, encoder_hidden, source_mask, no_bias[..., :n, :])[0]
            hidden = run if n == length else torch.cat([run, hidden[:, n:]], dim=1)
            hiddens.append(hidden)
        return hiddens

    def norm(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """Shared final norm, output dropout (train mode) and the v1.0 scale: what the head is applied to."""
        normed: Tensor = self.hf.decoder.dropout(self.hf.decoder.final_layer_norm(hidden))
        return normed * self.head_scale if self.head_scale != 1.0 else normed

    def answer_hiddens(
        self,
        source_ids: Int[Tensor, "batch source"],
        source_mask: Bool[Tensor, "batch source"],
        decoder_ids: Int[Tensor, "batch target"],
        reach: Sequence[int] | None = None,
    ) -> list[Float[Tensor, "batch target d_model"]]:
        return self.decoder_hiddens(self.encode(source_ids, source_mask), source_mask, decoder_ids, reach)


def t5_only(model: nn.Module, what: str) -> EarlyExitT5:
    """The model itself where it is a T5.

    Raises:
        ConfigError: it is another one; ``what`` names who asks.
    """
    if not isinstance(model, EarlyExitT5):
        kind = type(model).__name__.removeprefix("EarlyExit")
        raise ConfigError(f"{what} takes T5 models only, and this is a {kind}; decoder=batch and decoder=one take both")
    return model


def export_spec(model: EarlyExitT5) -> DecoderSpec:
    """The decoder as tensors and flags; tensors are shared with the model, not copied."""
    config, decoder = model.hf.config, model.hf.decoder
    tensors = {**_stack_tensors(decoder, bool(config.is_gated_act)), "head": model.head_weight}
    for number, block in enumerate(decoder.block, start=1):
        cross = block.layer[1]
        tensors[f"{number}.cross_norm"] = cross.layer_norm.weight
        for name in "qkvo":
            tensors[f"{number}.cross_{name}"] = getattr(cross.EncDecAttention, name).weight
    return DecoderSpec(
        num_layers=model.num_layers,
        num_kv_heads=int(config.num_heads),
        vocab_size=model.vocab_size,
        bias_kind=BiasKind.relative_buckets,
        cross_attention=True,
        head_scale=model.head_scale,
        start_token_id=model.start_token_id,
        eos_token_id=model.eos_token_id,
        pad_token_id=model.pad_token_id,
        tensors={name: tensor.detach() for name, tensor in tensors.items()},
        **_stack_flags(model),
    )


def export_encoder(model: EarlyExitT5) -> EncoderSpec:
    """The encoder as tensors and flags; tensors are shared with the model, not copied."""
    config, encoder = model.hf.config, model.hf.encoder
    tensors = _stack_tensors(encoder, bool(config.is_gated_act))
    return EncoderSpec(
        num_layers=int(config.num_layers),
        tensors={name: tensor.detach() for name, tensor in tensors.items()},
        **_stack_flags(model),
    )


def _stack_flags(model: EarlyExitT5) -> dict[str, Any]:
    """What encoder and decoder have in common."""
    config = model.hf.config
    return {
        "num_heads": int(config.num_heads),
        "d_model": model.d_model,
        "d_kv": int(config.d_kv),
        "d_ff": int(config.d_ff),
        "norm_eps": float(config.layer_norm_epsilon),
        "activation": str(config.dense_act_fn),
        "gated": bool(config.is_gated_act),
        "bias_buckets": int(config.relative_attention_num_buckets),
        "bias_max_distance": int(config.relative_attention_max_distance),
        "attention_scale": 1.0,
    }


def _stack_tensors(stack: Any, gated: bool) -> dict[str, Tensor]:
    """Of an encoder or a decoder, without cross-attention and head."""
    tensors = {
        "embed": stack.embed_tokens.weight,
        "final_norm": stack.final_layer_norm.weight,
        "bias": stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight,
    }
    for number, block in enumerate(stack.block, start=1):
        own, ffn = block.layer[0].SelfAttention, block.layer[-1].DenseReluDense
        tensors[f"{number}.self_norm"] = block.layer[0].layer_norm.weight
        tensors[f"{number}.ffn_norm"] = block.layer[-1].layer_norm.weight
        for name in "qkvo":
            tensors[f"{number}.self_{name}"] = getattr(own, name).weight
        if gated:
            tensors[f"{number}.ffn_gate"] = ffn.wi_0.weight
            tensors[f"{number}.ffn_up"] = ffn.wi_1.weight
        else:
            tensors[f"{number}.ffn_up"] = ffn.wi.weight
        tensors[f"{number}.ffn_down"] = ffn.wo.weight
    return tensors
