"""A Llama from a GGUF file equals what transformers makes of it; every other file is refused in one line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

import calm
from calm.data.text import decode_ids, encode_source, encode_target, text_ids
from calm.decode import OneDecoder
from calm.errors import CheckpointError
from calm.models.folder import save
from calm.models.gguf_file import read_gguf
from calm.models.settings import EarlyExitSettings
from calm.policies import Full, Static
from calm.records import Example
from tests.causal import random_llama
from tests.conftest import RunProgram
from tests.smollm2 import TEXTS, smollm2_file, smollm2_test

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", *bytes_to_unicode().values(), "th", "the"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
SETTINGS: dict[str, Any] = dict(exit_layers=[], max_source_tokens=48, max_target_tokens=10)


def llama(tied: bool = True) -> LlamaForCausalLM:
    hf = random_llama(seed=5, tied=tied, vocabulary=len(WORDS), kv_heads=2)
    hf.config.eos_token_id = hf.generation_config.eos_token_id = 2
    return hf


def rotary_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp pairs neighbouring dimensions where Hugging Face pairs the halves of a head."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write(path: Path, hf: LlamaForCausalLM, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """The file that llama.cpp's converter would write of this model, in fp32."""
    from gguf import GGUFWriter

    config = hf.config
    tensors = {"token_embd.weight": hf.model.embed_tokens.weight, "output_norm.weight": hf.model.norm.weight}
    if hf.lm_head.weight is not hf.model.embed_tokens.weight:
        tensors["output.weight"] = hf.lm_head.weight
    for number, layer in enumerate(hf.model.layers):
        for name, other in NAMES.items():
            weight = layer.get_submodule(name).weight
            if other in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if other == "attn_q" else config.num_key_value_heads
                weight = rotary_order(weight, heads)
            tensors[f"blk.{number}.{other}.weight"] = weight
    asked = {"arch": "llama", "words": WORDS, "tensors": tensors, "experts": 0}
    if change is not None:
        change(asked)
    writer = GGUFWriter(path, asked["arch"])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if asked["experts"]:
        writer.add_expert_count(asked["experts"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(asked["words"])
    writer.add_token_types([3] * 4 + [1] * (len(asked["words"]) - 4))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in asked["tensors"].items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.detach().float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def prompt(tokenizer: Any, text: str) -> torch.Tensor:
    """The ids of one user turn, as transformers makes them."""
    turn = [{"role": "user", "content": text}]
    return torch.tensor([tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)])


def greedy(hf: Any, ids: torch.Tensor, length: int) -> tuple[int, ...]:
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    return tuple(out[0, ids.shape[1] :].tolist())


def check_against_transformers(file: Path, folder: Path, texts: list[str], length: int) -> None:
    """Ids, logits and greedy answers: transformers' own import, ours, and ours saved and reopened by both."""
    theirs = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = read_gguf(file, EarlyExitSettings([], max_source_tokens=256, max_target_tokens=length))
    again = calm.load(save(model, folder))
    plain, read = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = [Example(f"t{number}", f"t{number}", text, "") for number, text in enumerate(texts)]
    expected = []
    for row in rows:
        ids = prompt(tokenizer, row.source)
        assert prompt(read, row.source).tolist() == ids.tolist()
        for each in (model, again):
            assert encode_source(each.tokenizer, row.source, each.settings) == ids[0].tolist()
        with torch.no_grad():
            right = theirs(ids).logits
            assert torch.equal(plain(ids).logits, right)
        expected.append(greedy(theirs, ids, length))
        assert greedy(plain, ids, length) == expected[-1]
    for each in (model, again):
        assert [trace.tokens for trace in OneDecoder(each)(rows, Full())] == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("tied", [True, False])
def test_an_import_equals_transformers_own(tmp_path: Path, tied: bool) -> None:
    hf = llama(tied)
    file = write(tmp_path / "tiny.gguf", hf)
    check_against_transformers(file, tmp_path / "model", ["the first", "2024", "another: thé", "a\nb", "x y"], 10)
    model = read_gguf(file, EarlyExitSettings(**SETTINGS))
    assert model.tied is tied and model.settings.exit_layers == [1, 2, 3]
    for name, tensor in hf.state_dict().items():  # the rows of q and k are back in their order
        torch.testing.assert_close(model.hf.state_dict()[name], tensor)


def test_digits_are_split_no_bos_is_put_and_eos_is_taught(tmp_path: Path) -> None:
    model = read_gguf(write(tmp_path / "tiny.gguf", llama()), EarlyExitSettings(**SETTINGS))
    assert model.pad_token_id == model.eos_token_id == 2
    ids = model.tokenizer("2024")["input_ids"]
    assert len(ids) == 4 and ids == [WORDS.index(digit) for digit in "2024"]
    assert encode_target(model.tokenizer, "the", 8) == [WORDS.index("the"), 2]
    assert OneDecoder(model)([Example("a", "a", "the", "")], Static(2))[0].crossing_layers[0] == 4


def test_no_text_reaches_a_control_id(tmp_path: Path) -> None:
    """A file marks tokens as control that transformers does not name among the special ones."""
    model = read_gguf(write(tmp_path / "tiny.gguf", llama()), EarlyExitSettings(**SETTINGS))
    spelt = " ".join(WORDS[:4])
    around = len(model.settings.source_start), len(model.settings.source_end or [])
    ids = encode_source(model.tokenizer, spelt, replace(model.settings, max_source_tokens=99))
    assert not {0, 1, 2, 3} & set(ids[around[0] : len(ids) - around[1]])
    assert decode_ids(model.tokenizer, text_ids(model.tokenizer, spelt)) == spelt
    assert decode_ids(model.tokenizer, [1, WORDS.index("the"), 2]) == "the"


def _other_kind(asked: dict[str, Any]) -> None:
    asked["arch"] = "gemma"


def _fewer_words(asked: dict[str, Any]) -> None:
    asked["words"] = WORDS[:-1]


def _no_norm(asked: dict[str, Any]) -> None:
    del asked["tensors"]["blk.2.ffn_norm.weight"]


def _bias(asked: dict[str, Any]) -> None:
    asked["tensors"]["blk.0.attn_q.bias"] = torch.ones(32)


def _scaled(asked: dict[str, Any]) -> None:
    asked["tensors"]["rope_freqs.weight"] = torch.ones(4)


def _experts(asked: dict[str, Any]) -> None:
    asked["experts"] = 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_kind, "architecture 'gemma'; only 'llama'"),
        (_fewer_words, "has 261 words and embeddings of 262; they are not of one model"),
        (_no_norm, "lacks tensors of its 4 layers"),
        (_bias, "tensors that a plain Llama has not: blk.0.attn_q.bias"),
        (_scaled, "scales its rotary positions"),
        (_experts, "with 4 experts a layer"),
    ],
)
def test_another_model_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_gguf(write(tmp_path / "odd.gguf", llama(), change), EarlyExitSettings(**SETTINGS))


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", llama()).read_bytes()
    assert len(whole) > 100_000
    for size in (0, 3, 10, 2_000, 9_000, len(whole) // 2, len(whole) - 200):
        file = tmp_path / "part.gguf"
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="is no GGUF file, or a truncated one|ends after") as told:
            read_gguf(file, EarlyExitSettings(**SETTINGS))
        assert "\n" not in str(told.value)
    file.write_bytes(b"PK\x03\x04" + whole)
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        read_gguf(file, EarlyExitSettings(**SETTINGS))
    with pytest.raises(CheckpointError, match="is no file"):
        read_gguf(tmp_path / "none.gguf", EarlyExitSettings(**SETTINGS))


def test_the_program_writes_a_folder(tmp_path: Path, run_program: RunProgram) -> None:
    write(tmp_path / "tiny.gguf", llama())
    asked = ("eval.import_gguf", "file=tiny.gguf", "output=model", "exit_layers=[2,3]", "source_prefix='Say: '")
    done = run_program(*asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<|im_start|>userĊ ... <|im_end|>Ċ<|im_start|>assistantĊ" in done.stdout
    model = calm.load(tmp_path / "model")
    settings = model.settings
    assert (settings.exit_layers, settings.model, settings.source_prefix) == ([2, 3], "tiny", "Say: ")
    for argv, message in ((asked, "is there already"), (asked[:1], "give file=FILE.gguf and output=FOLDER")):
        done = run_program(*argv, cwd=tmp_path)
        assert done.returncode != 0 and message in done.stderr


@smollm2_test
def test_smollm2_equals_transformers_own_import(tmp_path: Path) -> None:
    check_against_transformers(smollm2_file(), tmp_path / "model", list(TEXTS), 24)
    tokenizer = calm.load(tmp_path / "model").tokenizer
    assert len(tokenizer("2024")["input_ids"]) == 4
    assert encode_target(tokenizer, "the end", 8)[-1] == 2
