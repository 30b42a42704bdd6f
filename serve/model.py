"""What an engine is handed instead of a model: tensors, an encoder to call, text in and out, certificates.

Nothing here imports transformers; ``served`` asks calm for a model folder, which does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from calm.calibration.artifact import Artifact
from calm.calibration.identity import ModelIdentity
from calm.cost import CostTable
from calm.layer_schedule import LayerSchedule
from calm.models.base import DecoderSpec, EncoderSpec
from calm.policies import Full, Policy, SkipSchedule

from .native.encoder import PackedEncoder
from .native.weights import Packed
from .prefill import Encode, Read

if TYPE_CHECKING:
    from calm.models.causal import CausalModel
    from calm.models.speaking import SpeakingModel


class ToIds(Protocol):
    def __call__(self, text: str, cut: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class ServedModel:
    """A model as the engine sees it.

    Attributes:
        spec: the decoder.
        encode: ids and mask -> hidden states of the encoder; None of a decoder-only model.
        read: of a decoder-only model: ids and mask -> K and V of the prompts, (L, rows, KV heads, prompt, d_kv) each,
            and their last hiddens after layer L, (rows, d_model).
        classifier: hidden -> P(exit), fp32; None before it is trained.
        to_ids, to_text: a source's text to ids, with what the model wants around it; ids to text. A longer one than
            ``max_source`` is cut, or a DataError where ``cut`` is false.
        encoder: tensors for the native runner's own encoder; None: ``encode`` is all there is.
        classifier_weights: of the exit classifier: (d_model,) and a bias.
        exit_layers: layers after which a row may leave.
        max_source, max_target: tokens; ``max_target`` is N.
        artifacts: certificates of the folder; ``identity`` says what it is, None for a model without a folder.
        schedule: of layers, that it was trained to be decoded by; None of other models.
        costs: tables that engines of this model measured in this process, by what of their options matters.
    """

    spec: DecoderSpec
    encode: Encode | None
    classifier: Callable[[Tensor], Tensor] | None
    to_ids: ToIds
    to_text: Callable[[Sequence[int]], str]
    exit_layers: tuple[int, ...]
    max_source: int
    max_target: int
    artifacts: tuple[Artifact, ...] = ()
    identity: ModelIdentity | None = None
    encoder: EncoderSpec | None = None
    read: Read | None = None
    classifier_weights: tuple[Tensor, float] | None = None
    schedule: LayerSchedule | None = None
    costs: dict[object, CostTable] = field(default_factory=dict, compare=False, repr=False)
    _packed: dict[int, Packed] = field(default_factory=dict, compare=False, repr=False)
    _packed_encoders: dict[int, PackedEncoder] = field(default_factory=dict, compare=False, repr=False)

    def packed(self, kind: int) -> Packed:
        """Weights for the native runner, packed once for all engines of this model."""
        if kind not in self._packed:
            self._packed[kind] = Packed.of(self.spec, kind)
        return self._packed[kind]

    def packed_encoder(self, kind: int) -> PackedEncoder | None:
        """The same for the encoder; None where there is only ``encode``."""
        if self.encoder is None:
            return None
        if kind not in self._packed_encoders:
            self._packed_encoders[kind] = PackedEncoder.of(self.encoder, self.spec, kind)
        return self._packed_encoders[kind]

    @property
    def usual(self) -> Policy:
        """How requests decode that ask for nothing: at full depth, or by the schedule that the model was trained by."""
        return Full() if self.schedule is None else SkipSchedule(self.schedule)

    @property
    def device(self) -> torch.device:
        return self.spec.tensors["embed"].device

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.tensors["1.self_k"].dtype


def served(
    model: str | Path | SpeakingModel,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    folder: str | Path | None = None,
) -> ServedModel:
    """A model folder, or a model that is loaded already (its own device and dtype then count), ready to be served.

    Args:
        folder: that a loaded model came from, for its certificates.

    Raises:
        CheckpointError: the folder cannot be loaded.
        ConfigError: its lengths are more than its positions.
        CalibrationError: an artifact in it is damaged.
    """
    from calm.architectures import spec_of
    from calm.calibration.artifact import load_artifacts
    from calm.data.text import decode_ids, encode_source
    from calm.decode_checks import check_lengths
    from calm.models.causal import CausalModel
    from calm.models.folder import load
    from calm.models.t5 import EarlyExitT5, export_encoder

    artifacts: list[Artifact] = []
    identity = None
    if isinstance(model, str | Path):
        folder = model
        model = load(folder, device, dtype)
    spec, tokenizer, settings = spec_of(model), model.tokenizer, model.settings
    check_lengths(model, settings.max_target_tokens)
    if folder is not None:
        artifacts = load_artifacts(folder)
        arithmetic = str(spec.tensors["embed"].dtype).removeprefix("torch.")
        identity = ModelIdentity.of(model, folder, dtype=arithmetic)
    linear = model.classifier.linear
    return ServedModel(
        spec=spec,
        encode=model.encode if isinstance(model, EarlyExitT5) else None,
        read=_reader(model) if isinstance(model, CausalModel) else None,
        classifier=model.classifier if settings.has_classifier else None,
        to_ids=lambda text, cut=True: encode_source(tokenizer, text, settings, cut=cut),
        to_text=lambda ids: decode_ids(tokenizer, ids),
        exit_layers=tuple(settings.exit_layers),
        max_source=settings.max_source_tokens,
        max_target=settings.max_target_tokens,
        artifacts=tuple(artifacts),
        identity=identity,
        encoder=export_encoder(model) if isinstance(model, EarlyExitT5) else None,
        schedule=None if settings.skip_schedule is None else LayerSchedule.from_json(settings.skip_schedule),
        classifier_weights=(linear.weight.detach()[0], linear.bias.item()) if settings.has_classifier else None,
    )


def _reader(model: CausalModel) -> Read:
    def read(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = model.read_prompts(ids, mask)
        return *found.stacked(), found.hidden

    return read
