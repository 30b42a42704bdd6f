"""A run: its stages, one after the other, in one folder, under one lock and one tracker."""

import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from calm.checkpoint import MANIFEST, atomic_folder, read_json, sha256_file, write_json
from calm.child import die_with_parent
from calm.config import Precision, Stage, TrainConfig
from calm.environment import environment
from calm.errors import CheckpointError, ConfigError
from calm.locking import RunLock
from calm.models import folder as model_folder
from calm.models.settings import EarlyExitSettings, need_exits
from calm.models.speaking import SpeakingModel
from calm.records import RunRecord
from calm.tracking import Tracker
from calm.tracking_cards import model_card, said_name, weights_card

from .calibrate import run_calibration
from .context import Context, build_accelerator, explained
from .exit_classifier import fit_classifier
from .launch import LAUNCHED
from .loop import Finetune
from .lora import ADAPTER, adapter_folder, merged
from .rows import EncodedRows
from .settings import plain
from .setup import Start, start
from .signals import Signals
from .state import folder_of
from .whole import whole_model

log = logging.getLogger(__name__)

DONE = "stages.json"


def train(config: TrainConfig, run_dir: Path) -> int:
    """All of a run in this process, which may be one of several. Returns the exit status.

    0 done; 130 after SIGINT and 143 after SIGTERM, both with a checkpoint written when training had begun.
    """
    if os.environ.get(LAUNCHED):
        die_with_parent()
    _check_stage(config, run_dir)
    signals = Signals()
    signals.install()
    first = int(os.environ.get("RANK", "0")) == 0
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = RunLock(run_dir)
    if first:
        lock.acquire()
    try:
        context = Context(config, run_dir, build_accelerator(config), signals)
        return _tracked(context)
    except Exception as error:
        advice = explained(error, config)
        if advice is None:
            raise
        raise advice from error
    finally:
        lock.release()
        _leave_processes()


def _check_stage(config: TrainConfig, run_dir: Path) -> None:
    if config.stage in (Stage.classifier, Stage.calibrate) and config.checkpoint is None and config.resume is None:
        raise ConfigError(f"stage={config.stage.value} needs a trained model: give checkpoint=<model folder>")
    if config.stage is Stage.calibrate and config.output is not None and config.checkpoint is not None:
        raise ConfigError("stage=calibrate writes its certificates into the folder of checkpoint=; drop output=")
    if config.stage is Stage.calibrate:
        _check_exits(config, Path(config.checkpoint or _output(config, run_dir)))


def _check_exits(config: TrainConfig, folder: Path) -> None:
    """A resumed run repeats its settings: what the folder has may be said, nothing else."""
    file = folder / model_folder.SETTINGS
    if (config.exit_layers is None and config.min_exit_layer == 1) or not file.is_file():
        return
    own = EarlyExitSettings.from_json(read_json(file), str(file)).exit_layers
    if [each for each in config.exit_layers or own if each >= config.min_exit_layer] != own:
        raise ConfigError(
            f"stage=calibrate certifies {folder} as it is, with exit_layers={own}; drop exit_layers= and "
            "min_exit_layer=, or write a folder with other exits by stage=classifier"
        )


def _output(config: TrainConfig, run_dir: Path) -> Path:
    return Path(config.output) if config.output else run_dir / "model"


def _leave_processes() -> None:
    """Forget the process group and accelerate's singletons: a sweep runs several jobs in one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _tracked(context: Context) -> int:
    """Stages under a tracker that is always finished, with the status that the run leaves with."""
    started, clock = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
    settings = plain(context.config)
    if context.main:
        about = _about(context.config, context.run_dir)
        context.tracker = Tracker(context.run_dir, context.config.tracking, "train", settings, about=about)
    status = 1
    try:
        _stages(context)
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
        if context.main:
            context.say(f"left with status {status}; go on with: python -m train resume={context.run_dir}")
    finally:
        if context.main:
            record = RunRecord("train", settings, environment(), started, time.monotonic() - clock)
            _record(context, record)
            if context.tracker:
                context.tracker.finish(status)
    return status


def _record(context: Context, record: RunRecord) -> None:
    try:
        write_json(context.run_dir / "run.json", asdict(record))
    except CheckpointError as error:  # the error that ended the run is the one to show
        log.warning("%s", error)


def _stages(context: Context) -> None:
    config = context.config
    device, autocast = context.device.type, context.accelerator.mixed_precision
    arithmetic = "fp32" if autocast == "no" else f"{autocast} autocast"
    context.say(f"{context.world} process(es) on {device}, {arithmetic}, run folder {context.run_dir}")
    output = _output(config, context.run_dir)
    if config.stage is Stage.calibrate:
        folder = Path(config.checkpoint or output)
        context.on_main(lambda: context.tracker.used(model_card(folder)) if context.tracker else None)
        _calibrate(context, folder, 0)
        return
    begun = start(context)
    _record_start(context, begun)
    context.on_main(lambda: _track_origin(context))
    model = begun.model
    done = Done(context, output)
    if config.stage in (Stage.all, Stage.finetune):
        model = _finetune(context, begun, output, done)
    elif begun.checkpoint is not None:
        model = _finetuned(context, begun, output, done)
    if config.stage in (Stage.all, Stage.classifier):
        need_exits(model.settings, f"stage={config.stage.value}")
        _classifier(context, model, begun, output, done)
    context.on_main(lambda: _track_model(context, output))
    if config.stage is Stage.all:
        _calibrate(context, output, begun.state.step)


def _calibrate(context: Context, folder: Path, step: int) -> None:
    """Stage 3, by the first process: it decodes with processes of its own."""
    settings = plain(context.config.calibration)
    context.event("stage", step, stage="calibrate")
    if context.tracker:
        context.tracker.settings("calibration", settings)
    context.on_main(lambda: run_calibration(folder, context.config, context.run_dir, context.tracker))


def _about(config: TrainConfig, run_dir: Path) -> str:
    """What the run is called in W&B: as the model folder that it leaves."""
    name = None if config.model is None else config.model.name
    origin = Path(config.checkpoint or _output(config, run_dir)) / model_folder.SETTINGS
    if name is None and origin.is_file():
        name = read_json(origin).get("model")
    return said_name(name, config.data.name)


def _track_origin(context: Context) -> None:
    """The model folder that training goes on from, where it is whole."""
    origin = context.config.checkpoint
    if context.tracker and origin is not None and (Path(origin) / MANIFEST).is_file():
        context.tracker.used(model_card(origin))


def _track_model(context: Context, folder: Path) -> None:
    if context.tracker:
        context.tracker.made(model_card(folder))
        if context.config.tracking.upload_model:
            context.tracker.made(weights_card(folder))


def _record_start(context: Context, begun: Start) -> None:
    """What this run is, and what a resumed one does differently from before."""
    state = begun.state
    if context.tracker:
        context.tracker.settings("environment", environment())
        context.tracker.settings("corpus", {"name": begun.corpus.name, "hash": begun.corpus.content_hash})
    if begun.checkpoint is None:
        return
    told = {key: {"old": old, "new": new} for key, (old, new) in begun.changed.items()}
    state.history.append({"step": state.step, "event": "resume", "changed": told})
    context.event("resume", state.step, checkpoint=str(begun.checkpoint), changed=told)
    for key, (old, new) in begun.changed.items():
        context.say(f"changed since step {state.step}: {key}: {old} -> {new}")


class Done:
    """Which stages of this run are done, in ``stages.json``, so that a resumed run does not repeat them."""

    def __init__(self, context: Context, output: Path) -> None:
        self._context, self._output = context, output
        self._path = context.run_dir / DONE
        self._stages: dict[str, Any] = {}
        if context.config.resume is not None and self._path.is_file():
            self._stages = read_json(self._path)

    def has(self, stage: str, settings: Any) -> bool:
        """Done with these settings, and its model still where it was written, unchanged."""
        weights = self._output / model_folder.WEIGHTS
        entry = self._stages.get(stage)
        if entry is None or entry["settings"] != settings or not weights.is_file():
            return False
        return bool(entry["weights"] == sha256_file(weights))

    def add(self, stage: str, settings: Any) -> None:
        """In the first process."""
        entry = {"settings": settings, "weights": sha256_file(self._output / model_folder.WEIGHTS)}
        self._stages[stage] = entry
        write_json(self._path, self._stages)


def _settings_of(stage: str, context: Context, begun: Start) -> dict[str, Any]:
    """All that the output of a stage depends on and that a resumed run may change."""
    written = {"store": context.config.store, "exit_layers": begun.model.settings.exit_layers}
    return dict(plain({**vars(getattr(context.config, stage)), **written}))


def _finetuned(context: Context, begun: Start, output: Path, done: Done) -> SpeakingModel:
    """The model of a resumed run whose stage 1 is done: its best, not that of its newest checkpoint."""
    if not done.has("finetune", _settings_of("finetune", context, begun)):
        raise ConfigError(
            f"stage=classifier resume={context.config.resume}: finetune is not done there with these settings; "
            f"finish it with stage=finetune, or name a model: checkpoint={context.run_dir / 'model'} without resume="
        )
    context.say(f"finetune: done before, its model is {output}")
    return _load(context, output)


def _finetune(context: Context, begun: Start, output: Path, done: Done) -> SpeakingModel:
    """Stage 1; leaves the best weights in ``output`` and returns that model."""
    config, state = context.config.finetune, begun.state
    settings = _settings_of("finetune", context, begun)
    if done.has("finetune", settings):
        context.say(f"finetune: done before, its model is {output}")
        return _load(context, output)
    context.event("stage", state.step, stage="finetune")
    if context.tracker:
        context.tracker.settings("finetune", plain(config))
    dev = begun.corpus.splits["dev"]
    loop = Finetune(context, begun.model, begun.corpus.splits["train"], dev, state, begun.checkpoint)
    loop.run()
    earlier = folder_of(context.run_dir, state.best.step) if 0 <= state.best.step != state.step else None

    def write(model: SpeakingModel) -> None:
        if loop.lora is not None:
            with atomic_folder(adapter_folder(output)) as adapter:
                loop.lora.save(adapter) if earlier is None else copytree(earlier / ADAPTER, adapter, dirs_exist_ok=True)
        model_folder.save(model, output, stored(context.config))
        done.add("finetune", settings)

    with merged(whole_model(loop.model)) as last:
        model = last
        if earlier is not None:
            context.say(f"the best model by validation is that of step {state.best.step}")
            model = _load(context, earlier / "model")
            model.settings = begun.model.settings  # an allowed change of the exits came after that step
        context.on_main(lambda: write(model))
    return _load(context, output)


def stored(config: TrainConfig) -> torch.dtype:
    """The dtype that weights are written in."""
    return torch.bfloat16 if config.store is Precision.bf16 else torch.float32


def _load(context: Context, folder: Path) -> SpeakingModel:
    return model_folder.load(folder, context.device)


def _classifier(context: Context, model: SpeakingModel, begun: Start, output: Path, done: Done) -> None:
    """Stage 2 on the frozen backbone; leaves the model with its classifier in ``output``."""
    config = context.config
    settings = _settings_of("classifier", context, begun)
    if config.stage is Stage.all and done.has("classifier", settings) and model.settings.has_classifier:
        context.say("classifier: done before")
        return
    step = begun.state.step
    context.event("stage", step, stage="classifier")
    if context.tracker:
        context.tracker.settings("classifier", plain(config.classifier))
    model.to(context.device)
    fit_classifier(
        model,
        EncodedRows(model, begun.corpus.splits["train"]),
        EncodedRows(model, begun.corpus.splits["dev"]),
        config.classifier,
        tracker=context.tracker,
        device=context.device,
        seed=config.seed,
        first_step=step,
        report_path=context.run_dir / "classifier.json",
    )

    def write() -> None:
        model_folder.save(model, output, stored(context.config))
        done.add("classifier", settings)

    context.on_main(write)
