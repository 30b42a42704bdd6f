"""Command-line overrides (``key=value``): from what was typed to what Hydra's grammar reads as that same text.

Hydra's grammar refuses or changes many plain texts: ``data.path=my data/x (1).jsonl``, ``a,b.jsonl``, ``name=1e3``.
Whether a key holds text is known from the schema, so its value is quoted here, and only where Hydra would read
anything but the text itself. Numbers, lists, interpolations and choices of a config group are left alone.
Imports hydra lazily, so that the schemas can be looked at without it.
"""

import difflib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError

_VALUE_OPTIONS = set("--config-path -cp --config-name -cn --config-dir -cd --package -p --cfg -c --info -i".split())
_FLAGS = set("--help -h --hydra-help --version --resolve --run -r --multirun -m --shell-completion -sc".split())
_MULTIRUN = ("-m", "--multirun")


@dataclass(frozen=True)
class Override:
    """One ``[+|++|~]key[=value]`` as typed; ``value`` is None where no ``=`` stands."""

    prefix: str
    key: str
    value: str | None

    @classmethod
    def parse(cls, text: str) -> "Override":
        """Split at the first ``=``."""
        name, equal, value = text.partition("=")
        key = name.lstrip("+~")
        return cls(name[: len(name) - len(key)], key, value if equal else None)

    def __str__(self) -> str:
        return f"{self.prefix}{self.key}" + ("" if self.value is None else f"={self.value}")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options (each with its value) and overrides, in order; Hydra's parser refuses the two interleaved.

    Raises ConfigError for an option that no program has, and for a word that is no override.
    """
    options, overrides = [], []
    words = iter(argv)
    for word in words:
        name, equal, value = word.partition("=")
        if name in _VALUE_OPTIONS:
            options += [name, *([value] if equal else [each for each in [next(words, None)] if each is not None])]
        elif word in _FLAGS:
            options.append(word)
        elif word.startswith("-"):
            raise ConfigError(f"there is no option {name}; settings are written key=value, such as finetune.lr=1e-3")
        elif not equal and not word.startswith("~"):
            raise ConfigError(f"{word!r} is no setting; settings are written key=value, such as +model=tiny")
        else:
            overrides.append(word)
    return options, overrides


def readable(overrides: Sequence[str], schema: type, *, sweep: bool) -> list[str]:
    """The overrides in the form that Hydra reads as they were meant; ``sweep`` says that -m was given.

    Raises ConfigError for a key that the schema lacks, and for text that a sweep cannot hold unquoted.
    """
    return [str(_readable(Override.parse(text), schema, sweep)) for text in overrides]


def is_sweep(options: Sequence[str]) -> bool:
    """True when the options ask for a multirun."""
    return any(word in _MULTIRUN for word in options)


def text_of(override: Override) -> str | None:
    """The text that an override sets, its Hydra quotes and escapes taken off; None for ``null`` and for non-text."""
    value = _hydra_value(override)
    return value if isinstance(value, str) else None


def quoted(value: str, mark: str = "single") -> str:
    """The value in quotes (``single`` or ``double``), escaped by Hydra's rules."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=value, quote=Quote[mark]).with_quotes()


def _readable(override: Override, schema: type, sweep: bool) -> Override:
    key, value = override.key, override.value
    if not _is_setting(override.prefix, key, schema) or override.prefix == "~":
        return override
    kind = leaf_type(schema, key)
    if _below_dict(schema, key) and not override.prefix:
        override = Override("++", key, value)  # a dict takes keys that it did not have
    if get_origin(kind) is list and get_args(kind) == (str,):
        return _readable_list(override)
    if kind is not str or not value or value.lower() == "null":
        return override
    if sweep and "," in value:
        if _hydra_value(override) is None:
            raise ConfigError(f"{key}: a sweep over such texts needs quotes: {_sweep_hint(override)}")
        return override
    if _reads_as_meant(override):
        return override
    return Override(override.prefix, key, quoted(value))


def _readable_list(override: Override) -> Override:
    """A list of texts; those that Hydra refuses, such as ``[full,static=4]``, with each text quoted."""
    value = override.value or ""
    plain = value.startswith("[") and value.endswith("]") and not set(value[1:-1]) & set("[]{}'\"\\")
    if not plain or _hydra_value(override) is not None:
        return override
    texts = [text.strip() for text in value[1:-1].split(",")]
    return Override(override.prefix, override.key, f"[{','.join(quoted(text) for text in texts)}]")


def _reads_as_meant(override: Override) -> bool:
    value = override.value or ""
    read = _hydra_value(override)
    if not isinstance(read, str):
        return False
    in_quotes = len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]
    return read == value or in_quotes or "\\" in value or "${" in value


def _hydra_value(override: Override) -> Any:
    """What Hydra's grammar makes of the value; None where it refuses."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(str(override)).value()
    except HydraException:
        return None


def _sweep_hint(override: Override) -> str:
    values = ",".join(quoted(part, "double") for part in (override.value or "").split(","))
    return shlex.quote(f"{override.prefix}{override.key}={values}")


def _is_setting(prefix: str, key: str, schema: type) -> bool:
    """True for a key of the schema or of Hydra itself; False for a choice of a group (``data``, ``a/b``, ``a@b``)."""
    first = key.split(".")[0]
    if not key or "/" in key or "@" in key:
        return False
    if first != "hydra" and first not in _children(schema):
        unknown = _unknown(key, first, schema)
        if "." in key or (not prefix and "did you mean" in str(unknown)):
            raise unknown
        return False  # a group, perhaps one that the user brings along; Hydra knows
    if first != "hydra":
        leaf_type(schema, key)
    return True


def leaf_type(schema: type, key: str) -> Any:
    """Type of the setting at a dotted key, Optional taken off. Raises ConfigError for an unknown key."""
    kind: Any = schema
    if key.startswith("hydra."):
        from hydra.conf import HydraConf

        kind, key = HydraConf, key.removeprefix("hydra.")
    for name in key.split("."):
        if is_dataclass(kind) and isinstance(kind, type):
            children = _children(kind)
            if name not in children:
                if kind.__module__.startswith("hydra"):
                    return Any
                raise _unknown(key, name, schema)
            kind = children[name]
        elif get_origin(kind) in (dict, list):
            kind = get_args(kind)[-1]
        else:
            return Any
    return kind


def _below_dict(schema: type, key: str) -> bool:
    parent = key.rpartition(".")[0]
    return bool(parent) and not key.startswith("hydra.") and get_origin(leaf_type(schema, parent)) is dict


def _children(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: _required(hints[each.name]) for each in fields(kind)}


def _required(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not NoneType]
        return kinds[0] if len(kinds) == 1 else Any
    return kind


def _keys(kind: Any, before: str = "") -> Iterator[str]:
    for name, child in _children(kind).items():
        yield before + name
        if is_dataclass(child):
            yield from _keys(child, f"{before}{name}.")


def _unknown(key: str, name: str, schema: type) -> ConfigError:
    keys = list(_keys(schema))
    close = difflib.get_close_matches(key, keys, n=3, cutoff=0.6)
    last = key.rpartition(".")[2]
    close += [each for each in keys if each.rpartition(".")[2] == last and each not in close]
    hint = f"did you mean {' or '.join(close[:3])}?" if close else "--cfg job lists the settings"
    return ConfigError(f"unknown setting {key}: there is no {name!r}; {hint}")
