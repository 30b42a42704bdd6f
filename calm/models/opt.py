"""An OPT (learned positions, ReLU, LayerNorm before each sublayer, in the 350m variant after) whose layers all speak.

Weights, config, tokenizer and layers are Hugging Face's OPTForCausalLM; the loop over layers is ours. The 350m variant
has no final norm: the residual after a layer is normed already; and its words are narrower than its residual.
"""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, OPTForCausalLM

from .base import BiasKind, DecoderSpec, NormKind
from .causal import CausalModel


class EarlyExitOPT(CausalModel):
    """An OPT, its tokenizer, its exit classifier and its settings."""

    hf: OPTForCausalLM

    @property
    def max_positions(self) -> int:
        return int(self.hf.config.max_position_embeddings)

    def norm(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows width"]:
        decoder = self.hf.model.decoder
        if decoder.final_layer_norm is not None:
            hidden = decoder.final_layer_norm(hidden)
        return hidden if decoder.project_out is None else decoder.project_out(hidden)

    def embed_at(
        self, ids: Int[Tensor, "batch length"], positions: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length d_model"]:
        decoder, places = self.hf.model.decoder, self.hf.model.decoder.embed_positions
        hidden: Tensor = decoder.embed_tokens(ids)
        if decoder.project_in is not None:
            hidden = decoder.project_in(hidden)
        within = positions.clamp(max=self.max_positions - 1)  # only padding stands beyond
        return hidden + F.embedding(within + places.offset, places.weight)

    def run_layer(
        self,
        index: int,
        hidden: Float[Tensor, "batch length d_model"],
        positions: Int[Tensor, "batch length"],
        mask: Float[Tensor, "_ 1 length keys"] | None,
        cache: DynamicCache | None,
    ) -> Float[Tensor, "batch length d_model"]:
        out: Tensor = self.hf.model.decoder.layers[index - 1](
            hidden, attention_mask=mask, cache=cache, use_cache=cache is not None
        )
        return out

    def key_value(
        self, index: int, hidden: Float[Tensor, "batch length d_model"], positions: Int[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch kv_heads length d_kv"], Float[Tensor, "batch kv_heads length d_kv"]]:
        layer = self.hf.model.decoder.layers[index - 1]
        attention = layer.self_attn
        normed = layer.self_attn_layer_norm(hidden) if layer.do_layer_norm_before else hidden
        shape = (*hidden.shape[:2], -1, attention.head_dim)
        key, value = (project(normed).view(shape).transpose(1, 2) for project in (attention.k_proj, attention.v_proj))
        return key, value

    def export_spec(self) -> DecoderSpec:
        config, decoder = self.hf.config, self.hf.model.decoder
        tensors: dict[str, Tensor] = {
            "embed": decoder.embed_tokens.weight,
            "head": self.head_weight,
            "positions": decoder.embed_positions.weight,
        }
        parts = {"final_norm": decoder.final_layer_norm}
        parts |= {"embed_project": decoder.project_in, "head_project": decoder.project_out}
        for number, layer in enumerate(decoder.layers, start=1):
            own = {"self_norm": layer.self_attn_layer_norm, "ffn_norm": layer.final_layer_norm}
            own |= {f"self_{name}": getattr(layer.self_attn, f"{name}_proj") for name in "qkv"}
            own |= {"self_o": layer.self_attn.out_proj, "ffn_up": layer.fc1, "ffn_down": layer.fc2}
            parts |= {f"{number}.{name}": part for name, part in own.items()}
        for name, part in parts.items():
            if part is not None:
                tensors[name] = part.weight
                if part.bias is not None:
                    tensors[f"{name}.bias"] = part.bias
        attention = decoder.layers[0].self_attn
        return DecoderSpec(
            num_layers=self.num_layers,
            num_heads=int(config.num_attention_heads),
            num_kv_heads=int(config.num_attention_heads),
            d_model=self.d_model,
            d_kv=int(attention.head_dim),
            d_ff=int(config.ffn_dim),
            vocab_size=self.vocab_size,
            norm_eps=float(decoder.layers[0].final_layer_norm.eps),
            activation=str(config.activation_function),
            gated=False,
            bias_kind=BiasKind.learned,
            bias_buckets=0,
            bias_max_distance=0,
            cross_attention=False,
            attention_scale=float(attention.scaling),
            head_scale=1.0,
            start_token_id=self.start_token_id,
            eos_token_id=self.eos_token_id,
            pad_token_id=self.pad_token_id,
            tensors={name: tensor.detach() for name, tensor in tensors.items()},
            norm_kind=NormKind.layer,
            pre_norm=bool(config.do_layer_norm_before),
            position_offset=int(decoder.embed_positions.offset),
        )
