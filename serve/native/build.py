"""Compiles the C++ of this folder once for this machine, and keeps the library in the cache folder.

Its sources include no header of torch or Python, so a compiler alone is needed and a cold build takes seconds. The name
of the library is a hash of sources, compiler and processor: another of any of them is another library.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from pathlib import Path

from calm.checkpoint import sha256_file
from calm.errors import CalmError

from .views import PLACES, DraftView, EncoderView, ModelView, WaveView

logger = logging.getLogger(__name__)

SOURCE = "step.cpp"
REVISION = 2  # of the arithmetic: certificates in bf16 and int8 belong to one
# products that are to be fused say so: what the compiler fuses by itself could differ from copy to copy of a function
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")
BUILD_SECONDS = 300


class NativeError(CalmError):
    """The native runner cannot be had on this machine; the line says why."""


def _cache_folder() -> Path:
    return Path(os.environ.get("CALM_CACHE") or Path.home() / ".cache" / "calm").expanduser() / "native"


def _compiler() -> list[str]:
    """The command to compile with; ``CXX`` may have arguments."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for command in [asked] if asked else [[name] for name in COMPILERS]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    tried = f"CXX={asked[0]}" if asked else ", ".join(COMPILERS)
    raise NativeError(f"no C++ compiler found ({tried}); install one, or use runner=eager")


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    told = [line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))]
    return "\n".join(sorted(set(told)))


def _key(compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.[ch]*")):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    said = subprocess.run([*compiler, "--version"], capture_output=True, check=False, timeout=60)
    digest.update("\0".join([*compiler, *FLAGS, _processor()]).encode() + said.stdout)
    return digest.hexdigest()[:20]


def _build(compiler: list[str], target: Path) -> None:
    """Compile beside the target and move it there, then its hash: whoever looks sees a whole library or none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made, source = Path(folder) / target.name, str(Path(__file__).parent / SOURCE)
        logger.info("compiling the native runner with %s", compiler[0])
        portable = tuple(flag for flag in FLAGS if not flag.startswith("-march="))  # some compilers know no native
        for flags in (FLAGS, portable):
            command = [*compiler, *flags, "-o", str(made), source]
            done = subprocess.run(command, capture_output=True, check=False, timeout=BUILD_SECONDS)
            if done.returncode == 0:
                break
        else:
            told = done.stderr.decode(errors="replace")
            first = next((line for line in told.splitlines() if "error" in line), told.strip()[:200])
            raise NativeError(f"{compiler[0]} cannot compile the native runner ({first}); use runner=eager")
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
        NativeError: there is no compiler, it fails, or the cache folder cannot be written; the next call tries again.
    """
    try:
        compiler = _compiler()
        target = _cache_folder() / f"step-{_key(compiler)}.so"
        if not _whole(target):
            _build(compiler, target)
        return _typed(ctypes.CDLL(str(target)))
    except subprocess.TimeoutExpired:
        raise NativeError(f"the C++ compiler took more than {BUILD_SECONDS} s; use runner=eager") from None
    except (OSError, RuntimeError, UnicodeError, subprocess.SubprocessError) as error:
        if isinstance(error, NativeError):
            raise
        raise NativeError(f"the native runner cannot be built ({error}); set CALM_CACHE, or use runner=eager") from None


@cache
def available() -> NativeError | None:
    """None where the native runner can be had; else why not. Asked once in a process, and said once in its log."""
    try:
        library()
    except NativeError as error:
        logger.warning("%s", error)
        return error
    return None


def instructions() -> str:
    """What the products are made of here, such as ``avx512-bf16-vnni``. Raises NativeError."""
    return str(library().calm_instructions().decode())


def kernels() -> str:
    """What decides the last bits of bf16 and int8: this code's revision and its products."""
    return f"{REVISION} {instructions()}"


class Handle:
    """An engine or an encoder of the library (``kind``), for as long as somebody holds this and with it its memory."""

    def __init__(self, kind: str, view: ctypes.Structure, *memory: object) -> None:
        self._memory = (view, *memory)
        make, free = (getattr(library(), f"calm_{kind}_{what}") for what in ("new", "free"))
        self.address: int = make(ctypes.byref(view))
        weakref.finalize(self, free, self.address).atexit = False


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, whole, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[object, list[object]]] = {
        "calm_instructions": (ctypes.c_char_p, []),
        "calm_packed_lanes": (long, [whole, whole, whole]),
        "calm_pack": (None, [pointer, whole, whole, whole, pointer, pointer, pointer]),
        "calm_product": (None, [pointer, whole, pointer, pointer, pointer, whole, whole, whole, pointer]),
        "calm_key_lanes": (long, [whole, whole, whole]),
        "calm_value_lanes": (long, [whole, whole, whole]),
        "calm_coarse_lanes": (long, [whole, whole]),
        "calm_model_bytes": (whole, []),
        "calm_wave_bytes": (whole, []),
        "calm_draft_bytes": (whole, []),
        "calm_draft_places": (whole, []),
        "calm_encoder_bytes": (whole, []),
        "calm_engine_new": (pointer, [pointer]),
        "calm_engine_free": (None, [pointer]),
        "calm_put_source": (None, [pointer, whole, pointer, pointer, whole]),
        "calm_fill": (None, [pointer, whole, whole]),
        "calm_start": (None, [pointer, pointer]),
        "calm_climb": (whole, [pointer, pointer]),
        "calm_speak": (whole, [pointer, pointer]),
        "calm_follow": (whole, [pointer, pointer, pointer, whole]),
        "calm_speculate": (whole, [pointer, pointer]),
        "calm_logits": (None, [pointer, pointer, whole, pointer]),
        "calm_encoder_new": (pointer, [pointer]),
        "calm_encoder_free": (None, [pointer]),
        "calm_encode": (whole, [pointer, pointer, pointer, whole, pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    sizes = tuple(getattr(found, f"calm_{what}_bytes")() for what in ("model", "wave", "draft", "encoder"))
    ours = tuple(map(ctypes.sizeof, (ModelView, WaveView, DraftView, EncoderView)))
    if sizes != ours:
        raise NativeError(f"the compiled structures have {sizes} bytes, not {ours}; use runner=eager")
    if found.calm_draft_places() != PLACES:
        raise NativeError(
            f"the compiled rounds have {found.calm_draft_places()} places, not {PLACES}; use runner=eager"
        )
    return found
