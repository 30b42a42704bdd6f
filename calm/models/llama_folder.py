"""What a folder says of a Llama: its config, its weights and how both are put together."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..errors import CheckpointError
from .causal_folder import generation_config, more_config, state_once
from .fitting import put_in, without_head_copy
from .llama import EarlyExitLlama
from .speaking import SpeakingModel

ARCHITECTURE = "LlamaForCausalLM"
wrap = EarlyExitLlama
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ACTIVATIONS = ("silu", "gelu", "relu")
LENGTH_DEPENDENT = ("dynamic", "longrope")  # their angles change as a text grows, and kept keys would no longer fit
SPURIOUS = ".rotary_emb.inv_freq"  # written by older checkpoints; it follows from the config


def read_config(values: dict[str, Any], path: Path) -> tuple[LlamaConfig, bool]:
    """The LlamaConfig, and whether the head is tied.

    Raises:
        CheckpointError: it asks for an activation or for rotary positions that the decoders do not have.
    """
    config = LlamaConfig.from_dict(values)
    config._attn_implementation = "eager"
    if config.hidden_act not in ACTIVATIONS:
        raise CheckpointError(f"{path}: hidden_act {config.hidden_act!r} is none of {', '.join(ACTIVATIONS)}")
    rope = config.rope_parameters["rope_type"]
    if rope in LENGTH_DEPENDENT:
        raise CheckpointError(f"{path}: rope_type {rope!r} changes its angles as a text grows; that is not supported")
    return config, bool(config.tie_word_embeddings)


def assemble(config: LlamaConfig, tied: bool, tensors: dict[str, Tensor], where: str) -> LlamaForCausalLM:
    """Put tensors into a Llama built without weights; every key and shape must match once a tied head is resolved.

    Raises:
        CheckpointError: names what does not match.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(SPURIOUS)}
    if tied:
        tensors = without_head_copy(tensors, EMBEDDING, where)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    put_in(model, tensors, (HEAD,) if tied else (), where)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its angles are no weights: still on the meta device
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.generation_config = GenerationConfig.from_model_config(config)
    return model.eval()


def weights(model: SpeakingModel) -> dict[str, Tensor]:
    """Every tensor once, by its Hugging Face name, without the exit classifier."""
    return state_once(model, HEAD)


__all__ = ["ARCHITECTURE", "assemble", "generation_config", "more_config", "read_config", "weights", "wrap"]
