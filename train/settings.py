"""Settings as plain values, what changed between two runs, and which changes a resumed run may have."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from calm.errors import ConfigError

# a change of these makes another model, other data or another order of it: not the same run any more
FIXED = (
    "model",
    "checkpoint",
    "decoder_layers",
    "data",
    "seed",
    "exit_layers",
    "min_exit_layer",
    "finetune.optimizer",
    "finetune.batch_size",
    "finetune.lora.rank",
    "finetune.lora.alpha",
    "finetune.lora.targets",
    "finetune.lora.adapter",
    "finetune.skip_schedule.max_layers",
    "finetune.skip_schedule.min_layers",
)
UNRECORDED = ("resume", "allow_override")


def plain(value: Any) -> Any:
    """Dataclasses and enums as JSON has them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{name}."))
        else:
            found[name] = value
    return found


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old, new) wherever two settings differ; a key that only one has counts as None in the other."""
    before, after = flat(old), flat(new)
    keys = [key for key in {**before, **after} if key.split(".")[0] not in UNRECORDED]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def check_changes(changed: Mapping[str, tuple[Any, Any]], allowed: Sequence[str]) -> None:
    """Refuse a change of what makes the run this run, unless ``allow_override`` names the key or a part above it."""
    refused = [key for key in changed if _under(key, FIXED) and not _under(key, allowed)]
    if refused:
        told = "; ".join(f"{key}: {changed[key][0]} -> {changed[key][1]}" for key in refused[:5])
        raise ConfigError(
            f"resume= with changed settings is refused ({told}): the run would not be the same any more. "
            f"Undo the change, or allow it with allow_override=[{','.join(refused[:5])}]"
        )


def _under(key: str, parents: Sequence[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)
