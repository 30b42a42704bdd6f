"""What decoders, measures, calibration, losses and training ask of a model, whatever its architecture.

CALM (Schuster et al., 2022), section 3: the token distribution after layer i is the shared head applied to the shared
final norm of that layer's residual stream. The exit classifier reads the raw residual stream.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

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


class SpeakingModel(nn.Module, ABC):
    """A Hugging Face model whose every decoder layer can speak, its tokenizer, its exit classifier and its settings.

    Layers count from 1. "Source" is what is given, "target" what is answered: an encoder's input and a decoder's for
    T5, one sequence for a decoder-only model.
    """

    def __init__(self, hf: Any, tokenizer: PreTrainedTokenizerBase, settings: EarlyExitSettings) -> None:
        super().__init__()
        self.hf = hf
        self.tokenizer = tokenizer
        self.settings = settings
        self.classifier = ExitClassifier(self.d_model)

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Decoder layers, L."""

    @property
    @abstractmethod
    def d_model(self) -> int:
        """Width of the residual stream."""

    @property
    def vocab_size(self) -> int:
        """Rows of the head; the tokenizer may have fewer words."""
        return int(self.hf.config.vocab_size)

    @property
    @abstractmethod
    def eos_token_id(self) -> int:
        """The token that ends an answer."""

    @property
    @abstractmethod
    def pad_token_id(self) -> int: ...

    @property
    @abstractmethod
    def start_token_id(self) -> int:
        """What stands before a target's first token in ``decoder_ids``; a decoder-only model never reads it."""

    @property
    def max_positions(self) -> int | None:
        """Tokens of prompt and answer together that the model can tell the places of; None where nothing ends them."""
        return None

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def tied(self) -> bool:
        """Whether head and input embedding are one parameter."""
        return bool(self.hf.lm_head.weight is self.hf.get_input_embeddings().weight)

    @property
    def head_weight(self) -> Tensor:
        """The shared LM head, (V, width that ``norm`` gives)."""
        return cast(Tensor, self.hf.lm_head.weight)

    @abstractmethod
    def norm(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows width"]:
        """What the head is applied to: the shared final norm, and what else the architecture does before its head."""

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        return F.linear(self.norm(hidden), self.head_weight)

    @abstractmethod
    def answer_hiddens(
        self,
        source_ids: Int[Tensor, "batch source"],
        source_mask: Bool[Tensor, "batch source"],
        decoder_ids: Int[Tensor, "batch target"],
        reach: Sequence[int] | None = None,
    ) -> list[Float[Tensor, "batch target d_model"]]:
        """Teacher forcing: the raw residual stream after every layer where target tokens are predicted.

        Args:
            source_ids: padded on the right.
            decoder_ids: the target moved right by one, ``start_token_id`` first.
            reach: for each layer how many steps of an answer run it, at least one and always the first ones
                (calm.layer_schedule); the others pass it by, and their residual with them. The source runs every layer.
                Default: full depth.
        """
