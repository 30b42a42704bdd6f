"""What a folder says of a T5: its config, its weights and how both are put together."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from ..errors import CheckpointError
from .fitting import put_in, without_head_copy
from .speaking import SpeakingModel
from .t5 import EarlyExitT5

ARCHITECTURE = "T5ForConditionalGeneration"
wrap = EarlyExitT5
EMBEDDING_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# written by T5 checkpoints before 2021; T5 has no bias in cross-attention
SPURIOUS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def read_config(values: dict[str, Any], path: Path) -> tuple[T5Config, bool]:
    """The T5Config, and whether the head is tied (from the raw file: T5Config forgets it)."""
    config = T5Config.from_dict(values)
    config._attn_implementation = "eager"
    return config, values.get("tie_word_embeddings", True) is not False


def untied_after_all(config: T5Config, tensors: dict[str, Tensor]) -> bool:
    """transformers 5 says ``tie_word_embeddings: true`` of every T5 it writes; the scale and the tensors tell."""
    shared, head = tensors.get("shared.weight"), tensors.get("lm_head.weight")
    if config.scale_decoder_outputs or shared is None or head is None:
        return False
    return not torch.equal(shared, head)


def assemble(config: T5Config, tied: bool, tensors: dict[str, Tensor], where: str) -> T5ForConditionalGeneration:
    """Put tensors into a T5 built without weights; every key and shape must match once tied weights are resolved.

    Raises:
        CheckpointError: names what does not match.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if name != SPURIOUS}
    shared = tensors.get("shared.weight")
    for name in EMBEDDING_COPIES:
        copy = tensors.pop(name, None)
        if copy is not None and shared is not None and not torch.equal(copy, shared):
            raise CheckpointError(f"{where}: {name} differs from shared.weight; a T5 has one input embedding")
    if tied:
        tensors = without_head_copy(tensors, "shared.weight", where)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    put_in(model, tensors, _copies(tied), where)
    share_embeddings(model, tied)
    model.generation_config = GenerationConfig.from_model_config(config)
    return model.eval()


def share_embeddings(model: T5ForConditionalGeneration, tied: bool) -> None:
    """One input embedding; the head is the same parameter when tied, else its own (transformers 5 would tie it)."""
    model.encoder.embed_tokens.weight = model.shared.weight
    model.decoder.embed_tokens.weight = model.shared.weight
    if tied:
        model.lm_head.weight = model.shared.weight
    elif model.lm_head.weight is model.shared.weight:
        model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone())


def weights(model: SpeakingModel) -> dict[str, Tensor]:
    """Every tensor once, by its Hugging Face name, without the exit classifier."""
    skip = _copies(model.tied)
    return {name: tensor.detach() for name, tensor in model.hf.state_dict().items() if name not in skip}


def more_config(model: SpeakingModel) -> dict[str, Any]:
    """What config.json must say beyond what T5Config writes of itself."""
    return {"scale_decoder_outputs": bool(model.hf.config.scale_decoder_outputs)}


def generation_config(model: SpeakingModel) -> GenerationConfig:
    config = GenerationConfig(
        decoder_start_token_id=model.start_token_id,
        eos_token_id=model.eos_token_id,
        pad_token_id=model.pad_token_id,
        max_new_tokens=model.settings.max_target_tokens,
    )
    if model.num_layers > int(model.hf.config.num_layers):
        # transformers 5.24 sizes its cache by the encoder's layers and fails beyond them
        config.use_cache = False
    return config


def _copies(tied: bool) -> tuple[str, ...]:
    return (*EMBEDDING_COPIES, "lm_head.weight") if tied else EMBEDDING_COPIES
