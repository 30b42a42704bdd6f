"""What peers with Hugging Face's ``generate`` share: transformers itself, optimum-onnx, optimum-intel."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .protocol import Sources

EXPORT_SECONDS = 3600


def versions(*names: str) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def padded(sources: Sources, pad: int) -> tuple[Tensor, Tensor]:
    """(rows, longest) ids, padded on the right, and their mask."""
    longest = max(map(len, sources))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in sources])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in sources])
    return ids, mask


class Generating:
    """Greedy decoding through ``generate``.

    EOS is ignored by taking it out of the generation config: cheaper for the peer than ``min_new_tokens``, which adds
    a logits processor to every step.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.settings = model.generation_config
        self.settings.do_sample, self.settings.num_beams = False, 1
        self.settings.max_length = self.settings.min_new_tokens = None
        config = model.config
        self.pad = int(config.pad_token_id)
        self.eos = config.eos_token_id
        start = getattr(config, "decoder_start_token_id", None)
        self.settings.pad_token_id = self.pad
        self.settings.decoder_start_token_id = self.pad if start is None else start
        self._rows = (torch.zeros(0), torch.zeros(0))

    def prepare(self, sources: Sources) -> None:
        self._rows = padded(sources, self.pad)

    def decode(self, tokens: int) -> list[int]:
        out = self._generate(*self._rows, tokens, None)
        return [out.shape[1]] * out.shape[0]

    def answer(self, sources: Sources, most: int) -> list[list[int]]:
        out: list[list[int]] = self._generate(*padded(sources, self.pad), most, self.eos).tolist()
        return out

    def _generate(self, ids: Tensor, mask: Tensor, most: int, eos: int | None) -> Tensor:
        """(rows, at most ``most``) ids, without the start token."""
        self.settings.max_new_tokens, self.settings.eos_token_id = most, eos
        with torch.inference_mode():
            out: Tensor = self.model.generate(input_ids=ids, attention_mask=mask)
        return out[:, 1:]


def exported(folder: Path, target: Path, command: Sequence[str]) -> Path:
    """``target``, made by ``command`` (of this environment) from the weights of ``folder`` if it is not there.

    The folder is shown to the exporter without its tokenizer: the ids are given, and an exporter with an older
    transformers may not know the class that a newer one wrote down. And with the input embedding under all of its
    names: not every version shares it where the head is another one.

    Raises:
        RuntimeError: the command failed; with the last line it said.
    """
    if target.is_dir():
        return target
    plain, unfinished = target.with_name(f"{target.name}-from"), target.with_name(f"{target.name}-unfinished")
    for left in (plain, unfinished):
        shutil.rmtree(left, ignore_errors=True)
    plain.mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            shutil.copy(folder / name, plain / name)
    tensors = load_file(folder / "model.safetensors")
    for stack in ("encoder", "decoder"):
        tensors[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"].clone()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    words = [{"FROM": str(plain), "TO": str(unfinished)}.get(word, word) for word in command]
    words[0] = str(Path(sys.executable).parent / words[0])
    done = subprocess.run(words, capture_output=True, text=True, timeout=EXPORT_SECONDS)
    sys.stderr.write(done.stdout + done.stderr)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing said"]
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {said[-1].strip()}")
    shutil.rmtree(plain)
    unfinished.rename(target)
    return target


class GeneratingPeer:
    """A Peer over ``generate``; who derives from it opens the model."""

    _made: Generating

    def open(self, folder: Path, store: Path, threads: int, settings: Mapping[str, Any]) -> Any:
        """The model."""
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """What to record of it."""
        raise NotImplementedError

    def load(self, folder: Path, store: Path, threads: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self._made = Generating(self.open(folder, store, threads, settings))
        return self.about()

    def prepare(self, sources: Sources, most: int, variants: Mapping[str, Mapping[str, Any]]) -> None:
        self._made.prepare(sources)

    def decode(self, variant: str, tokens: int) -> list[int]:
        return self._made.decode(tokens)

    def answer(self, sources: Sources, most: int) -> list[list[int]]:
        return self._made.answer(sources, most)
