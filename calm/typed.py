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
        ConfigError: a key that is none, a value of another type, or one that the schema refuses; no value where there
            is no default. What may be of several types is taken as it is.
    """
    hints, names = get_type_hints(schema), {each.name for each in fields(schema)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - names)
    if unknown:
        raise ConfigError(f"unknown setting {where}{unknown[0]}; there are {', '.join(sorted(names))}")
    found = {name: _value(hints[name], value, where + name) for name, value in values.items()}
    try:
        return schema(**found)
    except TypeError as error:  # a field without default
        raise ConfigError(f"{where.rstrip('.') or schema.__name__}: {error}") from None


def _value(kind: Any, value: Any, key: str) -> Any:
    if kind is Any:
        return value
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not NoneType]
        if value is None and len(kinds) < len(get_args(kind)):
            return None
        return _value(kinds[0], value, key) if len(kinds) == 1 else value
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return typed(kind, value, f"{key}.")  # type: ignore[arg-type]
    if issubclass(outer, Enum):
        try:
            return outer(value)
        except ValueError:
            choices = ", ".join(str(member.value) for member in outer)
            raise ConfigError(f"{key}={value!r} is none; choose from {choices}") from None
    fits = isinstance(value, int | float) if outer is float else isinstance(value, outer)
    if not fits or (isinstance(value, bool) and outer in (int, float)):
        raise ConfigError(f"{key}={value!r} is no {outer.__name__}")
    if outer is list:
        return [_value(inner[0], each, key) for each in value]
    return {name: _value(inner[1], each, f"{key}.{name}") for name, each in value.items()} if outer is dict else value
