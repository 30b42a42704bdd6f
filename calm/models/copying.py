"""Weights that copy from the first step: what a T5 trained from scratch otherwise takes thousands of steps to find.

Answers repeat words of their source. Two circuits do it, and random weights hold neither:

- *copy*: what cross-attention brings back must come out as the word that it is. Every cross-attention starts with
  O = V^T, so that value and output projection together are near the identity.
- *next word*: having written a word, attend where the source goes on after it. The first encoder layer's first head
  writes the previous word's embedding beside each word (a strong bias for distance one), and the first decoder
  layer's first cross-attention head looks for the word just written among those.

The result is an ordinary T5; training moves these weights like all others.
"""

import torch
from torch import Tensor
from transformers import T5ForConditionalGeneration

PREVIOUS = 1  # T5's bucket of the key one position before the query
BIAS = 6.0  # e^6 against e^0 for every other distance: the previous word gets nearly all the weight
GAIN = 0.3  # of the match, in logits: a hit scores about 0.3 d_kv, noise its square root


def init_copying(model: T5ForConditionalGeneration) -> None:
    """Set the two circuits in place. Uses torch's global generator. Does nothing where d_kv exceeds d_model."""
    config = model.config
    width, d_kv = int(config.d_model), int(config.d_kv)
    if d_kv > width:
        return
    look, store = _orthonormal(width, d_kv), _orthonormal(width, d_kv)  # both (D, d_kv)
    with torch.no_grad():
        for block in model.decoder.block:
            cross = block.layer[1].EncDecAttention
            cross.o.weight.copy_(cross.v.weight.t())
        reader = model.encoder.block[0].layer[0].SelfAttention
        reader.v.weight[:d_kv] = look.t()
        reader.o.weight[:, :d_kv] = store * (width / d_kv) ** 0.5
        reader.q.weight[:d_kv] *= 0.1  # position decides, not content
        reader.relative_attention_bias.weight[PREVIOUS, 0] = BIAS
        finder = model.decoder.block[0].layer[1].EncDecAttention
        finder.q.weight[:d_kv] = look.t() * GAIN
        finder.k.weight[:d_kv] = store.t()


def _orthonormal(rows: int, columns: int) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(rows, columns))[0]
    return basis
