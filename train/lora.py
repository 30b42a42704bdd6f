"""Low-rank adapters on frozen weights (Hu et al., arXiv 2106.09685, section 4.1), through peft, met here alone.

What is saved as a model is always the plain one, the adapters' products added in. The adapters alone are kept beside
it as peft's own files with the hash of the weights that they were made on: they mean nothing on others.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from torch import Tensor, nn

from calm.checkpoint import load_tensors, read_json, save_tensors, write_json
from calm.errors import CheckpointError, ConfigError
from calm.finetune_config import LoraConfig
from calm.models.folder import KINDS
from calm.models.speaking import SpeakingModel

from .context import Context

ADAPTER = "adapter"  # within a checkpoint of a training
WEIGHTS, SETTINGS, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
NAME = "default"  # peft's own of a model's only adapter
PREFIX = "base_model.model."  # that peft puts before every name in its files


def base_hash(model: SpeakingModel) -> str:
    """sha256 over names, kinds, shapes and bytes of a plain model's weights, without the exit classifier."""
    found = hashlib.sha256()
    for name, tensor in sorted(KINDS[model.hf.config.model_type].weights(model).items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Lora:
    """Adapters put into a model, which alone are trained from then on.

    Args:
        model: a plain one, changed in place.
        saved: an adapter folder to go on from, ``config.adapter`` or a checkpoint's; default: fresh ones, drawn by
            ``seed``, that change nothing yet.

    Raises:
        ConfigError: peft is not installed; a rank or a target does not fit the model.
        CheckpointError: ``saved`` was made on other weights, or is an adapter of another rank or other targets.
    """

    def __init__(self, model: SpeakingModel, config: LoraConfig, seed: int, saved: Path | None = None) -> None:
        try:
            from peft import LoraConfig as Peft
            from peft import inject_adapter_in_model
        except ImportError:
            raise ConfigError("finetune.lora needs the package peft: pip install 'calm-t5[lora]'") from None
        assert config.rank is not None
        self.config, self.base = config, base_hash(model)
        self.targets = _targets(model, config)
        self._peft = Peft(
            r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=list(self.targets)
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(self._peft, model.hf)
        self._layers = {name: module for name, module in model.hf.named_modules() if _is_adapted(module)}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name)
        if saved is not None:
            self._load(saved)

    def __len__(self) -> int:
        """Trained parameters."""
        return sum(tensor.numel() for tensor in self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        """Adapter weights by the names of peft's files."""
        return {
            f"{PREFIX}{name}.{part}.weight": getattr(layer, part)[NAME].weight
            for name, layer in self._layers.items()
            for part in ("lora_A", "lora_B")
        }

    def save(self, folder: Path) -> None:
        """peft's own files and the base's hash into an existing folder."""
        save_tensors(folder / WEIGHTS, {name: tensor.detach() for name, tensor in self._tensors().items()})
        self._peft.save_pretrained(str(folder))
        write_json(folder / BASE, {"base_sha256": self.base})

    def _load(self, folder: Path) -> None:
        if not (folder / WEIGHTS).is_file() or not (folder / BASE).is_file():
            raise CheckpointError(f"{folder} is no adapter folder: it needs {WEIGHTS} and {BASE}")
        base = read_json(folder / BASE).get("base_sha256")
        if base != self.base:
            raise CheckpointError(
                f"{folder} adapts other weights (sha256 {str(base)[:12]}) than those of checkpoint= "
                f"({self.base[:12]}); give the model folder that it was trained on"
            )
        alpha = read_json(folder / SETTINGS).get("lora_alpha") if (folder / SETTINGS).is_file() else None
        if alpha != self.config.alpha:
            raise CheckpointError(
                f"{folder} was made with alpha {alpha} and not with finetune.lora.alpha={self.config.alpha}, by which "
                "all that it adds is scaled; give that"
            )
        own, found = self._tensors(), load_tensors(folder / WEIGHTS)
        if {name: tensor.shape for name, tensor in own.items()} != {name: each.shape for name, each in found.items()}:
            raise CheckpointError(
                f"{folder} is an adapter of another rank or other layers than finetune.lora.rank={self.config.rank} on "
                f"{', '.join(self.targets)}; give those that it was made with"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(found[name])


def put_in(context: Context, model: SpeakingModel, checkpoint: Path | None) -> Lora | None:
    """The adapters that a run trains instead of the weights, those of ``checkpoint`` where it goes on; None without.

    Raises:
        ConfigError, CheckpointError: see Lora; FSDP.
    """
    config = context.config.finetune.lora
    if config.rank is None:
        return None
    if context.accelerator.distributed_type is DistributedType.FSDP:
        raise ConfigError("finetune.lora does not go with FSDP: adapters are small; use plain data parallelism")
    saved = None if config.adapter is None else Path(config.adapter)
    lora = Lora(model, config, context.config.seed, saved if checkpoint is None else checkpoint / ADAPTER)
    whole = sum(parameter.numel() for parameter in model.hf.parameters())
    context.say(f"LoRA on {', '.join(lora.targets)}: {len(lora):,} of {whole:,} parameters are trained")
    return lora


@contextmanager
def merged(model: SpeakingModel) -> Iterator[SpeakingModel]:
    """Within, a plain model: every adapter's product added to its weights. After it, adapters and weights as before.

    Weights are put back, not subtracted from, so nothing drifts. A model without adapters is left as it is.
    """
    layers: dict[str, Any] = {name: module for name, module in model.hf.named_modules() if _is_adapted(module)}
    kept = {name: layer.get_base_layer().weight.data for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            base = layer.get_base_layer()
            with torch.no_grad():
                base.weight.data = kept[name] + layer.get_delta_weight(NAME).to(kept[name].dtype)
            _put(model.hf, name, base)
        yield model
    finally:
        for name, layer in layers.items():
            layer.get_base_layer().weight.data = kept[name]
            _put(model.hf, name, layer)


def adapter_folder(output: Path) -> Path:
    """Where the adapter of a model folder lies: beside it."""
    return output.with_name(f"{output.name}-adapter")


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(root.get_submodule(parent), own, module)


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")


def _targets(model: SpeakingModel, config: LoraConfig) -> tuple[str, ...]:
    """Names of the linear layers to adapt. Raises ConfigError for a name, or a rank, that none of them has."""
    linear = {
        name: module
        for name, module in model.hf.named_modules()
        if isinstance(module, nn.Linear) and any(part.isdecimal() for part in name.split("."))  # of a stack's layers
    }
    known = sorted({name.rpartition(".")[2] for name in linear})
    targets = known if config.targets is None else config.targets
    unknown = [target for target in targets if target not in known]
    if unknown:
        raise ConfigError(
            f"finetune.lora.targets: no layer of the model has a linear {', '.join(unknown)}; choose from "
            f"{', '.join(known)}"
        )
    chosen = {name: module for name, module in linear.items() if name.rpartition(".")[2] in targets}
    name, least = min(chosen.items(), key=lambda each: min(each[1].weight.shape))
    if config.rank is not None and config.rank > min(least.weight.shape):
        raise ConfigError(
            f"finetune.lora.rank={config.rank} exceeds {name}, which is {tuple(least.weight.shape)}; a rank above "
            f"{min(least.weight.shape)} is no low one"
        )
    return tuple(targets)
