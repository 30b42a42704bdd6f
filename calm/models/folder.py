"""A model folder: a plain T5 that Auto classes and CTranslate2 open unchanged, plus our sidecars.

    config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json README.md
    early_exit.json exit_classifier.safetensors calibration/*.json MANIFEST.json

What does not match (keys with tied weights resolved, shapes, hashes) is refused by name: nothing is ever left at
random weights, and nothing in a folder is executed.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, T5Config, T5ForConditionalGeneration

from ..checkpoint import (
    MANIFEST,
    atomic_folder,
    load_tensors,
    read_json,
    save_tensors,
    verify_manifest,
    write_atomic,
    write_json,
    write_manifest,
)
from ..errors import FP16_REFUSED, CheckpointError
from .card import model_card
from .settings import EarlyExitSettings
from .t5 import EarlyExitT5

WEIGHTS, CLASSIFIER, SETTINGS = "model.safetensors", "exit_classifier.safetensors", "early_exit.json"
PICKLED = ("*.bin", "*.pkl", "*.pickle", "*.pt", "*.pth", "*.ckpt")
EMBEDDING_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# written by T5 checkpoints before 2021; T5 has no bias in cross-attention
SPURIOUS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def save(model: EarlyExitT5, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write the whole folder atomically; an existing one is replaced, its calibration with it.

    Args:
        dtype: of the stored weights, fp32 or bf16; default as the model is.

    Raises:
        CheckpointError: no tokenizer, fp16, or the disk refuses.
    """
    if model.tokenizer is None:
        raise CheckpointError(f"{folder}: a model folder needs its tokenizer, and this model has none")
    dtype = dtype or model.dtype
    if dtype is torch.float16:
        raise CheckpointError(FP16_REFUSED)
    tensors = {name: tensor.to(dtype) for name, tensor in weights(model).items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with atomic_folder(folder, failpoints="model", needed=size) as temporary:
        save_tensors(temporary / WEIGHTS, tensors)
        write_json(temporary / "config.json", _config_values(model, dtype))
        _generation_config(model).save_pretrained(temporary)
        model.tokenizer.save_pretrained(temporary)
        write_json(temporary / SETTINGS, model.settings.to_json())
        if model.settings.has_classifier:
            save_tensors(temporary / CLASSIFIER, model.classifier.linear.state_dict())
        write_atomic(temporary / "README.md", model_card(model))
    return Path(folder)


def load(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> EarlyExitT5:
    """Open a model folder in eval mode; arithmetic in ``dtype``, whatever the weights are stored in.

    Raises:
        CheckpointError: names the first thing that does not match.
    """
    folder = Path(folder)
    if dtype is torch.float16:
        raise CheckpointError(FP16_REFUSED)
    refuse_foreign(folder)
    if not (folder / SETTINGS).is_file():
        raise CheckpointError(
            f"{folder} has no {SETTINGS}: it is no early-exit model folder. To train one from a plain T5 folder: "
            f"python -m train +model=small model.pretrained={folder}"
        )
    verify_manifest(folder, ignore=["calibration/*"], allow_unlisted=True)
    config, tied = read_config(folder)
    settings = EarlyExitSettings.from_json(read_json(folder / SETTINGS), str(folder / SETTINGS))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    hf = assemble(config, tied, load_tensors(folder / WEIGHTS), str(folder / WEIGHTS))
    model = EarlyExitT5(hf, tokenizer, settings)
    if settings.has_classifier:
        _load_classifier(model, folder / CLASSIFIER)
    model.to(dtype)
    model.classifier.float()
    return model.to(device).eval()


def add_sidecar(folder: str | Path, name: str, content: str) -> Path:
    """Put a file beside the weights and list it in the manifest. A crash in between leaves the folder loadable."""
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    write_manifest(folder)
    return path


def refuse_foreign(folder: Path) -> None:
    """Refuse what is no folder, and what could run code: pickled files, ``auto_map``."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; checkpoint= takes the path of a model folder")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; checkpoint= takes the path of a model folder")
    for pattern in PICKLED:
        for path in folder.glob(pattern):
            raise CheckpointError(
                f"{path} is a pickled file, which can run code when it is opened; remove it, or convert a published "
                f"checkpoint once with python -m train +model=small model.pretrained={folder}"
            )
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file() and "auto_map" in read_json(path):
            raise CheckpointError(f"{path} asks for code of its own (auto_map); remove that entry")


def read_config(folder: Path) -> tuple[T5Config, bool]:
    """The T5Config of a folder, and whether its head is tied (from the raw file: T5Config forgets it)."""
    values = read_json(folder / "config.json")
    if values.get("model_type") != "t5":
        raise CheckpointError(f"{folder / 'config.json'}: model_type is {values.get('model_type')!r}, expected 't5'")
    if values.get("dtype", values.get("torch_dtype")) == "float16":
        raise CheckpointError(f"{folder / 'config.json'}: {FP16_REFUSED}")
    config = T5Config.from_dict(values)
    config._attn_implementation = "eager"
    return config, values.get("tie_word_embeddings", True) is not False


def assemble(config: T5Config, tied: bool, tensors: dict[str, Tensor], where: str) -> T5ForConditionalGeneration:
    """Put tensors into a T5 built without weights; every key and shape must match once tied weights are resolved.

    Raises:
        CheckpointError: lists the first five keys that are missing, unexpected or of another shape.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if name != SPURIOUS}
    shared = tensors.get("shared.weight")
    for name in EMBEDDING_COPIES:
        copy = tensors.pop(name, None)
        if copy is not None and shared is not None and not torch.equal(copy, shared):
            raise CheckpointError(f"{where}: {name} differs from shared.weight; a T5 has one input embedding")
    if tied and shared is not None and "lm_head.weight" in tensors:
        if not torch.equal(tensors.pop("lm_head.weight"), shared):
            raise CheckpointError(f"{where}: config.json ties the head, yet lm_head.weight differs from shared.weight")
    if any(tensor.dtype is torch.float16 for tensor in tensors.values()):
        tensors = {name: tensor.float() for name, tensor in tensors.items()}  # published storage, not arithmetic
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in EMBEDDING_COPIES}
    if tied:
        expected.pop("lm_head.weight")
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, config.json asks for {tuple(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{where} does not fit config.json: {'; '.join(problems[:5])}{more}")
    model.load_state_dict(tensors, strict=False, assign=True)
    share_embeddings(model, tied)
    model.requires_grad_(True)
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


def weights(model: EarlyExitT5) -> dict[str, Tensor]:
    """Every tensor once, by its Hugging Face name, without the exit classifier."""
    skip = set(EMBEDDING_COPIES) | ({"lm_head.weight"} if model.tied else set())
    return {name: tensor.detach() for name, tensor in model.hf.state_dict().items() if name not in skip}


def _load_classifier(model: EarlyExitT5, path: Path) -> None:
    tensors = load_tensors(path)
    try:
        model.classifier.linear.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the model: {' '.join(str(error).split())}") from None


def _config_values(model: EarlyExitT5, dtype: torch.dtype) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(model.hf.config.to_json_string(use_diff=False))
    values["architectures"] = ["T5ForConditionalGeneration"]
    values["tie_word_embeddings"] = model.tied
    values["scale_decoder_outputs"] = bool(model.hf.config.scale_decoder_outputs)
    values["dtype"] = str(dtype).removeprefix("torch.")
    for name in ("_name_or_path", "_attn_implementation"):
        values.pop(name, None)
    return values


def _generation_config(model: EarlyExitT5) -> GenerationConfig:
    config = GenerationConfig(
        decoder_start_token_id=model.start_token_id,
        eos_token_id=model.eos_token_id,
        pad_token_id=model.pad_token_id,
        max_new_tokens=model.settings.max_target_tokens,
    )
    if deeper_decoder(model):
        # transformers 5.24 sizes its cache by the encoder's layers and fails beyond them
        config.use_cache = False
    return config


def deeper_decoder(model: EarlyExitT5) -> bool:
    return model.num_layers > int(model.hf.config.num_layers)


__all__ = ["MANIFEST", "add_sidecar", "assemble", "load", "read_config", "refuse_foreign", "save", "weights"]
