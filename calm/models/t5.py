"""A T5 (v1.0, FLAN, v1.1) whose every decoder layer can speak through the shared norm and head.

CALM (Schuster et al., 2022), section 3: the token distribution after layer i is the shared head applied to
the shared final norm of that layer's residual stream. The exit classifier reads the raw residual stream.
Weights, config and tokenizer are Hugging Face's; the loop over decoder layers is ours.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, T5ForConditionalGeneration

from .base import BiasKind, DecoderSpec, EncoderSpec
from .settings import EarlyExitSettings


class ExitClassifier(nn.Module):
    """P(exit) = sigmoid(w.h + b): one linear layer for all layers, in fp32, d + 1 parameters (CALM section 3.5)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_model, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def logit(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows"]:
        weight, bias = self.linear.weight.float(), self.linear.bias.float()
        return F.linear(hidden.float(), weight, bias).squeeze(-1)

    def forward(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows"]:
        return self.logit(hidden).sigmoid()


class EarlyExitT5(nn.Module):
    """A T5, its tokenizer, its exit classifier and its settings."""

    def __init__(
        self, hf: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, settings: EarlyExitSettings
    ) -> None:
        super().__init__()
        self.hf = hf
        self.tokenizer = tokenizer
        self.settings = settings
        self.classifier = ExitClassifier(int(hf.config.d_model))

    @property
    def num_layers(self) -> int:
        return int(self.hf.config.num_decoder_layers)

    @property
    def d_model(self) -> int:
        return int(self.hf.config.d_model)

    @property
    def vocab_size(self) -> int:
        return int(self.hf.config.vocab_size)

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
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def tied(self) -> bool:
        return self.hf.lm_head.weight is self.hf.shared.weight

    @property
    def head_weight(self) -> Tensor:
        """The shared LM head, (V, D)."""
        return cast(Tensor, self.hf.lm_head.weight)

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
    ) -> list[Float[Tensor, "batch target d_model"]]:
        """Teacher forcing at full depth: the raw residual stream after every decoder layer."""
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
        for block in decoder.block:
            # positionally, as gradient checkpointing wants it
            hidden = block(hidden, causal, bias, encoder_hidden, source_mask, no_bias)[0]
            hiddens.append(hidden)
        return hiddens

    def norm(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """Shared final norm, output dropout (train mode) and the v1.0 scale: what the head is applied to."""
        normed: Tensor = self.hf.decoder.dropout(self.hf.decoder.final_layer_norm(hidden))
        return normed * self.head_scale if self.head_scale != 1.0 else normed

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        return F.linear(self.norm(hidden), self.head_weight)


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
