"""What a run starts from: a new model, a model folder, or the newest good checkpoint of an earlier run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from calm.checkpoint import atomic_folder
from calm.config import DataConfig, ShapeConfig, TrainConfig
from calm.data import Corpus, format_audit, load_corpus, token_audit, tokenised, training_texts
from calm.data.files import user_path
from calm.data.tokenizer import train_tokenizer
from calm.errors import CheckpointError, ConfigError
from calm.models import folder as model_folder
from calm.models.build import build_from_published, build_from_scratch
from calm.models.cut import keep_first_layers
from calm.models.settings import EarlyExitSettings, default_exit_layers
from calm.models.speaking import SpeakingModel

from .context import Context
from .settings import changes, check_changes, plain
from .state import TrainerState, newest_valid, steps_in

log = logging.getLogger(__name__)

SPLITS = ("train", "dev", "calibration")


@dataclass
class Start:
    """A model, its corpus, and where training stands. ``checkpoint`` is the folder resumed from, if any."""

    model: SpeakingModel
    corpus: Corpus
    state: TrainerState
    checkpoint: Path | None = None
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)


def resume_point(context: Context) -> Path | None:
    """The checkpoint that ``resume=`` means; ``resume=auto`` starts anew in a folder without any.

    Says which damaged ones were passed over.
    Raises CheckpointError when there is none to go on from.
    """
    asked = context.config.resume
    if asked is None or (asked == "auto" and not steps_in(context.run_dir)):
        return None
    checkpoint, skipped = newest_valid(context.run_dir if asked == "auto" else Path(asked))
    for line in skipped:
        context.say(line)
    context.say(f"resuming from {checkpoint}")
    return checkpoint


def start(context: Context, splits: Sequence[str] = SPLITS) -> Start:
    """Build or load the model and read its corpus.

    Raises ConfigError for a resumed run whose settings make it another run.
    """
    config = context.config
    settings = plain(config)
    checkpoint = resume_point(context)
    if checkpoint is not None:
        state = TrainerState.read(checkpoint)
        changed = changes(state.settings, settings)
        check_changes(changed, config.allow_override)
        _move_on(state, changed)
        lora = config.finetune.lora.rank is not None  # its checkpoints hold what is added to the weights begun with
        model = _begun_with(config) if lora else model_folder.load(checkpoint / "model")
        state.settings = settings
        own = not changed.keys() & {"exit_layers", "min_exit_layer"}
        model = _fitted(model, config, own)
        known = _known_texts(context, model)
        corpus = _corpus(context, splits, model.tokenizer)
        _say_known(context, known, model, corpus)
        return Start(model, corpus, state, checkpoint, changed)
    torch.manual_seed(config.seed)
    model, corpus = _new(context, splits)
    _say_known(context, _known_texts(context, model), model, corpus)
    return Start(model, corpus, TrainerState(settings=settings))


def _known_texts(context: Context, model: SpeakingModel) -> tokenised.KnownTexts | None:
    """Ids made before, which the tokenizer takes from now on; None where they are not asked for."""
    asked = context.config.tokenised
    return None if asked is None else tokenised.use(user_path(asked), model.tokenizer)


def _say_known(
    context: Context, known: tokenised.KnownTexts | None, model: SpeakingModel, corpus: Corpus, rows: int = 100
) -> None:
    """Raises ConfigError where none of the first sources is among the texts."""
    if known is None:
        return
    file, prefix = context.config.tokenised, model.settings.source_prefix
    first = corpus.splits["train"][:rows]
    count = sum(known.get(prefix + row.source) is not None for row in first)
    if not count:
        raise ConfigError(
            f"{file} has none of the first {len(first)} sources of {corpus.name}, which begin with {prefix!r}; write "
            "it from calm.data.tokenised.texts_of(rows, source_prefix), or leave tokenised= out"
        )
    context.say(f"token ids of {len(known)} texts are taken from {file}, {count} of the first {len(first)} sources")


def _begun_with(config: TrainConfig) -> SpeakingModel:
    """The model of ``checkpoint=``, cut where that is asked for."""
    if config.checkpoint is None:
        raise ConfigError("finetune.lora adapts the weights of a trained model: give checkpoint=<model folder>")
    model = model_folder.load(config.checkpoint)
    return model if config.decoder_layers is None else keep_first_layers(model, config.decoder_layers)


def _move_on(state: TrainerState, changed: dict[str, tuple[Any, Any]]) -> None:
    """With another batch size the position means nothing: the next epoch begins, in which each row comes once again."""
    if "finetune.batch_size" in changed:
        state.position.epoch, state.position.batch = state.position.epoch + 1, 0


def _new(context: Context, splits: Sequence[str]) -> tuple[SpeakingModel, Corpus]:
    config = context.config
    if config.checkpoint is not None:
        model = _fitted(_begun_with(config), config)
        return model, _corpus(context, splits, model.tokenizer)
    if config.model is None:
        raise ConfigError("no model chosen: give +model=NAME or checkpoint=FOLDER")
    settings = _settings(config, exit_layers=[])
    if config.model.pretrained is not None:
        model = _fitted(build_from_published(config.model.pretrained, settings), config)
        return model, _corpus(context, splits, model.tokenizer)
    shape = config.model.shape
    assert shape is not None
    corpus = _corpus(context, splits, None)
    tokenizer = _new_tokenizer(context, corpus, shape)
    model = _fitted(build_from_scratch(shape, tokenizer, settings), config)
    context.on_main(lambda: _say_tokens(context, corpus, tokenizer))
    return model, corpus


def _corpus(context: Context, splits: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> Corpus:
    """Read by the first process first: it fills caches that the others then find."""
    data = context.config.data

    def read() -> Corpus:
        return load_corpus(data, splits=splits, tokenizer=tokenizer)

    mine = context.on_main(read)
    corpus = mine if mine is not None else read()
    context.say(format_audit(corpus.audit))
    return corpus


def _say_tokens(context: Context, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> None:
    corpus.audit["tokens"] = token_audit(corpus.splits, tokenizer, context.config.data)
    for split, told in corpus.audit["tokens"].items():
        source, target = told["source"], told["target"]
        context.say(
            f"  {split}: source tokens median {source['median']}, max {source['max']}; "
            f"target tokens median {target['median']}, max {target['max']}; unknown {100 * told['unk_share']:.3g} %"
        )


def _new_tokenizer(context: Context, corpus: Corpus, shape: ShapeConfig) -> PreTrainedTokenizerBase:
    """Trained once, by the first process, and read from its file by all: one vocabulary in every process."""
    folder = context.run_dir / "tokenizer"

    def build() -> None:
        trained = train_tokenizer(training_texts(corpus), shape.vocab_size, shape.lowercase)
        with atomic_folder(folder) as temporary:
            trained.save_pretrained(temporary)

    context.on_main(build)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def _settings(config: TrainConfig, exit_layers: list[int]) -> EarlyExitSettings:
    data: DataConfig = config.data
    return EarlyExitSettings(
        exit_layers=exit_layers,
        max_source_tokens=data.max_source_tokens,
        max_target_tokens=data.max_target_tokens,
        source_prefix=data.source_prefix,
        truncate=data.truncate.value,
        data=plain(data),
        model=config.model.name if config.model is not None else "",
    )


def _fitted(model: SpeakingModel, config: TrainConfig, own_exits: bool = True) -> SpeakingModel:
    """Give the model the run's lengths, corpus and exits; a trained exit classifier stays.

    Without ``exit_layers=`` the exits are those that the model had, with ``own_exits`` and if it had any, else all.
    """
    was = model.settings
    before = was.exit_layers
    asked = config.exit_layers or (before if own_exits and before else None)
    try:
        layers = default_exit_layers(model.num_layers, asked, config.min_exit_layer)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    model.settings = _settings(config, layers)
    model.settings.has_classifier = was.has_classifier
    model.settings.source_start, model.settings.source_end = was.source_start, was.source_end
    model.settings.skip_schedule = was.skip_schedule
    model.settings.model = model.settings.model or was.model
    model.settings.earlier_data = [
        each for each in [*was.earlier_data, was.data] if each and each != model.settings.data
    ]
    return model
