"""A Llama-architecture model (RMSNorm, rotary positions, grouped K/V heads, gated SiLU) whose every layer can speak.

Weights, config, tokenizer and layers are Hugging Face's LlamaForCausalLM; the loop over layers is ours.
"""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .base import BiasKind, DecoderSpec
from .causal import CausalModel


class EarlyExitLlama(CausalModel):
    """A Llama, its tokenizer, its exit classifier and its settings."""

    hf: LlamaForCausalLM

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "EarlyExitLlama":
        """Of whatever moves or casts a module; the frequencies of rotary positions move but stay fp32."""
        rotary = self.hf.model.rotary_emb
        kept: Tensor = rotary.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if rotary.inv_freq.dtype != kept.dtype:
            rotary.inv_freq = kept.to(rotary.inv_freq.device)
        return self

    def norm(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        normed: Tensor = self.hf.model.norm(hidden)
        return normed

    def embed_at(
        self, ids: Int[Tensor, "batch length"], positions: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length d_model"]:
        hidden: Tensor = self.hf.model.embed_tokens(ids)
        return hidden

    def run_layer(
        self,
        index: int,
        hidden: Float[Tensor, "batch length d_model"],
        positions: Int[Tensor, "batch length"],
        mask: Float[Tensor, "_ 1 length keys"] | None,
        cache: DynamicCache | None,
    ) -> Float[Tensor, "batch length d_model"]:
        out: Tensor = self.hf.model.layers[index - 1](
            hidden,
            attention_mask=mask,
            cache=cache,
            use_cache=cache is not None,
            position_embeddings=self.hf.model.rotary_emb(hidden, position_ids=positions),
        )
        return out

    def key_value(
        self, index: int, hidden: Float[Tensor, "batch length d_model"], positions: Int[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch kv_heads length d_kv"], Float[Tensor, "batch kv_heads length d_kv"]]:
        layer = self.hf.model.layers[index - 1]
        normed, attention = layer.input_layernorm(hidden), layer.self_attn
        shape = (*hidden.shape[:2], -1, attention.head_dim)
        key = attention.k_proj(normed).view(shape).transpose(1, 2)
        value = attention.v_proj(normed).view(shape).transpose(1, 2)
        cosine, sine = self.hf.model.rotary_emb(hidden, position_ids=positions)
        return apply_rotary_pos_emb(key, key, cosine, sine)[1], value

    def export_spec(self) -> DecoderSpec:
        config, model = self.hf.config, self.hf.model
        tensors: dict[str, Tensor] = {
            "embed": model.embed_tokens.weight,
            "head": self.head_weight,
            "final_norm": model.norm.weight,
            "rotary": model.rotary_emb.inv_freq,
        }
        for number, layer in enumerate(model.layers, start=1):
            tensors[f"{number}.self_norm"] = layer.input_layernorm.weight
            tensors[f"{number}.ffn_norm"] = layer.post_attention_layernorm.weight
            parts = {f"self_{name}": getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"}
            parts |= {f"ffn_{name}": getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")}
            for name, part in parts.items():
                tensors[f"{number}.{name}"] = part.weight
                if part.bias is not None:
                    tensors[f"{number}.{name}.bias"] = part.bias
        head_dim = int(model.layers[0].self_attn.head_dim)
        return DecoderSpec(
            num_layers=self.num_layers,
            num_heads=int(config.num_attention_heads),
            num_kv_heads=int(config.num_key_value_heads),
            d_model=self.d_model,
            d_kv=head_dim,
            d_ff=int(config.intermediate_size),
            vocab_size=self.vocab_size,
            norm_eps=float(config.rms_norm_eps),
            activation=str(config.hidden_act),
            gated=True,
            bias_kind=BiasKind.rotary,
            bias_buckets=0,
            bias_max_distance=0,
            cross_attention=False,
            attention_scale=head_dim**-0.5,
            head_scale=1.0,
            start_token_id=self.start_token_id,
            eos_token_id=self.eos_token_id,
            pad_token_id=self.pad_token_id,
            tensors={name: tensor.detach() for name, tensor in tensors.items()},
            rotary_scale=float(model.rotary_emb.attention_scaling),
        )
