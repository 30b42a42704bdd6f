"""New models: from scratch, or from a published checkpoint (hub id or folder in a hub's form)."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from ..checkpoint import load_tensors, read_json
from ..config import Architecture, ShapeConfig
from ..errors import CheckpointError
from .copying import init_copying
from .folder import WEIGHTS, check_tokenizer, read_config
from .frame import frame_of
from .llama_scratch import llama_from_scratch
from .settings import EarlyExitSettings
from .speaking import SpeakingModel
from .t5 import EarlyExitT5
from .t5_folder import share_embeddings, untied_after_all

PUBLISHED_BIN, PARTS_INDEX = "pytorch_model.bin", f"{WEIGHTS}.index.json"


def build_from_scratch(
    shape: ShapeConfig, tokenizer: PreTrainedTokenizerBase, settings: EarlyExitSettings
) -> SpeakingModel:
    """A model of the given shape with the tokenizer's vocabulary, whose loss starts near ln V and that copies early.

    Uses torch's global generator: seed it first.
    """
    if shape.architecture is Architecture.llama:
        return llama_from_scratch(shape, tokenizer, settings)
    return t5_from_scratch(shape, tokenizer, settings)


def t5_from_scratch(shape: ShapeConfig, tokenizer: PreTrainedTokenizerBase, settings: EarlyExitSettings) -> EarlyExitT5:
    """A T5. Hugging Face draws an untied head with std 1, which starts at tens of nats; here its std is d^-0.5, as a
    tied head has through its scale.
    """
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=shape.d_model,
        d_kv=shape.d_kv,
        num_heads=shape.num_heads,
        d_ff=shape.d_ff,
        num_layers=shape.num_layers,
        num_decoder_layers=shape.num_decoder_layers,
        dropout_rate=shape.dropout_rate,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=shape.tied,
    )
    config._attn_implementation = "eager"
    hf = T5ForConditionalGeneration(config)
    share_embeddings(hf, shape.tied)
    if not shape.tied:
        with torch.no_grad():
            hf.lm_head.weight.normal_(0.0, shape.d_model**-0.5)
    init_copying(hf)
    return EarlyExitT5(hf, tokenizer, settings)


def build_from_published(name_or_path: str, settings: EarlyExitSettings) -> SpeakingModel:
    """A published T5 (v1.0, FLAN, v1.1), Llama or OPT: raw config.json, its tokenizer, its weights.

    Weights are safetensors, whole or in parts, or ``pytorch_model.bin``.

    A decoder-only model's prompts get what its tokenizer puts around them (calm.models.frame).

    Raises:
        CheckpointError: the hub cannot be reached, or the folder is incomplete or does not fit its config.
    """
    folder = Path(name_or_path) if Path(name_or_path).is_dir() else _fetch(name_or_path)
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).is_file() and "auto_map" in read_json(folder / name):
            raise CheckpointError(f"{folder / name} asks for code of its own (auto_map), which is never run")
    kind, config, tied = read_config(folder)
    tensors, where = _published_tensors(folder)
    if not tied and "lm_head.weight" not in tensors:
        raise CheckpointError(f"{where} lacks lm_head.weight though config.json says that the head is not tied")
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    if config.is_encoder_decoder:
        tied = tied and not untied_after_all(config, tensors)
    tokenizer = _tokenizer(folder)
    check_tokenizer(tokenizer, int(config.vocab_size), str(folder))
    if not config.is_encoder_decoder:
        settings.source_start, settings.source_end = frame_of(tokenizer)
    return kind.wrap(kind.assemble(config, tied, tensors, where), tokenizer, settings)


def weight_files(folder: Path) -> list[Path]:
    """The files that a published folder's weights are read from: safetensors, whole or in parts, before a .bin.

    Raises:
        CheckpointError: there are none, or the index of the parts is damaged.
    """
    index, parts = folder / PARTS_INDEX, [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and index.is_file():
        named = read_json(index).get("weight_map")
        parts = sorted({str(name) for name in named.values()}) if isinstance(named, dict) else []
        if not parts or any(Path(name).name != name for name in parts):
            raise CheckpointError(f"{index} names no files of weights in its folder")
    elif not (folder / WEIGHTS).is_file():
        parts = [PUBLISHED_BIN]
        if not (folder / PUBLISHED_BIN).is_file():
            raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {PUBLISHED_BIN}; is the download complete?")
    return [folder / name for name in parts]


def _published_tensors(folder: Path) -> tuple[dict[str, Tensor], str]:
    files = weight_files(folder)
    if files[0].name != PUBLISHED_BIN:
        found: dict[str, Tensor] = {}
        for file in files:
            found |= load_tensors(file)
        return found, str(files[0] if len(files) == 1 else folder / PARTS_INDEX)
    pickled = files[0]
    try:
        values: dict[str, Any] = torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or hostile file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{pickled} cannot be read as plain weights: {reason}") from None
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}, str(pickled)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no usable tokenizer: {' '.join(str(error).split())}") from None
    return tokenizer


def _fetch(name: str) -> Path:
    """The hub's folder of a model, from its local cache where it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.model", "*.safetensors", PUBLISHED_BIN]
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=offline))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"cannot fetch {name} ({type(error).__name__}): no hub, or no such model. Give a local folder with "
            f"model.pretrained=<folder>, or train from scratch with +model=tiny"
        ) from None
