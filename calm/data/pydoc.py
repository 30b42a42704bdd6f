"""Docstrings of the installed Python: what a thing is called, takes and says at length -> its first line.

Files are parsed, never imported, so nothing of them runs. Family = module.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from ..progress import Progress
from ..records import Example

_VERSION = 1  # raise it when the extraction changes
_MAX_FILE_BYTES = 2 << 20
_TARGET_WORDS = range(3, 31)  # shorter says nothing, longer is no summary
_MIN_NAME_WORDS = 3
_BODY_WORDS = 100  # what follows is examples and parameter lists
_TESTS = {"test", "tests", "testing"}
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def key() -> str:
    """The cache's key: another Python or another set of installed packages is another corpus."""
    installed = sorted(f"{dist.metadata['Name']}=={dist.version}" for dist in metadata.distributions())
    digest = sha256("\n".join([sys.version, *installed]).encode()).hexdigest()[:12]
    return f"pydoc-{_VERSION}-{digest}"


def words(name: str) -> str:
    """``parse_HTTPHeader2`` -> ``parse http header2``."""
    return " ".join(_CAMEL.sub(" ", name.replace("_", " ")).lower().split())


def _arguments(node: _Documented) -> str:
    """Names of the parameters, self and cls left out; a class has those of its ``__init__``."""
    if isinstance(node, ast.ClassDef):
        init = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
        return _arguments(init[0]) if init else ""
    spec = node.args
    every = [*spec.posonlyargs, *spec.args, *([spec.vararg] if spec.vararg else []), *spec.kwonlyargs]
    if spec.kwarg:
        every.append(spec.kwarg)
    return ", ".join(words(a.arg) for a in every if a.arg not in ("self", "cls"))


def _documented(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, _Documented]]:
    """Every class and function with its owner's qualified name, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, node
            yield from _documented(node, f"{owner}.{node.name}" if owner else node.name)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _documented(node, owner)


def module_rows(module: str, text: str) -> Iterator[Example]:
    """Rows of one file's text; nothing where it does not parse."""
    if '"""' not in text and "'''" not in text:
        return  # parsing is what takes the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for owner, node in _documented(tree):
        first, _, body = (ast.get_docstring(node) or "").strip().partition("\n\n")
        target = " ".join(first.split())
        if len(target.split()) not in _TARGET_WORDS:
            continue
        arguments = _arguments(node)
        if not body and len(words(f"{node.name} {arguments}").split()) < _MIN_NAME_WORDS:
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "method" if owner else "function"
        title = f"{kind} {words(node.name)} ( {arguments} )"
        title += f" of {words(owner.rpartition('.')[2])}" if owner else ""
        source = " ".join([f"{title}.", *body.split()[:_BODY_WORDS]])
        name = f"{owner}.{node.name}" if owner else node.name
        yield Example(f"{module}:{name}:{node.lineno}", module, source, target)


def _files() -> Iterator[tuple[str, Path]]:
    """(module, file) of the standard library and of site-packages, in a fixed order, each file once."""
    paths = sysconfig.get_paths()
    roots = [Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    seen: set[Path] = set()
    for root in dict.fromkeys(roots):
        for path in sorted(root.rglob("*.py")):
            inner = path.relative_to(root)
            packaged = root == roots[0] and inner.parts[0] in ("site-packages", "dist-packages")
            if path in seen or packaged or not _TESTS.isdisjoint(inner.parts):
                continue
            seen.add(path)
            yield ".".join(inner.with_suffix("").parts).removesuffix(".__init__"), path


def build(info: dict[str, str]) -> Iterator[Example]:
    """Rows of every installed file; about a minute."""
    info["release"] = f"Python {sys.version.split()[0]}, {len(list(metadata.distributions()))} distributions"
    files = list(_files())
    with Progress(len(files), "reading docstrings", "file") as shown:
        for module, path in files:
            shown.update()
            try:
                if path.stat().st_size > _MAX_FILE_BYTES:
                    continue
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            yield from module_rows(module, text)
