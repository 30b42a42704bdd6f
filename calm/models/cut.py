"""A model's first decoder layers alone: what a shallow model can start from."""

from torch import nn

from ..errors import ConfigError
from .speaking import SpeakingModel
from .t5 import t5_only


def keep_first_layers(model: SpeakingModel, layers: int) -> SpeakingModel:
    """The model itself, with its first ``layers`` decoder layers and no others; exits above them are gone.

    At full depth it then says what ``static(layers)`` said before.

    Raises:
        ConfigError: not 2..L layers; one alone has nowhere to exit. The model is no T5.
    """
    if not 2 <= layers <= model.num_layers:
        raise ConfigError(
            f"decoder_layers={layers} of a checkpoint of {model.num_layers}; give 2 to {model.num_layers}"
        )
    decoder = t5_only(model, "decoder_layers=").hf.decoder
    decoder.block = nn.ModuleList(list(decoder.block)[:layers])
    decoder.config.num_layers = layers
    model.hf.config.num_decoder_layers = layers
    model.settings.exit_layers = [layer for layer in model.settings.exit_layers if layer < layers]
    model.settings.skip_schedule = None  # it named layers of the whole model
    return model
