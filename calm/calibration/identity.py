"""What a certificate belongs to: model, tokenizer, arithmetic and every setting that can change a token or an exit.

Hashes are of files and of rows, so that a folder may be copied and a corpus rebuilt without losing its certificate.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import sha256_file
from ..config import Backfill, Consistency, DecoderName, Head, Measure, RunnerName, Weights
from ..errors import CalibrationError
from ..records import Example

if TYPE_CHECKING:
    from ..models.speaking import SpeakingModel

MODEL_FILES = ("model.safetensors", "exit_classifier.safetensors", "config.json")
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")  # tokenizer_config.json changes with every load and save
DECODING_CODE = (
    "calm/decode*.py",
    "calm/architectures.py",
    "calm/batch_*.py",
    "calm/layer_math.py",
    "calm/layer_schedule.py",
    "calm/drafting.py",
    "calm/speculative.py",
    "calm/wide_layers.py",
    "calm/kv_budget.py",
    "calm/confidence.py",
    "calm/thresholds.py",
    "calm/policies.py",
    "calm/rules.py",
    "calm/models/*.py",
    "calm/data/text.py",
    "serve/*.py",
    "serve/native/*",
    "serve/graph/*",
    "serve/graph/kernels/*",
)
UNTOLD_KEYS = ("transformers_version", "_name_or_path")  # who wrote the file, not what is in it


@cache
def code_version() -> str:
    """The package's version and a hash of the code that decodes, so that no cache outlives a change of it."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for pattern in DECODING_CODE:
        for path in sorted(path for path in root.glob(pattern) if path.is_file()):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    try:
        released = version("calm-t5")
    except PackageNotFoundError:  # run from a checkout that is not installed
        released = "0"
    return f"{released}+{digest.hexdigest()[:12]}"


def hash_json(value: Any) -> str:
    """sha256 of the canonical JSON of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_rows(examples: Iterable[Example]) -> str:
    """sha256 over ids, families, sources and targets, in order."""
    digest = hashlib.sha256()
    for example in examples:
        row = json.dumps([example.id, example.family, example.source, example.target])  # escapes lone surrogates
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()


def hash_files(folder: str | Path, names: Sequence[str]) -> str:
    """sha256 over those of ``names`` that the folder has; JSON files by content, whoever wrote them.

    Raises:
        CalibrationError: it has none of them.
    """
    digest = hashlib.sha256()
    found = [name for name in names if (Path(folder) / name).is_file()]
    if not found:
        raise CalibrationError(f"{folder} holds none of {', '.join(names)}; calibrate a complete model folder")
    for name in found:
        path = Path(folder) / name
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            content = (
                {k: v for k, v in content.items() if k not in UNTOLD_KEYS} if isinstance(content, dict) else content
            )
            file_hash = hash_json(content)
        else:
            file_hash = sha256_file(path)
        digest.update(f"{name}\0{file_hash}\n".encode())
    return digest.hexdigest()


NATIVE, GRAPH, CROSS = "/native", "/graph", "/int8 cross"


def arithmetic(
    dtype: str,
    runner: RunnerName = RunnerName.eager,
    weights: Weights = Weights.model,
    cross_kv: Weights = Weights.model,
    head: Head = Head.full,
    kernels: str = "",
) -> str:
    """What a decode computes with: ``float32``, ``bfloat16``, ``int8 on bfloat16/native KERNELS``.

    In fp32 all decoders and runners agree, near-ties aside, but for the int8 screen of a head, of which each has its
    own. Coarser numbers are rounded by each runner in its own way and by what the processor offers (``kernels``).
    """
    cross = CROSS if cross_kv is Weights.int8 else ""
    if runner is RunnerName.graph and (dtype != "float32" or cross):
        return f"{dtype}{GRAPH} {kernels}{cross}"
    if runner is not RunnerName.native:
        return dtype
    if (dtype, weights, cross_kv) == ("float32", Weights.model, Weights.model):
        return dtype if head is not Head.screened else f"{dtype}{NATIVE} screen"
    loaded = f"int8 on {dtype}" if weights is Weights.int8 else dtype
    return f"{loaded}{NATIVE} {kernels}{cross}"


def independent_of_batch(dtype: str) -> bool:
    """Whether a row's answer in this arithmetic is the same in batches of any size, so that one risk speaks of all.

    In fp32 up to near-ties; under the native runner to the bit (serve/native). Other bf16 rounds by the batch's size.
    """
    return dtype == "float32" or NATIVE in dtype


@dataclass(frozen=True)
class ModelIdentity:
    """Everything besides the threshold that decides what a row decodes to.

    Attributes:
        model: hash of weights, exit classifier and config.json.
        tokenizer: hash of the tokenizer's files.
        dtype: arithmetic of the decode, such as ``float32``; see ``arithmetic``.
        head: full, screened or candidates; ``head_k``: words that the last two look at exactly, 0 for full.
        exit_layers: checked layers, ascending.
        num_layers: L.
        max_target_tokens: N.
        max_source_tokens, source_prefix, truncate, source_start, source_end: how a source becomes ids.
        backfill: what layers above an exit keep.
        decoder, rule: who decoded the risk table. Recorded, not compared: row-exact rules give the same tokens.
    """

    model: str
    tokenizer: str
    dtype: str
    exit_layers: tuple[int, ...]
    num_layers: int
    max_target_tokens: int
    max_source_tokens: int
    head: str = Head.full.value
    head_k: int = 0
    backfill: str = Backfill.project.value
    source_prefix: str = ""
    truncate: str = "head"
    decoder: str = DecoderName.batch.value
    rule: str = "own"
    source_start: tuple[int, ...] = ()
    source_end: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        model: "SpeakingModel",
        folder: str | Path,
        *,
        dtype: str,
        backfill: Backfill = Backfill.project,
        head: Head = Head.full,
        head_k: int = 0,
        decoder: DecoderName = DecoderName.batch,
        rule: str = "own",
    ) -> "ModelIdentity":
        """The identity of a loaded model and the folder that it was loaded from."""
        settings = model.settings
        return cls(
            model=hash_files(folder, MODEL_FILES),
            tokenizer=hash_files(folder, TOKENIZER_FILES),
            dtype=dtype,
            exit_layers=tuple(settings.exit_layers),
            num_layers=model.num_layers,
            max_target_tokens=settings.max_target_tokens,
            max_source_tokens=settings.max_source_tokens,
            head=head.value,
            head_k=0 if head is Head.full else head_k,
            backfill=backfill.value,
            source_prefix=settings.source_prefix,
            truncate=settings.truncate,
            decoder=decoder.value,
            rule=rule,
            source_start=tuple(settings.source_start),
            source_end=None if settings.source_end is None else tuple(settings.source_end),
        )

    def served_by(self, head: Head, head_k: int, dtype: str | None = None) -> "ModelIdentity":
        """The same model behind another head, and in another arithmetic unless that is None."""
        return replace(self, head=head.value, head_k=0 if head is Head.full else head_k, dtype=dtype or self.dtype)

    @property
    def way(self) -> str:
        """Of decoding, in a few letters: empty for the plain one (fp32, full head, ``project``)."""
        arithmetic = self.dtype.split(f"{NATIVE} ")[0]
        cross = "int8-cross" if self.dtype.endswith(CROSS) else ""
        parts = [
            "" if arithmetic == "float32" else arithmetic.replace(" ", "-"),
            cross,
            "" if self.head == Head.full.value else f"{self.head}{self.head_k}",
            "" if self.backfill == Backfill.project.value else self.backfill,
        ]
        return "-".join(part for part in parts if part)

    def differences(self, other: "ModelIdentity") -> list[str]:
        """Fields in which the two would decode differently, each with both values."""
        names = [field.name for field in fields(self) if field.name not in ("decoder", "rule")]
        return [
            f"{name}: {_shown(getattr(self, name))} here, {_shown(getattr(other, name))} asked"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; what stands around a source is told only where that is more than a T5's EOS."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        usual: dict[str, Any] = {"source_start": [], "source_end": None}
        return {name: value for name, value in values.items() if name not in usual or value != usual[name]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ModelIdentity":
        known: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**known)


def _shown(value: Any) -> str:
    text = str(list(value)) if isinstance(value, tuple) else repr(value)
    return text[:13] + "…'" if isinstance(value, str) and len(value) == 64 else text


def artifact_name(measure: Measure, consistency: Consistency, identity: ModelIdentity) -> str:
    """Of a measure's certificate for this way of decoding: ``softmax-risk``, ``state-risk-int8-on-bfloat16``."""
    return "-".join(filter(None, (measure.value, consistency.value, identity.way)))
