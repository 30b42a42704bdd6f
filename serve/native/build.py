"""Compiles the C++ of this folder once for this machine, and keeps the library in the cache folder.

Its sources include no header of torch or Python, so a compiler alone is needed and a cold build takes seconds. The name
of the library is a hash of sources, compiler and processor: another of any of them is another library.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from calm.checkpoint import sha256_file
from calm.errors import CalmError

from .views import ModelView, WaveView

logger = logging.getLogger(__name__)

SOURCE = "step.cpp"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")
BUILD_SECONDS = 300


class NativeError(CalmError):
    """The native runner cannot be had on this machine; the line says why."""


def _cache_folder() -> Path:
    return Path(os.environ.get("CALM_CACHE") or Path.home() / ".cache" / "calm").expanduser() / "native"


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in [asked] if asked else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    tried = f"CXX={asked}" if asked else ", ".join(COMPILERS)
    raise NativeError(f"no C++ compiler found ({tried}); install one, or use runner=eager")


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    told = [line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))]
    return "\n".join(sorted(set(told)))


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.[ch]*")):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=60)
    digest.update("\0".join([compiler, said.stdout, *FLAGS, _processor()]).encode())
    return digest.hexdigest()[:20]


def _build(compiler: str, target: Path) -> None:
    """Compile beside the target and move it there, then its hash: whoever looks sees a whole library or none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, "-o", str(made), str(Path(__file__).parent / SOURCE)]
        logger.info("compiling the native runner with %s", compiler)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            raise NativeError(f"{compiler} took more than {BUILD_SECONDS} s; use runner=eager") from None
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise NativeError(f"{compiler} cannot compile the native runner ({first}); use runner=eager")
        digest = Path(folder) / "sha256"
        digest.write_text(sha256_file(made), encoding="utf-8")
        os.replace(made, target)
        os.replace(digest, _digest_of(target))


def _digest_of(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _whole(target: Path) -> bool:
    """Whether the library is there as it was built: the loader dies of a file that was cut short."""
    digest = _digest_of(target)
    return target.is_file() and digest.is_file() and sha256_file(target) == digest.read_text(encoding="utf-8")


@cache
def library() -> ctypes.CDLL:
    """The compiled functions, built when this machine has not seen them before.

    Raises:
        NativeError: there is no compiler, it fails, or the cache folder cannot be written.
    """
    compiler = _compiler()
    target = _cache_folder() / f"step-{_key(compiler)}.so"
    try:
        if not _whole(target):
            _build(compiler, target)
        return _typed(ctypes.CDLL(str(target)))
    except OSError as error:
        raise NativeError(f"the native runner cannot be built in {target.parent}: {error}; set CALM_CACHE") from None


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, whole, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[object, list[object]]] = {
        "calm_packed_lanes": (long, [whole, whole, whole]),
        "calm_pack": (None, [pointer, whole, whole, whole, pointer, pointer, pointer]),
        "calm_product": (None, [pointer, whole, pointer, pointer, pointer, whole, whole, whole, pointer]),
        "calm_key_lanes": (long, [whole, whole, whole]),
        "calm_value_lanes": (long, [whole, whole, whole]),
        "calm_coarse_lanes": (long, [whole, whole]),
        "calm_model_bytes": (whole, []),
        "calm_wave_bytes": (whole, []),
        "calm_new": (pointer, [pointer]),
        "calm_free": (None, [pointer]),
        "calm_put_source": (None, [pointer, whole, pointer, pointer, whole]),
        "calm_fill": (None, [pointer, whole, whole]),
        "calm_start": (None, [pointer, pointer]),
        "calm_climb": (whole, [pointer, pointer]),
        "calm_speak": (None, [pointer, pointer]),
        "calm_logits": (None, [pointer, pointer, whole, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    sizes = (found.calm_model_bytes(), found.calm_wave_bytes())
    ours = (ctypes.sizeof(ModelView), ctypes.sizeof(WaveView))
    if sizes != ours:
        raise NativeError(f"the compiled structures have {sizes} bytes, not {ours}; use runner=eager")
    return found
