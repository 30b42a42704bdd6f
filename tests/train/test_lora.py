"""Adapters on frozen weights: merged they are a plain model, alone they are peft's, and they know their base."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import calm
from calm.checkpoint import read_json
from calm.config import ExitLoss, TrainConfig
from calm.errors import CheckpointError, ConfigError
from calm.finetune_config import LoraConfig
from calm.models.folder import KINDS
from calm.models.speaking import SpeakingModel
from tests.causal import early_llama, early_opt, random_llama, random_opt
from tests.scripted import early_exit, random_t5
from tests.train.tiny import curve, run_processes, scores, tiny_config, train_job
from train.lora import BASE, WEIGHTS, Lora, base_hash, merged
from train.run import train

MODELS = {
    "llama": lambda: early_llama(random_llama(tied=True)),
    "opt": lambda: early_opt(random_opt()),
    "t5": lambda: early_exit(random_t5()),
}
IDS = torch.tensor([[5, 6, 7]])
ASKED = (IDS, torch.ones_like(IDS, dtype=torch.bool), torch.tensor([[1, 8, 9]]))


def state(model: SpeakingModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in KINDS[model.hf.config.model_type].weights(model).items()}


def adapted(model: SpeakingModel, **settings: Any) -> Lora:
    """With adapters that do something, as after a training."""
    lora = Lora(model, LoraConfig(**{"rank": 2, **settings}), seed=0)
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    return lora


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_merged_it_is_a_plain_model_that_says_the_same_and_nothing_drifts(make: Any) -> None:
    model = make()
    before, plain = state(model), torch.stack(model.answer_hiddens(*ASKED))
    fresh = Lora(model, LoraConfig(rank=2), seed=0)
    assert torch.equal(torch.stack(model.answer_hiddens(*ASKED)), plain)  # fresh adapters change nothing
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }
    assert len(fresh) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    model = make()
    adapted(model)
    own, said = model.state_dict(), torch.stack(model.answer_hiddens(*ASKED))
    own = {name: tensor.clone() for name, tensor in own.items()}
    with merged(model) as whole:
        after = state(whole)
        again = torch.stack(whole.answer_hiddens(*ASKED))
    torch.testing.assert_close(again, said, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(again, plain, atol=1e-2)
    assert after.keys() == before.keys() and any(not torch.equal(after[name], before[name]) for name in after)
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # asked by peft
def test_its_files_are_pefts(tmp_path: Path) -> None:
    from peft import PeftModel

    model = early_llama(random_llama())
    adapted(model, targets=["q_proj", "down_proj"], alpha=3).save(tmp_path)
    with merged(model) as whole:
        expected = state(whole)
    theirs = PeftModel.from_pretrained(random_llama(), tmp_path).merge_and_unload().state_dict()
    assert theirs.keys() == expected.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(tensor, expected[name])
    assert read_json(tmp_path / BASE)["base_sha256"] == base_hash(early_llama(random_llama()))


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    model = early_llama(random_llama())
    for settings, message in (
        (
            {"targets": ["q_proj", "query"]},
            "no layer of the model has a linear query; choose from down_proj, gate_proj",
        ),
        ({"targets": ["lm_head"]}, "no layer of the model has a linear lm_head"),
        ({"rank": 33}, "finetune.lora.rank=33 exceeds model.layers.0"),
    ):
        with pytest.raises(ConfigError, match=message) as told:
            Lora(model, LoraConfig(**{"rank": 2, **settings}), seed=0)
        assert "\n" not in str(told.value)
    adapted(model).save(tmp_path)
    for other, config, message in (
        (early_llama(random_llama(seed=1)), LoraConfig(rank=2), "adapts other weights .* give the model folder that"),
        (early_llama(random_llama()), LoraConfig(rank=3), "is an adapter of another rank or other layers"),
        (early_llama(random_llama()), LoraConfig(rank=2, targets=["q_proj"]), "is an adapter of another rank or other"),
        (early_llama(random_llama()), LoraConfig(rank=2, alpha=64), "was made with alpha .* finetune.lora.alpha=64"),
    ):
        with pytest.raises(CheckpointError, match=message) as told:
            Lora(other, config, seed=0, saved=tmp_path)
        assert "\n" not in str(told.value)
    with pytest.raises(CheckpointError, match="is no adapter folder"):
        Lora(early_llama(random_llama()), LoraConfig(rank=2), 0, tmp_path / "none")
    for settings, message in (
        ({"rank": 0}, "finetune.lora.rank must be at least 1, got 0"),
        ({"rank": 2, "alpha": 0}, "finetune.lora.alpha"),
        ({"rank": 2, "dropout": 1.0}, "finetune.lora.dropout"),
        ({"rank": 2, "targets": []}, "finetune.lora.targets"),
        ({"adapter": "folder"}, "give its finetune.lora.rank too"),
    ):
        with pytest.raises(ConfigError, match=message):
            LoraConfig(**settings)
    finetune = tiny_config().finetune
    finetune.lora = LoraConfig(rank=2)
    with pytest.raises(ConfigError, match="adapts the weights of a trained model: give checkpoint="):
        TrainConfig(finetune=finetune)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("base")
    assert train(tiny_config(finetune__steps=1), run_dir) == 0
    return run_dir / "model"


def of_adapters(base: Path, **changes: Any) -> TrainConfig:
    return tiny_config(
        model=None, checkpoint=str(base), finetune__loss=ExitLoss.uniform, finetune__lora=LoraConfig(rank=2), **changes
    )


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    assert train(of_adapters(base), run_dir) == 0
    return run_dir


def test_a_run_leaves_a_plain_model_and_the_adapter_beside_it(base: Path, whole: Path, tmp_path: Path) -> None:
    begun, model = calm.load(base), calm.load(whole / "model")
    own, trained = state(begun), state(model)
    assert trained.keys() == own.keys()
    changed = {name for name in own if not torch.equal(own[name], trained[name])}
    assert changed and all(name.split(".")[-2] in {"q", "k", "v", "o", "wi_0", "wi_1", "wo", "wi"} for name in changed)
    assert sorted(path.name for path in (whole / "model-adapter").iterdir()) == sorted(
        ["MANIFEST.json", "adapter_config.json", WEIGHTS, BASE]
    )
    again = of_adapters(base, finetune__steps=0)
    again.finetune.lora = LoraConfig(rank=2, adapter=str(whole / "model-adapter"))
    assert train(again, tmp_path) == 0
    files = [run / "model" / "model.safetensors" for run in (whole, tmp_path)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_killed_and_resumed_it_is_the_same_run(base: Path, whole: Path, tmp_path: Path) -> None:
    failpoint = {"CALM_FAILPOINT": "ckpt.before_rename:3"}
    codes = run_processes(1, train_job, of_adapters(base), tmp_path, log=tmp_path / "log", environment=failpoint)
    assert codes == [-int(signal.SIGKILL)]
    assert train(of_adapters(base, resume=str(tmp_path)), tmp_path) == 0
    assert len(curve(whole)) == 6 and curve(tmp_path) == curve(whole) and scores(tmp_path) == scores(whole)
    for name in ("model/model.safetensors", f"adapter/{WEIGHTS}"):
        found, expected = (load_file(run / "checkpoints" / "step-000006" / name) for run in (tmp_path, whole))
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    changed = of_adapters(base, resume=str(tmp_path))
    changed.finetune.lora = LoraConfig(rank=4)
    with pytest.raises(ConfigError, match=r"finetune.lora.rank: 2 -> 4"):
        train(changed, tmp_path)
