"""A model folder: a plain T5, Llama or OPT that Auto classes and CTranslate2 open unchanged, plus our sidecars.

    config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json README.md
    early_exit.json exit_classifier.safetensors calibration/*.json MANIFEST.json

What does not match (keys with tied weights resolved, shapes, hashes) is refused by name: nothing is ever left at
random weights, and nothing in a folder is executed.
"""

import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

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
from . import llama_folder, opt_folder, t5_folder
from .card import model_card
from .causal import CausalModel
from .settings import EarlyExitSettings
from .speaking import SpeakingModel

WEIGHTS, CLASSIFIER, SETTINGS = "model.safetensors", "exit_classifier.safetensors", "early_exit.json"
PICKLED = ("*.bin", "*.pkl", "*.pickle", "*.pt", "*.pth", "*.ckpt")


@runtime_checkable  # argument checks in tests ask isinstance
class Kind(Protocol):
    """What a module such as ``t5_folder`` knows of folders of its architecture."""

    ARCHITECTURE: str

    @property
    def wrap(self) -> type[SpeakingModel]: ...
    def read_config(self, values: dict[str, Any], path: Path) -> tuple[Any, bool]: ...
    def assemble(self, config: Any, tied: bool, tensors: dict[str, Tensor], where: str) -> Any: ...
    def weights(self, model: SpeakingModel) -> dict[str, Tensor]: ...
    def more_config(self, model: SpeakingModel) -> dict[str, Any]: ...
    def generation_config(self, model: SpeakingModel) -> Any: ...


KINDS: dict[str, Kind] = {"t5": t5_folder, "llama": llama_folder, "opt": opt_folder}  # by the model_type of config.json


def save(model: SpeakingModel, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
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
    kind = KINDS[model.hf.config.model_type]
    tensors = {name: tensor.to(dtype) for name, tensor in kind.weights(model).items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with atomic_folder(folder, failpoints="model", needed=size) as temporary:
        save_tensors(temporary / WEIGHTS, tensors)
        write_json(temporary / "config.json", _config_values(kind, model, dtype))
        kind.generation_config(model).save_pretrained(temporary)
        model.tokenizer.save_pretrained(temporary)
        write_json(temporary / SETTINGS, model.settings.to_json())
        if model.settings.has_classifier:
            save_tensors(temporary / CLASSIFIER, model.classifier.linear.state_dict())
        write_atomic(temporary / "README.md", model_card(model))
    return Path(folder)


def load(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> SpeakingModel:
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
            f"{folder} has no {SETTINGS}: it is no early-exit model folder. To train one from a plain folder: "
            f"python -m train +model=small model.pretrained={folder}"
        )
    verify_manifest(folder, ignore=["calibration/*"], allow_unlisted=True)
    kind, config, tied = read_config(folder)
    settings = EarlyExitSettings.from_json(read_json(folder / SETTINGS), str(folder / SETTINGS))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    check_tokenizer(tokenizer, int(config.vocab_size), str(folder))
    hf = kind.assemble(config, tied, load_tensors(folder / WEIGHTS), str(folder / WEIGHTS))
    model = kind.wrap(hf, tokenizer, settings)
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


def read_config(folder: Path) -> tuple[Kind, Any, bool]:
    """The kind of a folder, its config, and whether its head is tied."""
    path = folder / "config.json"
    values = read_json(path)
    kind = KINDS.get(values.get("model_type", ""))
    if kind is None:
        known = ", ".join(repr(name) for name in KINDS)
        raise CheckpointError(f"{path}: model_type is {values.get('model_type')!r}, expected one of {known}")
    if values.get("dtype", values.get("torch_dtype")) == "float16":
        raise CheckpointError(f"{path}: {FP16_REFUSED}")
    return kind, *kind.read_config(values, path)


def is_decoder_only(folder: str | Path) -> bool:
    """By its config alone. Raise CheckpointError as ``read_config`` does."""
    refuse_foreign(Path(folder))
    return issubclass(read_config(Path(folder))[0].wrap, CausalModel)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocabulary: int, where: str) -> None:
    """Raise CheckpointError where the tokenizer has words that the model cannot read, or no end of text."""
    if tokenizer.eos_token_id is None:
        raise CheckpointError(f"{where}: its tokenizer names no EOS token, so no answer could end")
    if len(tokenizer) > vocabulary:
        raise CheckpointError(
            f"{where}: its tokenizer has {len(tokenizer)} words and the model {vocabulary}; they are not of one model"
        )


def _load_classifier(model: SpeakingModel, path: Path) -> None:
    tensors = load_tensors(path)
    try:
        model.classifier.linear.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the model: {' '.join(str(error).split())}") from None


def _config_values(kind: Kind, model: SpeakingModel, dtype: torch.dtype) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(model.hf.config.to_json_string(use_diff=False))
    values |= {"architectures": [kind.ARCHITECTURE], "tie_word_embeddings": model.tied, **kind.more_config(model)}
    values["dtype"] = str(dtype).removeprefix("torch.")
    for name in ("_name_or_path", "_attn_implementation"):
        values.pop(name, None)
    return values


__all__ = [
    "MANIFEST",
    "add_sidecar",
    "check_tokenizer",
    "is_decoder_only",
    "load",
    "read_config",
    "refuse_foreign",
    "save",
]
