"""What passes from run to run, as cards: a model, its certificates, a report. W&B draws the lineage from them.

A card is content: text and hashes, no place on a disk. So the run that makes a model and the run that uses it write the
same card, offline too, and W&B knows by its digest that it is one thing. Weights are on no card; those of a model are
one of their own (``weights_card``), for who asks for them.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import read_json, read_manifest, sha256_bytes, sha256_file

if TYPE_CHECKING:
    from .calibration import Artifact

SETTINGS = "early_exit.json"
OF_OTHERS = ("calibration/", "README.md")  # files of a model folder that come after the model, or say nothing new


@dataclass(frozen=True)
class Card:
    """An artifact of W&B.

    Attributes:
        type: model, weights, calibration or report.
        files: by name, text or the path of a file.
        metadata: JSON-ready.
    """

    name: str
    type: str
    files: Mapping[str, str | Path]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Of names and contents of its files."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            of = sha256_file(content) if isinstance(content, Path) else sha256_bytes(content.encode())
            digest.update(f"{name}\0{of}\n".encode())
        return digest.hexdigest()


def folder_name(folder: str | Path) -> str:
    """What a model folder is called in W&B: its architecture and its corpus, as ``tiny-restaurants``.

    Raises CheckpointError where the folder has no readable early_exit.json.
    """
    settings = read_json(Path(folder) / SETTINGS)
    return said_name(settings.get("model"), settings.get("data", {}).get("name"))


def said_name(model: str | None, corpus: str | None) -> str:
    """The same from its parts; W&B allows letters, digits, ``-``, ``_`` and ``.``."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join([model or "model", *([corpus] if corpus else [])]))


def model_card(folder: str | Path) -> Card:
    """Hashes and settings of a model folder, without what is certified of it.

    Raises CheckpointError where the folder has no usable manifest or settings.
    """
    files = {name: entry for name, entry in read_manifest(folder).items() if not name.startswith(OF_OTHERS)}
    settings = read_json(Path(folder) / SETTINGS)
    told = {"model": settings.get("model"), "corpus": settings.get("data", {}).get("name")}
    metadata = {**told, "exit_layers": settings.get("exit_layers"), "hashes": files}
    return Card(folder_name(folder), "model", {"hashes.json": _dumped(files), SETTINGS: _dumped(settings)}, metadata)


def weights_card(folder: str | Path) -> Card:
    """The files of a model folder themselves. Raises CheckpointError as ``model_card`` does."""
    card = model_card(folder)
    files = {name: Path(folder) / name for name in card.metadata["hashes"]}
    return Card(f"{card.name}-weights", "weights", files, card.metadata)


def calibration_card(artifact: "Artifact", model: str) -> Card:
    """One certificate file. ``model`` is the folder's name."""
    metadata = {
        "measure": artifact.measure.value,
        "consistency": artifact.consistency.value,
        "n": artifact.n,
        "error_prob": artifact.error_prob,
        "model": artifact.identity.model,
        "certified": {
            f"{each.tolerance:g}": {"threshold": each.threshold, "picked": each.picked}
            for each in artifact.certificates
        },
    }
    text = artifact.dumps()
    return Card(f"{model}-{artifact.name}", "calibration", {f"{artifact.name}.json": text}, metadata)


def report_card(name: str, files: Mapping[str, str | Path], metadata: Mapping[str, Any]) -> Card:
    """Tables and figures of an evaluation."""
    return Card(said_name(name, None), "report", files, metadata)


def _dumped(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"
