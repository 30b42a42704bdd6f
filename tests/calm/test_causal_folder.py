"""A folder of a decoder-only model opens as a plain one everywhere, and whatever does not match is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import calm
from calm.calibration import ModelIdentity
from calm.checkpoint import write_manifest
from calm.decode import OneDecoder
from calm.errors import CheckpointError, ConfigError
from calm.models.build import build_from_published
from calm.models.causal import CausalModel
from calm.models.folder import save
from calm.models.frame import frame_of
from calm.models.settings import EarlyExitSettings
from calm.models.t5 import t5_only
from calm.policies import Full
from tests.causal import V, early_llama, early_opt, random_llama, random_opt
from tests.scripted import examples, id_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "untied": dict(),
    "tied": dict(tied=True),
    "biases": dict(attention_bias=True, mlp_bias=True, kv_heads=1),
}


OPTS: dict[str, dict[str, Any]] = {"opt": dict(), "opt-350m": dict(pre_norm=False, words=12)}


def make(shape: str) -> CausalModel:
    opt = shape in OPTS
    model = early_opt(random_opt(seed=3, **OPTS[shape])) if opt else early_llama(random_llama(seed=3, **SHAPES[shape]))
    model.settings.source_end = [2]
    return model


@pytest.fixture(scope="module", params=[*SHAPES, *OPTS])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalModel, Path]:
    model = make(request.param)
    return model, save(model, tmp_path_factory.mktemp("folder") / "model")


@pytest.fixture
def copy(saved: tuple[CausalModel, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[1], tmp_path / "model"))


def test_the_folder_gives_the_model_back(saved: tuple[CausalModel, Path]) -> None:
    model, folder = saved
    again = calm.load(folder)
    assert isinstance(again, CausalModel) and again.tied is model.tied and again.settings == model.settings
    mine, theirs = model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    rows = examples(V, 4, seed=3)
    assert OneDecoder(again)(rows, Full()) == OneDecoder(model)(rows, Full())


def test_auto_classes_open_it_at_full_depth(saved: tuple[CausalModel, Path]) -> None:
    model, folder = saved
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for example, trace in zip(rows := examples(V, 4, seed=4), OneDecoder(model)(rows, Full()), strict=True):
        ids = torch.tensor([[*tokenizer(example.source)["input_ids"], 2]])
        out = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False)
        assert tuple(out[0, ids.shape[1] :].tolist()) == trace.tokens


def test_rotary_frequencies_stay_fp32_in_bf16(tmp_path: Path) -> None:
    model = make("tied")
    half = calm.load(save(model, tmp_path / "model"), dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16
    rotary = half.hf.model.rotary_emb.inv_freq
    assert rotary.dtype is torch.float32 and torch.equal(rotary, model.hf.model.rotary_emb.inv_freq)


def test_a_plain_folder_becomes_ours(saved: tuple[CausalModel, Path], copy: Path) -> None:
    model, _ = saved
    (copy / "early_exit.json").unlink()
    with pytest.raises(CheckpointError, match="has no early_exit.json"):
        calm.load(copy)
    built = build_from_published(str(copy), EarlyExitSettings([1, 2, 3], max_target_tokens=8)).eval()
    assert torch.equal(built.head_weight, model.head_weight) and built.settings.source_end == []
    (copy / "model.safetensors").unlink()
    torch.save(model.hf.state_dict(), copy / "pytorch_model.bin")  # holds a tied head twice
    built = build_from_published(str(copy), EarlyExitSettings([1, 2, 3], max_target_tokens=8))
    assert built.tied is model.tied and torch.equal(built.head_weight, model.head_weight)


def test_published_weights_may_come_in_parts(saved: tuple[CausalModel, Path], copy: Path) -> None:
    model, _ = saved
    whole = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    (copy / "MANIFEST.json").unlink()
    names = sorted(whole)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, inside in parts.items():
        save_file({name: whole[name] for name in inside}, copy / file)
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, inside in parts.items() for name in inside}}))
    built = build_from_published(str(copy), EarlyExitSettings([1, 2, 3]))
    mine, theirs = model.hf.state_dict(), built.hf.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for odd in ({}, {"weight_map": {"x": "../a.safetensors"}}):
        index.write_text(json.dumps(odd))
        with pytest.raises(CheckpointError, match="names no files of weights in its folder"):
            build_from_published(str(copy), EarlyExitSettings([1, 2, 3]))


def test_an_opt_published_without_its_head_is_read(tmp_path: Path) -> None:
    """Meta's files name the layers without the causal model's prefix."""
    model = make("opt-350m")
    folder = save(model, tmp_path / "model")
    bare = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    torch.save(bare, folder / "pytorch_model.bin")
    built = build_from_published(str(folder), EarlyExitSettings([1, 2, 3]))
    assert built.tied and torch.equal(built.head_weight, model.head_weight)
    for values, message in (
        (dict(activation_function="tanh"), "activation_function 'tanh' is none of relu, gelu"),
        (dict(layer_norm_elementwise_affine=False), "norms without weights"),
    ):
        config(**{"activation_function": "relu", **values})(folder)
        with pytest.raises(CheckpointError, match=message):
            build_from_published(str(folder), EarlyExitSettings([1, 2, 3]))


def config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return rewrite


NORM = "model.layers.1.input_layernorm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "kind": (config(model_type="gpt2"), "model_type is 'gpt2', expected one of 't5', 'llama', 'opt'"),
    "activation": (config(hidden_act="tanh"), "hidden_act 'tanh' is none of silu, gelu, relu"),
    "fp16": (config(dtype="float16"), "fp16"),
    "dynamic": (
        config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rope_type 'dynamic' changes its angles",
    ),
    "layers": (config(num_hidden_layers=5), "missing model.layers.4.self_attn.q_proj.weight"),
    "kv-heads": (config(num_key_value_heads=4), r"k_proj.weight has shape .* config.json asks for \(32, 32\)"),
    "missing": (tensors(lambda found: found.pop(NORM)), f"missing {NORM}"),
    "unexpected": (tensors(lambda found: found.update(extra=torch.ones(1))), "unexpected extra"),
    "words": (lambda folder: id_tokenizer(V + 3).save_pretrained(folder), "100 words and the model 97"),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_match_is_refused_by_name(tmp_path: Path, damage: str, shape: str) -> None:
    change, message = DAMAGE[damage]
    copy = save(make(shape), tmp_path / "model")
    change(copy)
    write_manifest(copy)
    with pytest.raises(CheckpointError, match=message):
        calm.load(copy)


def test_a_head_that_is_no_copy_contradicts_a_tied_config(tmp_path: Path) -> None:
    copy = save(make("untied"), tmp_path / "model")
    config(tie_word_embeddings=True)(copy)
    tensors(lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"] + 1}))(copy)
    write_manifest(copy)
    with pytest.raises(CheckpointError, match="ties the head, yet lm_head.weight differs"):
        calm.load(copy)


def test_what_is_for_t5_says_so() -> None:
    for shape, name in (("tied", "Llama"), ("opt", "OPT")):
        with pytest.raises(ConfigError, match=f"the engine takes T5 models only, and this is a {name}"):
            t5_only(make(shape), "the engine")


def test_a_frame_is_the_chat_templates_or_bos_and_a_line_break() -> None:
    tokenizer = id_tokenizer(20)
    assert frame_of(tokenizer) == ([], [])
    tokenizer.chat_template = "w5 {{ messages[0]['content'] }} w6 w7"
    assert frame_of(tokenizer) == ([5], [6, 7])
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(CheckpointError, match="chat template fails: no users here"):
        frame_of(tokenizer)
    tokenizer.chat_template = "w5"
    with pytest.raises(CheckpointError, match="shows a user's text 0 times"):
        frame_of(tokenizer)


def test_a_certificate_names_what_stands_around_a_source(tmp_path: Path) -> None:
    model = make("tied")
    folder = save(model, tmp_path / "model")
    framed = ModelIdentity.of(model, folder, dtype="float32")
    assert framed.source_end == (2,) and ModelIdentity.from_json(framed.to_json()) == framed
    model.settings.source_end = None
    usual = ModelIdentity.of(model, folder, dtype="float32")
    assert usual.differences(framed) == ["source_end: None here, [2] asked"]
    assert not {"source_start", "source_end"} & usual.to_json().keys()
    assert ModelIdentity.from_json(usual.to_json()) == usual
