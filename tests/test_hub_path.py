"""With a hub's files and no hub: a published T5 v1.1 folder and CNN/DailyMail's Parquet, trained, certified, tabled."""

import json
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import sentencepiece
import torch
from pyarrow import parquet
from transformers import T5Config, T5ForConditionalGeneration

import calm
from calm.calibration import load_artifacts

from .conftest import RunProgram

# config.json as google/t5-v1_1-small publishes it, but for the sizes
PUBLISHED = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 48,
    "d_kv": 8,
    "d_model": 32,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "num_decoder_layers": 3,
    "num_heads": 4,
    "num_layers": 2,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "vocab_size": 384,  # 256 pieces, 100 sentinels, and the padding that published checkpoints have
}
WORDS = "river council vote harbour storm bridge minister report market garden school train winter music".split()


def story(seed: int) -> tuple[str, str]:
    draw = random.Random(seed)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(4, 9))).capitalize() + " ." for _ in range(5)]
    return " ".join(sentences), "\n".join(sentences[:2])


def published_model(folder: Path) -> Path:
    """Random weights of the published keys in ``pytorch_model.bin``; spiece.model with pad 0, eos 1, unk 2."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    specials = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    extra = [f"<extra_id_{i}>" for i in range(100)]
    for name, more in (("special_tokens_map.json", {}), ("tokenizer_config.json", {"extra_ids": 100})):
        content = {**specials, **more, "additional_special_tokens": extra}
        (folder / name).write_text(json.dumps(content))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([part for seed in range(80) for part in story(seed)]),
        model_prefix=str(folder / "spiece"), vocab_size=256, hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, minloglevel=2,
    )  # fmt: skip
    (folder / "spiece.vocab").unlink()
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**{**PUBLISHED, "vocab_size": 384}))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["lm_head.weight"] = torch.randn(384, 32) * 0.3  # a head of its own
    weights["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 4)
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def published_corpus(folder: Path) -> Path:
    """``3.0.0/*.parquet`` with article, highlights, id, as the hub's copy has them."""
    (folder / "3.0.0").mkdir(parents=True)
    for split, (first, count) in {"train": (0, 40), "validation": (100, 60), "test": (200, 30)}.items():
        stories = [story(seed) for seed in range(first, first + count)]
        if split == "test":
            stories[0] = ("too long " * 1100, "left out")
        columns = {
            "article": [article for article, _ in stories],
            "highlights": [highlights for _, highlights in stories],
            "id": [f"{split}{i:04d}" for i in range(count)],
        }
        parquet.write_table(pa.table(columns), folder / "3.0.0" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    published_model(folder / "t5")
    published_corpus(folder / "cnn")
    return folder


def test_train_certify_and_table_without_a_hub(hub: Path, tmp_path: Path, run_program: RunProgram) -> None:
    shutil.copytree(hub / "t5", tmp_path / "t5")
    train = run_program(
        "train", "+model=small", "model.pretrained=t5", "data=cnn_dailymail", f"data.path={hub / 'cnn'}",
        "finetune.steps=2", "finetune.batch_size=4", "finetune.eval_rows=4", "classifier.steps=2",
        "classifier.batch_size=4", "calibration.tolerances=[0.5]", "calibration.grid_size=3", "processes=1",
        "data.max_target_tokens=10", "data.max_source_tokens=64", "device=cpu", "tracking.mode=disabled",
        "output=model",
    )  # fmt: skip
    assert train.returncode == 0, train.stderr
    folder = tmp_path / "model"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "early_exit.json", "exit_classifier.safetensors"} <= names
    assert not list(folder.glob("*.bin"))
    model = calm.load(folder)
    assert not model.tied and model.head_scale == 1.0 and model.settings.source_prefix == "summarize: "
    artifacts = load_artifacts(folder)
    assert {artifact.measure.value for artifact in artifacts} == {"softmax", "state", "classifier"}
    assert all(artifact.n == artifacts[0].n > 30 for artifact in artifacts)
    table = run_program(
        "eval.table1", "checkpoint=model", "tolerance=0.5", "processes=1", "device=cpu", "tracking.mode=disabled",
        "bootstrap=50",
    )  # fmt: skip
    assert table.returncode == 0, table.stderr
    lines = table.stdout.splitlines()
    rows = {row["row"]: row for row in json.loads(lines[-1])["table1"]}
    assert rows["full"]["articles"] == 29  # one article had 1024 tokens or more
    assert rows["full"]["paper"] == {"source": "framework", "rouge_l": 0.3524}
    assert rows["softmax@0.85"]["paper"]["layers_skipped"] == 0.5382
    assert rows["softmax"]["paper"] is None  # no paper certified risk tolerance 0.5
    shown = next(line for line in lines if line.startswith("static-half"))
    assert "0.3437" in shown and "50.0 %" in shown
    assert any("paper ROUGE-L" in line for line in lines)
    assert any(line.startswith("paper: arXiv 2407.20272") for line in lines)
