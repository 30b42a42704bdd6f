"""Plain values, as JSON has them, as the dataclass that they are settings of. What Hydra does for a command line."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError

T = TypeVar("T")


def typed(schema: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Settings of ``schema``; what ``values`` does not name is as by default.

    Args:
        where: the key of ``values`` in what they are a part of, with a full stop behind it.

    Raises:
        ConfigError: a key that is none, a value of another type, or one that the schema refuses.
    """
    hints, names = get_type_hints(schema), {each.name for each in fields(schema)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - names)
    if unknown:
        raise ConfigError(f"unknown setting {where}{unknown[0]}")
    return schema(**{name: _value(hints[name], value, where + name) for name, value in values.items()})


def _value(kind: Any, value: Any, key: str) -> Any:
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not NoneType]
        if value is None:
            return None
        if len(kinds) == 1:
            return _value(kinds[0], value, key)
        return value
    if is_dataclass(kind) and isinstance(value, Mapping):
        return typed(kind, value, f"{key}.")  # type: ignore[arg-type]
    if get_origin(kind) is list and isinstance(value, list):
        return [_value(get_args(kind)[0], each, key) for each in value]
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {name: _value(get_args(kind)[1], each, f"{key}.{name}") for name, each in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            choices = ", ".join(str(member.value) for member in kind)
            raise ConfigError(f"{key}={value!r} is none; choose from {choices}") from None
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or (isinstance(value, bool) and kind in (int, float)):
        raise ConfigError(f"{key}={value!r} is no {getattr(kind, '__name__', kind)}")
    return value
