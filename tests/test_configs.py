"""Every YAML that is shipped composes into checked objects, and the choices combine as a user expects."""

from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from calm.cli import settings
from calm.config import (
    CONF_DIR,
    Architecture,
    CalibrateConfig,
    ExitLoss,
    ShapeConfig,
    Side,
    Stage,
    Table1Config,
    TrainConfig,
    register,
)
from calm.errors import ConfigError
from calm.papers import given_thresholds

PROGRAMS = sorted(path.stem for path in CONF_DIR.glob("*.yaml") if path.stem != "common")


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def schema_of(program: str) -> type:
    """The dataclass that ``<program>_schema`` stores."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    register()
    kind = OmegaConf.get_type(ConfigStore.instance().load(f"{program}_schema.yaml").node)
    assert kind is not None
    return kind


def train(*argv: str) -> TrainConfig:
    return settings("train", TrainConfig, argv)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_composes_without_a_choice_or_says_what_to_choose(program: str) -> None:
    schema = schema_of(program)
    if "model" in {each.name for each in fields(schema)}:
        with pytest.raises(ConfigError, match="no model chosen"):
            settings(program, schema, [])
    else:
        assert isinstance(settings(program, schema, []), schema)


@pytest.mark.parametrize("name", choices("model"))
def test_every_model_composes_with_its_own_corpus(name: str) -> None:
    config = train(f"+model={name}")
    assert config.model is not None and (config.model.pretrained is None) != (config.model.shape is None)
    assert config.data.name in choices("data")


@pytest.mark.parametrize("name", choices("data"))
def test_every_corpus_composes_with_every_program(name: str) -> None:
    assert train("+model=tiny", f"data={name}").data.name == name
    for program in PROGRAMS:
        schema = schema_of(program)
        if program != "train" and "data" in {each.name for each in fields(schema)}:
            config: Any = settings(program, schema, [f"data={name}"])
            assert config.data.name == name


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_experiment_composes(name: str) -> None:
    goes_on = "/model:" not in (CONF_DIR / "experiment" / f"{name}.yaml").read_text()
    start = ["checkpoint=folder"] if goes_on else []
    assert isinstance(train(f"+experiment={name}", *start), TrainConfig)


@pytest.mark.parametrize(
    ("argv", "model", "data"),
    [
        (["+model=tiny"], "tiny", "restaurants"),
        (["+model=tiny", "data=debian"], "tiny", "debian"),
        (["data=debian", "+model=tiny"], "tiny", "debian"),
        (["+model=small"], "t5-v1_1-small", "cnn_dailymail"),
        (["+model=base", "data=xsum"], "t5-v1_1-base", "xsum"),
        (["+model=large"], "t5-v1_1-large", "cnn_dailymail"),
        (["+experiment=demo"], "tiny", "restaurants"),
        (["+experiment=demo", "data=debian"], "tiny", "debian"),
        (["+experiment=paper_small"], "t5-v1_1-small", "cnn_dailymail"),
        (["+experiment=paper_small", "model=base"], "t5-v1_1-base", "cnn_dailymail"),
    ],
)
def test_model_and_corpus_combine(argv: list[str], model: str, data: str) -> None:
    config = train(*argv)
    assert config.model is not None
    assert (config.model.name, config.data.name) == (model, data)


def test_the_paper_recipes_hold_the_papers_numbers() -> None:
    small, base = train("+experiment=paper_small"), train("+experiment=paper_base")
    assert (small.finetune.steps, small.finetune.batch_size) == (40_000, 16)
    assert (base.finetune.steps, base.finetune.batch_size) == (300_000, 4)
    for config in (small, base):
        assert config.data.max_source_tokens == 512
        assert config.data.max_article_tokens == 1024
        assert config.finetune.optimizer.value == "adafactor"
    wanted = {"small": (0.85, 0.9, 0.95), "base": (0.85, 0.92, 0.96)}
    for config, name in ((small, "small"), (base, "base")):
        assert config.model is not None
        given = given_thresholds(config.data.name, config.model.name)
        assert (given["softmax"], given["classifier"], given["state"]) == wanted[name]


def test_thresholds_are_the_papers_until_single_ones_are_chosen() -> None:
    assert settings("table1", Table1Config, []).given == {}
    given = settings("table1", Table1Config, ["given.state=.9", "given.softmax=null"]).given
    assert given == {"state": 0.9, "softmax": None}


def test_a_published_checkpoint_can_be_taken_from_a_folder() -> None:
    config = train("+model=small", "model.pretrained=some/folder")
    assert config.model is not None and config.model.pretrained == "some/folder"


def test_users_add_a_model_and_a_corpus_without_a_fork(tmp_path: Path) -> None:
    for group, text in {"model": "pretrained: here", "data": "path: x.jsonl"}.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(f"defaults: [_schema, _self_]\nname: mine\n{text}\n")
    config = train("--config-dir", str(tmp_path), "+model=mine", "data=mine")
    assert config.model is not None
    assert (config.model.pretrained, config.data.path) == ("here", "x.jsonl")


def test_nothing_chosen_means_the_corpus_of_the_checkpoint(tmp_path: Path) -> None:
    trained = train("+model=tiny", "data=debian", "data.max_source_tokens=48").data
    import json

    (tmp_path / "early_exit.json").write_text(json.dumps({"data": asdict(trained)}))
    assert train(f"checkpoint={tmp_path}").data == trained
    again = train(f"checkpoint={tmp_path}", "data.max_eval_rows=7").data
    assert (again.name, again.max_source_tokens, again.max_eval_rows) == ("debian", 48, 7)
    assert train(f"checkpoint={tmp_path}", "data=restaurants").data.name == "restaurants"
    for program, schema in (("table1", Table1Config), ("calibrate", CalibrateConfig)):
        assert settings(program, schema, [f"checkpoint={tmp_path}"]).data is None
        mixed = settings(program, schema, [f"checkpoint={tmp_path}", "data.max_eval_rows=7"]).data
        assert mixed is not None and (mixed.name, mixed.max_eval_rows) == ("debian", 7)


def test_below_the_border_there_are_only_plain_objects() -> None:
    def check(value: Any, where: str) -> None:
        assert type(value).__module__.split(".")[0] != "omegaconf", where
        if is_dataclass(value):
            for each in fields(value):
                check(getattr(value, each.name), f"{where}.{each.name}")

    config = train("+model=tiny")
    check(config, "config")
    assert config.model is not None and isinstance(config.model.shape, ShapeConfig)


@pytest.mark.parametrize("name", choices("skip_schedule"))
def test_every_schedule_composes_into_a_training(name: str) -> None:
    asked = ["stage=finetune", "finetune.loss=final_only", f"+skip_schedule@finetune.skip_schedule={name}"]
    found = train("+model=tiny", *asked, "finetune.skip_schedule.side=bottom").finetune.skip_schedule
    assert found.max_layers is not None and found.over(8) is not None and found.side.value == "bottom"


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["stage=finetune"], "give finetune.loss=final_only"),
        (["finetune.loss=final_only"], "give stage=finetune"),
        (["stage=finetune", "finetune.loss=final_only", "finetune.skip_schedule.min_layers=5"], "not monotone"),
    ],
)
def test_a_schedule_trains_the_last_layer_alone(argv: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        train("+model=tiny", "finetune.skip_schedule.max_layers=4", *argv)


@pytest.mark.parametrize("corpus", ["restaurants", "debian"])
def test_the_arms_of_skipdecode_have_one_budget(corpus: str) -> None:
    arms = ["skipdecode", "multi_layer_exit", "calm_dec", "full_depth"]
    skip, bottom, exits, full = (
        train(f"+experiment={arm}_{corpus}", "checkpoint=folder", "skip_schedule@finetune.skip_schedule=layers8_3x")
        for arm in arms
    )
    assert bottom.finetune.skip_schedule == replace(skip.finetune.skip_schedule, side=Side.bottom)
    assert skip.finetune.skip_schedule.max_layers == 3 and exits.finetune.skip_schedule.max_layers is None
    budget = ("steps", "batch_size", "lr", "lr_schedule", "warmup_steps", "optimizer", "eval_every", "eval_rows")
    assert full.finetune.skip_schedule.max_layers is None and full.finetune.loss is ExitLoss.final_only
    for arm in (skip, bottom, exits, full):
        assert (arm.stage, arm.data.name, arm.seed) == (Stage.finetune, corpus, 0)
        assert [getattr(arm.finetune, name) for name in budget] == [getattr(skip.finetune, name) for name in budget]
    base = train(f"+experiment=skipdecode_base_{corpus}")
    assert base.data == skip.data and base.model is not None and base.model.shape is not None
    assert base.model.shape.architecture is Architecture.llama
    assert (skip.finetune.loss, exits.finetune.loss) == (ExitLoss.final_only, ExitLoss.last_plus_mean)


def test_adapters_dropped_layers_and_curricula_come_from_the_command_line() -> None:
    asked = ["checkpoint=folder", "data=restaurants", "finetune.lora.rank=8", "finetune.lora.targets=[q_proj,v_proj]"]
    found = train(*asked, "finetune.exit_curriculum.kind=rotational", "finetune.layer_dropout.over_time=exponential")
    assert found.finetune.lora.targets == ["q_proj", "v_proj"] and found.finetune.lora.alpha == 16
    assert found.finetune.exit_curriculum.kind.value == "rotational"
    off = train("+model=tiny").finetune
    assert off.lora.rank is None and off.layer_dropout.p_max == 0 and off.exit_curriculum.kind.value == "none"
    for argv, why in (
        (["+model=tiny", "finetune.layer_dropout.p_max=1.2"], r"p_max must lie in \[0, 1\), got 1.2"),
        (["+model=tiny", "finetune.lora.rank=8"], "adapts the weights of a trained model: give checkpoint="),
        (["+model=tiny", "finetune.rotate=1", "finetune.exit_curriculum.kind=gradual"], "give one of them"),
    ):
        with pytest.raises(ConfigError, match=why) as told:
            train(*argv)
        assert "\n" not in str(told.value)
    skip, plain = (train(f"+experiment=smollm2_{name}", "checkpoint=f").finetune for name in ("layerskip", "lora"))
    assert skip.layer_dropout.p_max == 0.2 and plain.layer_dropout.p_max == 0
    assert replace(skip, layer_dropout=plain.layer_dropout, exit_curriculum=plain.exit_curriculum) == plain
