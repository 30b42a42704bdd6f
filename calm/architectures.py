"""Which decoders read which architecture: the one place of calm's decoders that knows them all."""

from jaxtyping import Bool, Int
from torch import Tensor

from .batch_causal import CausalLayers
from .batch_layers import BatchCaches, BatchLayers
from .models.base import DecoderAdapter, DecoderSpec
from .models.causal import CausalAdapter, CausalModel
from .models.speaking import SpeakingModel
from .models.t5 import export_spec, t5_only
from .models.t5_adapter import T5Adapter


def adapter_of(model: SpeakingModel) -> DecoderAdapter:
    """The reference side of a model."""
    return CausalAdapter(model) if isinstance(model, CausalModel) else T5Adapter(t5_only(model, "this decoder"))


def spec_of(model: SpeakingModel) -> DecoderSpec:
    """The decoder as tensors and flags."""
    return model.export_spec() if isinstance(model, CausalModel) else export_spec(t5_only(model, "this decoder"))


def layers_over(
    model: SpeakingModel,
    spec: DecoderSpec,
    source_ids: Int[Tensor, "batch source"],
    source_mask: Bool[Tensor, "batch source"],
    max_steps: int,
) -> BatchCaches:
    """The decoder's layers over a batch whose sources have been encoded, or whose prompts have been read."""
    if isinstance(model, CausalModel):
        read = model.read_prompts(source_ids, source_mask)
        return CausalLayers(spec, *read.stacked(), read.hidden, source_mask, max_steps)
    encoded = t5_only(model, "this decoder").encode(source_ids, source_mask)
    return BatchLayers(spec, encoded, source_mask, max_steps)
