"""What folders of all decoder-only models say alike."""

from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from .speaking import SpeakingModel


def state_once(model: SpeakingModel, head: str) -> dict[str, Tensor]:
    """Every tensor once, by its Hugging Face name, without the exit classifier; ``head`` only where it is its own."""
    state = model.hf.state_dict()
    return {name: tensor.detach() for name, tensor in state.items() if not (model.tied and name == head)}


def more_config(model: SpeakingModel) -> dict[str, Any]:
    """What config.json must say beyond what the config writes of itself: nothing."""
    return {}


def generation_config(model: SpeakingModel) -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=model.hf.config.bos_token_id,
        eos_token_id=model.eos_token_id,
        pad_token_id=model.pad_token_id,
        max_new_tokens=model.settings.max_target_tokens,
    )
