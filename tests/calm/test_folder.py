"""A model folder opens as a plain T5 everywhere, and whatever does not match is refused by name."""

import json
import logging
import math
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import calm
from calm.checkpoint import write_manifest
from calm.config import ShapeConfig
from calm.data.tokenizer import train_tokenizer
from calm.decode import OneDecoder
from calm.decode_batch import BatchDecoder
from calm.errors import CheckpointError
from calm.models.bias import relative_bucket_row, relative_buckets_both_ways
from calm.models.build import build_from_published, build_from_scratch
from calm.models.folder import add_sidecar, save
from calm.models.settings import EarlyExitSettings, default_exit_layers
from calm.models.t5 import EarlyExitT5
from calm.policies import Full, Static
from calm.records import Example
from tests.scripted import early_exit, random_t5

TEXTS = ["the quick brown fox", "a small http server", "parses dates and times", "graph drawing tool"] * 20
SHAPES = {"untied": False, "tied": True}


def small(*, tied: bool = True, encoder_layers: int = 2, seed: int = 0) -> EarlyExitT5:
    tokenizer = train_tokenizer(TEXTS, 80)
    shape = ShapeConfig(
        vocab_size=80,
        d_model=24,
        d_kv=8,
        num_heads=3,
        d_ff=32,
        num_layers=encoder_layers,
        num_decoder_layers=4,
        tied=tied,
    )
    torch.manual_seed(seed)
    settings = EarlyExitSettings([1, 2, 3], max_source_tokens=24, max_target_tokens=10, has_classifier=True)
    return build_from_scratch(shape, tokenizer, settings).eval()


@pytest.fixture(scope="module", params=SHAPES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EarlyExitT5, Path]:
    model = small(tied=SHAPES[request.param])
    return model, save(model, tmp_path_factory.mktemp("folder") / "model")


@pytest.fixture
def copy(saved: tuple[EarlyExitT5, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[1], tmp_path / "model"))


ROWS = [Example(str(i), str(i), text, "") for i, text in enumerate(TEXTS[:4])]


def test_the_folder_gives_the_model_back(saved: tuple[EarlyExitT5, Path]) -> None:
    model, folder = saved
    again = calm.load(folder)
    assert again.settings == model.settings and again.tied == model.tied and not again.training
    for (name, left), (_, right) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(left, right), name
    for policy in (Full(), Static(2)):
        assert OneDecoder(again)(ROWS, policy) == OneDecoder(model)(ROWS, policy)


def test_auto_classes_open_it_at_full_depth(saved: tuple[EarlyExitT5, Path]) -> None:
    model, folder = saved
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns that an untied head stays untied
    plain = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for trace, row in zip(BatchDecoder(model)(ROWS, Full()), ROWS, strict=True):
        ids = tokenizer(row.source, return_tensors="pt")["input_ids"]
        assert ids.tolist()[0][-1] == 1, "the tokenizer adds EOS, as T5's does"
        out = plain.generate(ids)
        assert tuple(out[0, 1:].tolist()) == trace.tokens


def test_opens_in_a_process_that_never_saw_calm(tmp_path: Path) -> None:
    """A decoder deeper than the encoder: plain generate() with defaults works, and the card says how."""
    folder = save(small(encoder_layers=1), tmp_path / "deep")
    code = (
        "import sys; from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        "folder = sys.argv[1]; model = AutoModelForSeq2SeqLM.from_pretrained(folder)\n"
        "ids = AutoTokenizer.from_pretrained(folder)('the quick brown fox', return_tensors='pt')\n"
        "print(model.generate(**ids)[0, 1:].tolist()); assert 'calm' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = BatchDecoder(calm.load(folder))([Example("0", "0", "the quick brown fox", "")], Full())[0]
    assert json.loads(done.stdout.splitlines()[-1]) == list(expected.tokens)
    assert "use_cache: false" in (folder / "README.md").read_text()
    assert json.loads((folder / "generation_config.json").read_text())["use_cache"] is False


def test_ctranslate2_opens_it(saved: tuple[EarlyExitT5, Path], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the converter, about transformers' own deprecations
        import ctranslate2
        from ctranslate2.converters import TransformersConverter

        model, folder = saved
        TransformersConverter(str(folder)).convert(str(tmp_path / "ct2"))
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), device="cpu", inter_threads=1, intra_threads=1)
    tokenizer = model.tokenizer
    for trace, row in zip(BatchDecoder(model)(ROWS, Full()), ROWS, strict=True):
        pieces = tokenizer.convert_ids_to_tokens(tokenizer(row.source)["input_ids"])
        result = translator.translate_batch([pieces], beam_size=1, max_decoding_length=10)[0].hypotheses[0]
        tokens = [token for token in trace.tokens if token != 1]
        assert tokenizer.convert_tokens_to_ids(result) == tokens


@pytest.mark.parametrize("tied", [True, False])
def test_starts_near_the_log_of_the_vocabulary(tied: bool) -> None:
    tokenizer = train_tokenizer(TEXTS, 80)
    shape = ShapeConfig(vocab_size=80, d_model=64, d_kv=16, num_heads=4, d_ff=128, num_layers=2, tied=tied)
    torch.manual_seed(0)
    model = build_from_scratch(shape, tokenizer, EarlyExitSettings(default_exit_layers(8))).eval()
    size = model.vocab_size
    source = torch.randint(3, size, (16, 12))
    encoder = model.encode(source, torch.ones_like(source, dtype=torch.bool))
    hiddens = model.decoder_hiddens(encoder, torch.ones_like(source, dtype=torch.bool), torch.randint(3, size, (16, 8)))
    labels = torch.randint(3, size, (16 * 8,))
    with torch.no_grad():
        losses = [float(F.cross_entropy(model.logits(hidden).flatten(0, 1), labels)) for hidden in hiddens]
    # a tied head leans towards the word just read, most at the first layer; Hugging Face's start is tens of nats
    assert all(abs(loss - math.log(size)) < 2.0 for loss in losses)
    assert abs(losses[-1] - math.log(size)) < 1.0


def test_a_new_model_attends_where_its_last_word_goes_on() -> None:
    """The copying start: after a word of the source, the first cross-attention looks at the word behind it."""
    tokenizer = train_tokenizer(TEXTS, 80)
    shape = ShapeConfig(vocab_size=80, d_model=64, d_kv=32, num_heads=2, d_ff=64, num_layers=1, tied=True)
    torch.manual_seed(0)
    model = build_from_scratch(shape, tokenizer, EarlyExitSettings(default_exit_layers(8))).eval()
    source = torch.randperm(model.vocab_size - 3)[None, :20] + 3
    encoder = model.encode(source, torch.ones_like(source, dtype=torch.bool))
    block = model.hf.decoder.block[0].layer
    written = model.hf.decoder.embed_tokens(source)  # as if each word had just been written
    cross = block[1].EncDecAttention
    query = cross.q(block[1].layer_norm(written))[0, :, :32]
    looked = (query @ cross.k(encoder)[0, :, :32].t()).argmax(dim=-1)
    assert float((looked[:-1] == torch.arange(1, 20)).float().mean()) > 0.8


def test_relative_buckets_equal_hugging_faces() -> None:
    attention = random_t5().decoder.block[0].layer[0].SelfAttention
    for step in (0, 1, 15, 16, 40, 127, 128, 300):
        positions = torch.arange(step + 1)
        expected = attention._relative_position_bucket(positions - step, bidirectional=False)
        assert torch.equal(relative_bucket_row(step, 32, 128), expected)
    for length in (1, 2, 9, 17, 129, 300):
        ahead = torch.arange(1 - length, length)
        expected = attention._relative_position_bucket(ahead, bidirectional=True)
        assert torch.equal(relative_buckets_both_ways(length, 32, 128), expected)


def test_bf16_storage_and_fp32_arithmetic(tmp_path: Path) -> None:
    model = small()
    folder = save(model, tmp_path / "bf16", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    again = calm.load(folder)
    assert again.dtype is torch.float32
    assert torch.equal(again.head_weight, model.head_weight.bfloat16().float())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_fp16_is_refused_with_the_reason(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="65504"):
        calm.load(copy, dtype=torch.float16)
    with pytest.raises(CheckpointError, match="65504"):
        save(small(), tmp_path / "half", dtype=torch.float16)
    edit(copy / "config.json", dtype="float16")
    with pytest.raises(CheckpointError, match="config.json: fp16 is refused"):
        calm.load(copy)


def edit(path: Path, **changes: object) -> None:
    """Change a JSON file and the folder's manifest with it, so that only the content is wrong."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    write_manifest(path.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_decoder_layers": 6}, r"missing decoder.block.4.*and \d+ more"),
        ({"d_ff": 48}, r"has shape \(32, 24\), config.json asks for \(48, 24\)"),
        ({"vocab_size": 90}, r"shared.weight has shape"),
        ({"num_decoder_layers": 3}, r"unexpected decoder.block.3"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(copy: Path, change: dict[str, int], message: str) -> None:
    edit(copy / "config.json", **change)
    with pytest.raises(CheckpointError, match=message):
        calm.load(copy)


def test_a_flipped_byte_is_found(copy: Path) -> None:
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="model.safetensors.*sha256 mismatch"):
        calm.load(copy)


def test_nothing_in_a_folder_is_executed(copy: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    edit(copy / "config.json", auto_map={"AutoModel": "evil.Model"})
    (copy / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    with pytest.raises(CheckpointError, match="auto_map"):
        calm.load(copy)
    edit(copy / "config.json", auto_map=None)
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n")
    with pytest.raises(CheckpointError, match="pickled"):
        calm.load(copy)
    assert not canary.exists()


def test_missing_pieces_are_named(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        calm.load(tmp_path / "nowhere")
    (copy / "early_exit.json").unlink()
    with pytest.raises(CheckpointError, match="has no early_exit.json.*model.pretrained="):
        calm.load(copy)


def test_a_sidecar_is_listed(copy: Path) -> None:
    add_sidecar(copy, "calibration/softmax-risk.json", "{}\n")
    listed = json.loads((copy / "MANIFEST.json").read_text())["files"]
    assert "calibration/softmax-risk.json" in listed
    calm.load(copy)


def published(folder: Path, *, tied: bool) -> Path:
    """A folder in the form of the hub's: raw config, pickled weights with every copy, no safetensors."""
    model = small(tied=tied)
    save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 3)
    torch.save(tensors, folder / "pytorch_model.bin")
    for name in ("model.safetensors", "early_exit.json", "MANIFEST.json", "exit_classifier.safetensors"):
        (folder / name).unlink()
    values = json.loads((folder / "config.json").read_text())
    values.pop("scale_decoder_outputs")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_a_published_bin_is_read_once(tmp_path: Path, tied: bool) -> None:
    folder = published(tmp_path / "hub", tied=tied)
    model = build_from_published(str(folder), EarlyExitSettings([1, 2, 3], max_target_tokens=10)).eval()
    assert model.tied is tied and model.head_scale == pytest.approx(24**-0.5 if tied else 1.0)
    assert OneDecoder(model)(ROWS, Full()) == OneDecoder(small(tied=tied))(ROWS, Full())
    with pytest.raises(CheckpointError, match="pickled"):
        calm.load(folder)


FORMS = {
    # what save_pretrained of transformers 5 writes: tied, whatever the model is
    "v1.1-saved": (dict(tied=False, gated=True), None),
    "v1.0-saved": (dict(tied=True, gated=False), None),
    # the hub's raw files
    "flan": (dict(tied=False, gated=True), {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
    "v1.0": (dict(tied=True, gated=False), {"feed_forward_proj": "relu"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_published_t5_speaks_as_the_one_that_was_saved(tmp_path: Path, form: str) -> None:
    kind, raw = FORMS[form]
    hf = random_t5(seed=3, **kind)
    hf.save_pretrained(tmp_path)
    early_exit(hf).tokenizer.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["tie_word_embeddings"] is True and values["scale_decoder_outputs"] is kind["tied"]
    if raw is not None:
        for name in ("tie_word_embeddings", "scale_decoder_outputs", "is_gated_act", "dense_act_fn"):
            values.pop(name, None)
        (tmp_path / "config.json").write_text(json.dumps({**values, **raw}))
    model = build_from_published(str(tmp_path), EarlyExitSettings([1, 2, 3], max_target_tokens=10)).eval()
    assert model.tied is kind["tied"] and model.head_scale == pytest.approx(32**-0.5 if kind["tied"] else 1.0)
    source, target = torch.tensor([[5, 6, 7, 1]]), torch.tensor([[0, 8, 9]])
    with torch.no_grad():
        expected = hf(input_ids=source, decoder_input_ids=target).logits
        mask = torch.ones_like(source, dtype=torch.bool)
        hidden = model.decoder_hiddens(model.encode(source, mask), mask, target)[-1]
        torch.testing.assert_close(model.logits(hidden), expected)
        again = calm.load(save(model, tmp_path / "ours"))
        assert again.tied is model.tied and torch.equal(again.logits(hidden), model.logits(hidden))


def test_a_hostile_bin_is_not_run(tmp_path: Path) -> None:
    folder = published(tmp_path / "hub", tied=False)
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(canary), "w")

    torch.save({"shared.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin cannot be read as plain weights"):
        build_from_published(str(folder), EarlyExitSettings([1]))
    assert not canary.exists()


def test_no_hub_gives_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=r"cannot fetch nobody/no-such-model.*\+model=tiny"):
        build_from_published("nobody/no-such-model", EarlyExitSettings([1]))


def test_exit_layers_outside_the_model_are_refused() -> None:
    assert default_exit_layers(8) == [1, 2, 3, 4, 5, 6, 7]
    assert default_exit_layers(8, [2, 4, 6], min_exit_layer=3) == [4, 6]
    with pytest.raises(CheckpointError, match=r"exit_layers \[8\] lie outside 1..7"):
        default_exit_layers(8, [4, 8])
    assert default_exit_layers(1) == default_exit_layers(1, min_exit_layer=5) == []
    with pytest.raises(CheckpointError, match=r"min_exit_layer=8 leaves no exit of \[1, .*, 7\]: .* give at most 7"):
        default_exit_layers(8, min_exit_layer=8)
    with pytest.raises(CheckpointError, match="min_exit_layer=5 leaves no exit .* give at most 4"):
        default_exit_layers(8, [2, 4], min_exit_layer=5)


def test_dropping_the_tokenizer_is_refused(tmp_path: Path) -> None:
    model = early_exit(random_t5())
    model.tokenizer = None  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="needs its tokenizer"):
        save(model, tmp_path / "model")


def test_a_folder_is_replaced_whole(saved: tuple[EarlyExitT5, Path], copy: Path) -> None:
    add_sidecar(copy, "calibration/softmax-risk.json", "{}\n")
    save(saved[0], copy)
    assert not (copy / "calibration").exists()
    tensors = load_file(copy / "model.safetensors")
    tensors.pop("decoder.final_layer_norm.weight")
    save_file(tensors, copy / "model.safetensors")
    write_manifest(copy)
    with pytest.raises(CheckpointError, match="missing decoder.final_layer_norm.weight"):
        calm.load(copy)
