"""A T5 whose right answer is known beforehand, and small random ones.

``scripted`` follows ``nxt`` from token to token; the source word picks the first token through cross-attention; and
``late`` makes one token change its mind at a chosen decoder layer.
"""

import random
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from calm.models.settings import EarlyExitSettings
from calm.models.t5 import EarlyExitT5
from calm.models.t5_folder import share_embeddings
from calm.records import Example

STORY = {5: 6, 6: 7, 7: 8, 8: 1, 10: 11, 11: 1}
STARTS = {3: 5, 4: 10}
LATE = {6: (9, 4), 10: (12, 6)}


def new_t5(*, tied: bool, **shape: Any) -> T5ForConditionalGeneration:
    """A T5 of this shape in eval mode, without dropout, with T5's control ids and its embeddings as ``tied`` says."""
    config = T5Config(
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=tied,
        **shape,
    )
    config._attn_implementation = "eager"
    model = T5ForConditionalGeneration(config).eval()
    share_embeddings(model, tied)
    return model


def scripted(
    vocabulary: int = 20,
    nxt: Mapping[int, int] = STORY,
    start: Mapping[int, int] = STARTS,
    late: Mapping[int, tuple[int, int]] = LATE,
    layers: int = 6,
) -> T5ForConditionalGeneration:
    """Token a is followed by nxt[a], source id s starts with start[s], layers below late[a][1] say late[a][0]."""
    width, eye = 3 * vocabulary, torch.eye(vocabulary)
    model = new_t5(
        tied=False, vocab_size=vocabulary, d_model=width, d_kv=width, num_heads=1, d_ff=vocabulary,
        num_layers=layers, num_decoder_layers=layers, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    head = torch.zeros(vocabulary, width)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "layer_norm" in name else parameter.zero_()
        model.shared.weight[:, :vocabulary] = eye
        cross = model.decoder.block[0].layer[1].EncDecAttention
        cross.v.weight[vocabulary : 2 * vocabulary, :vocabulary] = eye
        cross.o.weight.copy_(0.1 * torch.eye(width))
        for token, following in nxt.items():
            head[following, token] += 10
        for source, first in start.items():
            head[first, vocabulary + source] += 1
        for token, (wrong, layer) in late.items():
            head[wrong, token] += 14
            head[nxt[token], 2 * vocabulary + token] += 20
            feed_forward = model.decoder.block[layer - 1].layer[2].DenseReluDense
            feed_forward.wi_0.weight[token, token] = feed_forward.wi_1.weight[token, token] = 1
            feed_forward.wo.weight[2 * vocabulary + token, token] = 0.1
        model.lm_head.weight.copy_(head)
    return model


def id_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Reads ``"w5 w6"`` as the ids 5, 6: for models whose ids are the story."""
    words = {f"w{i}": i for i in range(3, size)}
    backend = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, **words}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def random_t5(
    *,
    seed: int = 0,
    tied: bool = False,
    gated: bool = True,
    vocabulary: int = 97,
    d_model: int = 32,
    heads: int = 2,
    encoder_layers: int = 2,
    decoder_layers: int = 4,
    spread: float = 3.0,
) -> T5ForConditionalGeneration:
    """A small random T5 whose layers disagree and whose answers vary: sharp attention, strong residual branches."""
    torch.manual_seed(seed)
    model = new_t5(
        tied=tied, vocab_size=vocabulary, d_model=d_model, d_kv=d_model // heads, num_heads=heads, d_ff=2 * d_model,
        num_layers=encoder_layers, num_decoder_layers=decoder_layers,
        feed_forward_proj="gated-gelu" if gated else "relu",
    )  # fmt: skip
    with torch.no_grad():
        model.shared.weight.mul_(0.3)  # a tied head would otherwise repeat its input
        for block in model.decoder.block:
            for attention in (block.layer[0].SelfAttention, block.layer[1].EncDecAttention):
                attention.q.weight.mul_(10.0)
                attention.o.weight.mul_(spread)
        model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(8.0)
        if not tied:
            model.lm_head.weight.normal_(0.0, 0.5)
    return model


def settings(layers: int, *, length: int = 12, classifier: bool = True) -> EarlyExitSettings:
    return EarlyExitSettings(
        exit_layers=list(range(1, layers)), max_source_tokens=16, max_target_tokens=length, has_classifier=classifier
    )


def early_exit(hf: T5ForConditionalGeneration, *, length: int = 12, seed: int = 0) -> EarlyExitT5:
    """Wrap with a random exit classifier, so that its probabilities vary by layer and token."""
    tokenizer = id_tokenizer(hf.config.vocab_size)
    model = EarlyExitT5(hf, tokenizer, settings(hf.config.num_decoder_layers, length=length))
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.classifier.linear.weight, std=0.3)
    return model.eval()


def examples(vocabulary: int, count: int, *, seed: int = 0, longest: int = 9) -> list[Example]:
    """Sources of random words and lengths, 1..longest."""
    draw = random.Random(seed)
    return [
        Example(
            id=f"e{i}",
            family=f"f{i}",
            source=" ".join(f"w{draw.randrange(3, vocabulary)}" for _ in range(draw.randint(1, longest))),
            target="w3",
        )
        for i in range(count)
    ]
