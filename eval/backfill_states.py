"""How far keys and values of skipped layers are from true ones, and how far hidden states move from layer to layer.

Tokens and exit layers of answers are given; every decode here is forced to them. *True* keys and values are those that
full depth writes for the same source and the same tokens before a position: nothing of the exits but their choice of
tokens is in them. Backfilled ones are taken twice: ``own``, as the early-exit decode writes them, over a cache whose
earlier positions were backfilled too; and ``true``, over a cache that is true at all earlier positions, so that one
position's skip stands alone. Keys and values of the layer just above an exit are exact in the second case: it reads the
exit's hidden state whether the token left or not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calm.batch_layers import BatchLayers
from calm.config import Backfill
from calm.data.collate import pad
from calm.data.text import encode_source
from calm.layer_math import rms_norm
from calm.models.base import DecoderSpec
from calm.models.t5 import EarlyExitT5, export_spec
from calm.records import DecodeTrace, Example

if TYPE_CHECKING:
    import pandas as pd

OWN, TRUE = "own", "true"  # caches that a position is written over
STRANGER = "other article"  # true K and V of another article, same layer and position: what no likeness looks like


@dataclass(frozen=True)
class States:
    """What a decode of T positions leaves.

    Attributes:
        hiddens: (L + 1, rows, T, d_model), embedding first; above a row's exit its exit hidden.
        keys, values: (L, rows, T, heads * d_kv).
    """

    hiddens: Float[Tensor, "states rows steps d_model"]
    keys: Float[Tensor, "layers rows steps inner"]
    values: Float[Tensor, "layers rows steps inner"]


def replay(
    spec: DecoderSpec,
    encoded: Float[Tensor, "rows source d_model"],
    mask: Bool[Tensor, "rows source"],
    tokens: Int[Tensor, "rows steps"],
    crossing: Int[Tensor, "rows steps"],
    backfill: Backfill = Backfill.project,
) -> States:
    """Decode these tokens with these exits, as ``BatchDecoder`` does.

    Args:
        tokens: said at each position; position t reads the one before it, or the start token.
        crossing: L for full depth.
        backfill: project or copy.

    Raises:
        ValueError: of other backfills: they leave nothing that could be compared.
    """
    if backfill not in (Backfill.project, Backfill.copy):
        raise ValueError(f"backfill {backfill.value} writes no keys and values that could be compared")
    rows, steps = tokens.shape
    layers = BatchLayers(spec, encoded, mask, steps)
    hiddens = encoded.new_empty(spec.num_layers + 1, rows, steps, spec.d_model)
    said = torch.full_like(tokens[:, 0], spec.start_token_id)
    for step in range(steps):
        hidden = hiddens[0, :, step] = layers.embed(said, step)
        for layer in range(1, spec.num_layers + 1):
            ran = layers.run(layer, hidden, step)  # of a row that has left: its backfill, written from the held hidden
            hidden = torch.where((crossing[:, step] < layer)[:, None], hidden, ran)
            hiddens[layer, :, step] = hidden
        if backfill is Backfill.copy:
            layers.copy_up(crossing[:, step], step)
        said = tokens[:, step]
    keys, values = (cache.transpose(2, 3).flatten(3) for cache in (layers.keys, layers.values))
    return States(hiddens, keys, values)


def at_exit(states: Float[Tensor, "states rows steps width"], index: Int[Tensor, "rows steps"]) -> Tensor:
    """Of each position the state of its own index, (rows, steps, width)."""
    rows, steps = torch.meshgrid(*(torch.arange(size, device=index.device) for size in index.shape), indexing="ij")
    chosen: Tensor = states[index, rows, steps]
    return chosen


def alone(spec: DecoderSpec, true: States, crossing: Int[Tensor, "rows steps"], layer: int) -> dict[str, Any]:
    """Keys and values of ``layer`` that each backfill writes from true states: by variant, (keys, values)."""
    tensors = spec.tensors
    normed = rms_norm(at_exit(true.hiddens, crossing), tensors[f"{layer}.self_norm"], spec.norm_eps)
    projected = tuple(F.linear(normed, tensors[f"{layer}.self_{name}"]) for name in "kv")
    copied = at_exit(true.keys, crossing - 1), at_exit(true.values, crossing - 1)
    others = true.keys[layer - 1].roll(1, 0), true.values[layer - 1].roll(1, 0)
    return {Backfill.project.value: projected, Backfill.copy.value: copied, STRANGER: others}


def relative_error(written: Tensor, true: Tensor) -> Tensor:
    """``|written - true| / |true|`` over the last axis, all heads together."""
    error: Tensor = (written - true).norm(dim=-1) / true.norm(dim=-1)
    return error


@torch.inference_mode()
def measure_states(
    model: EarlyExitT5, articles: Sequence[Example], traces: Sequence[DecodeTrace], batch_size: int
) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """Errors of backfilled keys and values, and cosines of hidden states, one row a token and layer.

    Returns:
        errors: columns article, position (from 1), layer, skipped (layer - exit layer), variant, cache, key, value
            (relative errors), cosine (of the hidden at hand, the exit's, and the one that the layer truly reads);
        cosines: columns article, layer, above_exit, previous (cosine with the hidden one layer before), last (with that
            of the last layer), other (with that of another article, same layer and position; NaN where it has none).
    """
    import pandas as pd

    spec, errors, cosines = export_spec(model), [], []
    for start in range(0, len(articles), batch_size):
        here = slice(start, start + batch_size)
        ways = (Backfill.project, Backfill.copy)
        true, own, crossing, live = forced(model, articles[here], traces[here], ways)
        errors += list(_errors(spec, true, own, crossing, live, start))
        cosines += list(_cosines(true, crossing, live, start))
    return pd.concat(errors, ignore_index=True), pd.concat(cosines, ignore_index=True)


def forced(
    model: EarlyExitT5, articles: Sequence[Example], traces: Sequence[DecodeTrace], ways: Sequence[Backfill]
) -> tuple[States, dict[Backfill, States], Int[Tensor, "rows steps"], Bool[Tensor, "rows steps"]]:
    """Decodes of one batch that say what the traces say: at full depth, and with their exits by each backfill.

    Returns:
        both; the traces' exit layers, L where a row has ended; and where it has not.
    """
    spec = export_spec(model)
    sources = [encode_source(model.tokenizer, each.source, model.settings) for each in articles]
    ids, mask = (tensor.to(model.device) for tensor in pad(sources))
    tokens, live = (tensor.to(model.device) for tensor in pad([trace.tokens for trace in traces]))
    exits = pad([trace.emission_layers for trace in traces])[0].to(model.device)
    crossing = torch.where(live, exits, spec.num_layers)
    encoded = model.encode(ids, mask)
    true = replay(spec, encoded, mask, tokens, torch.full_like(crossing, spec.num_layers))
    return true, {way: replay(spec, encoded, mask, tokens, crossing, way) for way in ways}, crossing, live


def _errors(
    spec: DecoderSpec, true: States, own: dict[Backfill, States], crossing: Tensor, live: Tensor, start: int
) -> "Iterator[pd.DataFrame]":
    shared = live & live.roll(1, 0) & (len(live) > 1)
    left_true = at_exit(true.hiddens, crossing)
    for layer in range(2, spec.num_layers + 1):
        written = {(name, TRUE): pair for name, pair in alone(spec, true, crossing, layer).items()}
        written |= {(way.value, OWN): (s.keys[layer - 1], s.values[layer - 1]) for way, s in own.items()}
        truly = true.hiddens[layer - 1]
        left = {(way.value, OWN): at_exit(s.hiddens, crossing) for way, s in own.items()}
        left[STRANGER, TRUE] = truly.roll(1, 0)
        for (variant, cache), (keys, values) in written.items():
            columns = {
                "skipped": layer - crossing,
                "key": relative_error(keys, true.keys[layer - 1]),
                "value": relative_error(values, true.values[layer - 1]),
                "cosine": F.cosine_similarity(left.get((variant, cache), left_true), truly, dim=-1),
            }
            where = (shared if variant == STRANGER else live) & (crossing < layer)
            yield _table(columns, where, start).assign(layer=layer, variant=variant, cache=cache)


def _cosines(true: States, crossing: Tensor, live: Tensor, start: int) -> "Iterator[pd.DataFrame]":
    hiddens = true.hiddens
    shared = live & live.roll(1, 0) & (len(live) > 1)
    for layer in range(1, len(hiddens)):
        other = F.cosine_similarity(hiddens[layer], hiddens[layer].roll(1, 0), dim=-1)
        columns = {
            "above_exit": crossing < layer,
            "previous": F.cosine_similarity(hiddens[layer], hiddens[layer - 1], dim=-1),
            "last": F.cosine_similarity(hiddens[layer], hiddens[-1], dim=-1),
            "other": torch.where(shared, other, float("nan")),
        }
        yield _table(columns, live, start).assign(layer=layer)


def _table(columns: dict[str, Tensor], where: Tensor, start: int) -> "pd.DataFrame":
    import pandas as pd

    rows, steps = (index.cpu().numpy() for index in where.nonzero(as_tuple=True))
    picked: dict[str, np.ndarray] = {name: values[where].cpu().numpy() for name, values in columns.items()}
    return pd.DataFrame({"article": rows + start, "position": steps + 1, **picked})
