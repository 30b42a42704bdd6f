"""What a folder says of an OPT: its config, its weights and how both are put together."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, OPTConfig, OPTForCausalLM

from ..errors import CheckpointError
from .causal_folder import generation_config, more_config, state_once
from .fitting import put_in, without_head_copy
from .opt import EarlyExitOPT
from .speaking import SpeakingModel

ARCHITECTURE = "OPTForCausalLM"
wrap = EarlyExitOPT
EMBEDDING, HEAD = "model.decoder.embed_tokens.weight", "lm_head.weight"
ACTIVATIONS = ("relu", "gelu")


def read_config(values: dict[str, Any], path: Path) -> tuple[OPTConfig, bool]:
    """The OPTConfig, and whether the head is tied.

    Raises:
        CheckpointError: it asks for an activation or for norms that the decoders do not have.
    """
    config = OPTConfig.from_dict(values)
    config._attn_implementation = "eager"
    if config.activation_function not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise CheckpointError(f"{path}: activation_function {config.activation_function!r} is none of {known}")
    if not config.layer_norm_elementwise_affine:
        raise CheckpointError(f"{path}: norms without weights (layer_norm_elementwise_affine) are not supported")
    return config, bool(config.tie_word_embeddings)


def assemble(config: OPTConfig, tied: bool, tensors: dict[str, Tensor], where: str) -> OPTForCausalLM:
    """Put tensors into an OPT built without weights; every key and shape must match once a tied head is resolved.

    Raises:
        CheckpointError: names what does not match.
    """
    if "decoder.embed_tokens.weight" in tensors:  # published without its head, as Meta's own files are
        tensors = {name if name == HEAD else f"model.{name}": tensor for name, tensor in tensors.items()}
    if tied:
        tensors = without_head_copy(tensors, EMBEDDING, where)
    with torch.device("meta"):
        model = OPTForCausalLM(config)
    put_in(model, tensors, (HEAD,) if tied else (), where)
    if tied:
        model.lm_head.weight = model.model.decoder.embed_tokens.weight
    model.generation_config = GenerationConfig.from_model_config(config)
    return model.eval()


def weights(model: SpeakingModel) -> dict[str, Tensor]:
    """Every tensor once, by its Hugging Face name, without the exit classifier."""
    return state_once(model, HEAD)


__all__ = ["ARCHITECTURE", "assemble", "generation_config", "more_config", "read_config", "weights", "wrap"]
