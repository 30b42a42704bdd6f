"""Small random decoder-only models, as tests/scripted.py has T5s."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from calm.models.causal import CausalModel
from calm.models.llama import EarlyExitLlama
from calm.models.opt import EarlyExitOPT

from .scripted import id_tokenizer, settings

V = 97


def random_llama(
    *,
    seed: int = 0,
    tied: bool = False,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 4,
    width: int = 32,
    vocabulary: int = V,
    **other: Any,
) -> LlamaForCausalLM:
    """A small random Llama whose layers disagree and whose answers vary and end: sharp attention, strong branches."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=tied, **other,
    )  # fmt: skip
    config._attn_implementation = "eager"
    hf = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        hf.model.embed_tokens.weight.normal_(0.0, 0.3)
        for layer in hf.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                part.weight.normal_(0.0, 0.4)
            layer.self_attn.o_proj.weight.normal_(0.0, 0.3)
            for part in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                part.weight.normal_(0.0, 0.2)
            for name, parameter in layer.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.2)
        if not tied:
            hf.lm_head.weight.normal_(0.0, 0.5)
            hf.lm_head.weight[1] *= 1.5  # so that some answers end
    return hf


def early_llama(hf: LlamaForCausalLM, *, length: int = 12, seed: int = 0) -> CausalModel:
    """Wrap with a random exit classifier, so that its probabilities vary by layer and token."""
    own = settings(hf.config.num_hidden_layers, length=length)
    model = EarlyExitLlama(hf, id_tokenizer(hf.config.vocab_size), own)
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.classifier.linear.weight, std=0.3)
    return model.eval()


def random_opt(
    *, seed: int = 0, pre_norm: bool = True, words: int = 32, layers: int = 4, width: int = 32, **other: Any
) -> OPTForCausalLM:
    """A small random OPT; ``words`` is the width of its embedding, narrower than the residual in the 350m variant."""
    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=V, hidden_size=width, ffn_dim=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=64, do_layer_norm_before=pre_norm, word_embed_proj_dim=words, dropout=0.0,
        bos_token_id=2, eos_token_id=1, pad_token_id=0, **other,
    )  # fmt: skip
    config._attn_implementation = "eager"
    hf = OPTForCausalLM(config).eval()
    decoder = hf.model.decoder
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + name.endswith("weight"))
            else:
                parameter.normal_(0.0, 0.3 if "attn" in name or "embed" in name else 0.2)
        hf.lm_head.weight[1] *= 1.2  # so that some answers end
    return hf


def early_opt(hf: OPTForCausalLM) -> CausalModel:
    model = EarlyExitOPT(hf, id_tokenizer(V), settings(hf.config.num_hidden_layers))
    torch.manual_seed(0)
    torch.nn.init.normal_(model.classifier.linear.weight, std=0.3)
    return model.eval()
