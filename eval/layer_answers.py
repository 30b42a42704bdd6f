"""What every decoder layer would have said along the full model's own answer, from any folder.

The answer is decoded at full depth by the reference decoder; then one pass over it, as in training, gives the residual
stream after every layer at every position. Keys and values are the full model's, as in CALM's oracle under
``backfill=true``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from calm.checkpoint import sha256_bytes, sha256_file
from calm.confidence import CONFIDENCE, LayerView
from calm.config import DataConfig, Measure
from calm.data.text import encode_source
from calm.decode_batch import BatchDecoder
from calm.errors import CheckpointError, ConfigError
from calm.models.build import build_from_published, weight_files
from calm.models.causal import CausalModel
from calm.models.folder import SETTINGS, load
from calm.models.settings import EarlyExitSettings, default_exit_layers
from calm.models.speaking import SpeakingModel
from calm.policies import Full
from calm.records import Example

from .common import plain


def open_any(folder: Path, data: DataConfig | None, device: str) -> SpeakingModel:
    """A model folder of ours, or a plain one, whose lengths and prefix are then the corpus's; in fp32.

    Raises:
        ConfigError: a plain folder, and no corpus was chosen.
        CheckpointError: it cannot be read, its tokenizer has more words than it, or it has one decoder layer only.
    """
    if is_ours(folder):
        model = load(folder, device)
    elif not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; checkpoint= takes the path of a model folder")
    elif data is None:
        raise ConfigError(f"{folder} is a plain model, which does not say what for; choose a corpus with data=NAME")
    else:
        lengths = {name: getattr(data, name) for name in ("max_source_tokens", "max_target_tokens", "source_prefix")}
        settings = EarlyExitSettings([], **lengths, truncate=data.truncate.value, data=plain(data))
        model = build_from_published(str(folder), settings).to(device).eval()
        model.settings.exit_layers = default_exit_layers(model.num_layers)
    if model.num_layers < 2:
        raise CheckpointError(f"{folder} has one decoder layer: there is nothing to leave early")
    return model


def is_ours(folder: Path) -> bool:
    """Whether the folder is one that calm writes; any other T5 is a plain one."""
    return (folder / SETTINGS).is_file()


def weights_hash(folder: Path) -> str:
    """sha256 of the file that the weights were read from; of the hashes, where they came in parts."""
    hashes = [sha256_file(path) for path in weight_files(folder)]
    return hashes[0] if len(hashes) == 1 else sha256_bytes("".join(hashes).encode())


def answers(model: SpeakingModel, examples: Sequence[Example], batch_size: int) -> list[dict[str, Any]]:
    """One record an article, JSON-ready: see ``layers_of``; and ``id``, ``source_tokens``, ``tokens``, ``ended``.

    ``near_ties`` counts tokens where the pass over the answer says another word at the last layer than the decode did.
    """
    rows = []
    for trace, example in zip(BatchDecoder(model, batch_size=batch_size)(examples, Full()), examples, strict=True):
        source = encode_source(model.tokenizer, example.source, model.settings)
        said, found = layers_of(model, source, trace.tokens)
        rows.append(
            {
                "id": example.id,
                "source_tokens": len(source),
                "tokens": len(trace.tokens),
                "ended": trace.finished,
                "near_ties": int((said[-1] != np.array(trace.tokens)).sum()),
                **found,
            }
        )
    return rows


@torch.inference_mode()
def views(model: SpeakingModel, source: list[int], tokens: Sequence[int]) -> list[LayerView]:
    """What a measure sees after every layer 1..L at every token of an answer: the rows of a view are the tokens."""
    ids = torch.tensor([source], device=model.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    before = torch.tensor([[model.start_token_id, *tokens[:-1]]], device=model.device)
    hiddens = [hidden[0] for hidden in model.answer_hiddens(ids, mask, before)]
    return [
        LayerView(layer, hidden, previous, model.logits, model.classifier)
        for layer, (previous, hidden) in enumerate(zip([None, *hiddens], hiddens, strict=False), start=1)
    ]


@torch.inference_mode()
def layers_of(
    model: SpeakingModel, source: list[int], tokens: Sequence[int]
) -> tuple[Int[np.ndarray, "layers tokens"], dict[str, Any]]:
    """Argmax of every layer at every token of an answer, through the shared norm and head; and what follows from it.

    Returns:
        ``first``, ``settled``: per token (see ``depths``); per layer, sums over the tokens: ``agree``, of those whose
        argmax is the last layer's; ``margin``, of ``softmax``; ``cosine``, of ``state``, from layer 2 on.
    """
    said, margin, cosine = [], [], []
    for view in views(model, source, tokens):
        said.append(view.argmax.cpu().numpy())
        margin.append(float(CONFIDENCE[Measure.softmax](view).sum()))
        if view.previous is not None:
            cosine.append(float(CONFIDENCE[Measure.state](view).sum()))
    if not np.isfinite([*margin, *cosine]).all():
        raise CheckpointError("the model's layers are not finite in fp32; its weights are damaged")
    table = np.stack(said)
    first, settled = depths(table)
    if isinstance(model, CausalModel):
        first[0] = settled[0] = model.num_layers  # its prompt says the first token, and no exit saves anything of it
    return table, {
        "first": first.tolist(),
        "settled": settled.tolist(),
        "agree": (table == table[-1]).sum(axis=1).tolist(),
        "margin": margin,
        "cosine": cosine,
    }


def depths(said: Int[np.ndarray, "layers tokens"]) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " tokens"]]:
    """The first layer that says the last one's word (CALM section 3.2), and the first from which on all do; 1..L."""
    agree = said == said[-1]
    last_run = np.cumprod(agree[::-1], axis=0).sum(axis=0)
    return agree.argmax(axis=0) + 1, len(said) - last_run + 1
