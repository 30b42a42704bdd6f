"""What Hydra, OmegaConf, YAML and our own errors say, as one line that names what, where and what to do."""

import errno
import re

from .errors import CalmError

_ADVICE = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "file too large"}
_LOCAL = (*_ADVICE, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


def one_line(error: BaseException) -> str | None:
    """The line to print for an error that the user can fix; None for any other."""
    text = _text(error)
    return None if text is None else " ".join(text.split())


def _text(error: BaseException) -> str | None:
    import yaml
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, CalmError):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: {_first_line(error)}; a text is quoted like this: 'key=\"a (b), c\"'"
    if isinstance(error, OmegaConfBaseException):
        return _omegaconf(error)
    if isinstance(error, HydraException):
        return _composition(error)
    if isinstance(error, yaml.YAMLError):
        return f"a YAML file cannot be read: {error}"
    if isinstance(error, AssertionError) and "Unexpected type for root" in str(error):
        return "a setting below one that is null was given; --cfg job shows which are null"  # Hydra's merge into None
    if isinstance(error, OSError) and error.filename is not None and error.errno in _LOCAL:
        return f"{error.filename}: {_ADVICE.get(error.errno or 0, error.strerror)}"
    if isinstance(error, OSError) and error.errno in _ADVICE:
        return _ADVICE[error.errno or 0]
    return None


def _missing_choice(error: Exception) -> str:
    """``Could not find 'model/foo'`` with Hydra's list of options, its search path left out."""
    before, _, after = str(error).partition("Available options in")
    options = re.findall(r"^\t(\S+)$", after.partition("Config search path")[0], flags=re.MULTILINE)
    what = before.split("\n")[0].strip().rstrip(".")
    named = re.search(r"find '([^'/]+)/([^']+)'", what)
    choices = ", ".join(name for name in options if not name.startswith("_"))
    if named and choices:
        return f"there is no {named[1]}={named[2]}; choose from {choices}"
    return f"{what}; choose from {choices}" if choices else what


def _composition(error: Exception) -> str:
    from omegaconf.errors import OmegaConfBaseException

    text = str(error)
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        value = text.removeprefix("Error merging override ") if text.startswith("Error merging override ") else ""
        return f"{value}: {_first_line(cause)}" if value else _omegaconf(cause)
    comma = re.search(r"Ambiguous value for argument '([^=]*)=(.*)'", text)
    if comma:
        return f"{comma[1]}={comma[2]}: for a list write {comma[1]}=[{comma[2]}], for a sweep over the values add -m"
    several = re.search(r"Multiple values for ([\w/]+)", text)
    if several:
        group = several[1]
        return f"{group} is chosen twice; where an experiment already names one write {group}=NAME, without +"
    absent = re.search(r"To append to your default list use (\S+)", text)
    if absent:
        return f"write {absent[1]} (with the +): there is no default that could be replaced"
    return text


def _omegaconf(error: Exception) -> str:
    key = getattr(error, "full_key", None)
    first = _first_line(error)
    return f"{key}: {first}" if key and key not in first else first


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
