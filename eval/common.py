"""What the eval programs share: which model, on what, over which processes, and where results go."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calm.config import DataConfig, DecoderName, Precision, RunnerName
from calm.errors import FP16_REFUSED, CheckpointError, ConfigError
from calm.run_dir import is_first_process

if TYPE_CHECKING:
    from calm.decode_spec import Decode, DecodeSpec, OnRows
    from calm.models.speaking import SpeakingModel
    from calm.parallel_decode import ParallelDecoder
    from calm.records import Example
    from calm.sharded_decode import ShardedDecoder

DTYPES = {Precision.auto: "float32", Precision.fp32: "float32", Precision.bf16: "bfloat16"}
MODEL_FILES = ("MANIFEST.json", "early_exit.json", "model.safetensors")


def say(text: str = "") -> None:
    """A line for the user, by the first process of a launch only."""
    if is_first_process():
        print(text, flush=True)


def choose_model(checkpoint: str | None, root: Path = Path("runs")) -> Path:
    """The folder asked for, or the newest model folder under ``runs/``; says which.

    Raises:
        ConfigError: none was asked for and there is none.
        CheckpointError: what was asked for is no folder.
    """
    if checkpoint is not None:
        folder = Path(checkpoint)
        if not folder.is_dir():
            raise CheckpointError(
                f"checkpoint={checkpoint}: no such folder; give a model folder such as runs/demo/model"
            )
        say(f"model: {folder}")
        return folder
    found = [path.parent for path in root.rglob("early_exit.json") if "checkpoints" not in path.parts]
    found = [folder for folder in found if all((folder / name).is_file() for name in MODEL_FILES)]
    if not found:
        raise ConfigError(
            f"no checkpoint= was given and there is no model folder under {root}/; train one with "
            "python -m train +model=tiny, or give checkpoint=FOLDER"
        )
    folder = max(found, key=lambda each: (each / "early_exit.json").stat().st_mtime)
    say(f"model: {folder} (the newest under {root}/; checkpoint=FOLDER chooses another)")
    return folder


def choose_dtype(precision: Precision) -> str:
    """Arithmetic of the decode; ``auto`` is fp32, which is what certificates are claimed for without a condition."""
    if precision is Precision.fp16:
        raise ConfigError(f"precision={FP16_REFUSED}")
    return DTYPES[precision]


def corpus_settings(asked: DataConfig | None, trained_on: dict[str, Any]) -> DataConfig:
    """The corpus asked for, or the one that the model was trained on."""
    if asked is not None:
        return asked
    if not trained_on.get("name"):
        raise ConfigError("this model folder does not say what it was trained on; choose a corpus with data=NAME")
    return DataConfig.from_values(trained_on)


def decoder_maker(name: DecoderName) -> "Callable[[SpeakingModel, DecodeSpec], Decode] | None":
    """What makes ``decoder=engine``; None for the decoders that calm has itself."""
    if name is not DecoderName.engine:
        return None
    from serve.decoder import engine_decoder

    return engine_decoder


def choose_runner(name: DecoderName, runner: RunnerName, device: str, folder: str | Path) -> dict[str, Any]:
    """Of a DecodeSpec: who runs the layers of ``decoder=engine``, and native kernels; the other decoders are eager.

    Raises:
        NativeError: native was asked for and cannot be had.
    """
    if name is not DecoderName.engine:
        return {"runner": RunnerName.eager}
    from calm.models.folder import is_decoder_only
    from serve.backend import pick, runner_kernels

    found = pick(runner, device.split(":")[0], decoder_only=is_decoder_only(folder))
    return {"runner": found, "kernels": runner_kernels(found, device)}


@contextmanager
def open_decoder(
    spec: "DecodeSpec", processes: int | None, on_rows: "OnRows | None" = None
) -> Iterator["ParallelDecoder | ShardedDecoder | None"]:
    """A decoder over processes of its own, or over those of a launch.

    In a launch the first process gets the decoder; the others decode their shares for it and then get None.
    """
    from calm.parallel_decode import ParallelDecoder

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        with ParallelDecoder(spec, processes, on_rows) as decoder:
            yield decoder
        return
    if processes not in (None, world):
        raise ConfigError(f"processes={processes}, but the launcher started {world}; drop processes=")
    import torch.distributed as dist

    from calm.sharded_decode import ShardedDecoder

    # only Python objects travel, so gloo serves every device; the others wait while the first one scores
    dist.init_process_group("gloo", timeout=timedelta(hours=12))
    try:
        sharded = ShardedDecoder(spec, on_rows)
        if sharded.rank:
            sharded.serve()
            yield None
            return
        try:
            yield sharded
        finally:
            sharded.close()
    finally:
        dist.destroy_process_group()


def plain(value: Any) -> Any:
    """Settings as JSON has them."""
    return json.loads(json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value))


def asked_of(config: Any, unimportant: Collection[str]) -> dict[str, Any]:
    """Settings that change what is measured, as JSON has them: what a ledger knows its records by."""
    return {name: value for name, value in plain(config).items() if name not in unimportant}


class Stamp:
    """Where the numbers of a run come from; begun when the run begins."""

    def __init__(self, program: str, config: Any) -> None:
        self.program, self.config = program, plain(config)
        self.started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._begun = time.monotonic()

    def values(self) -> dict[str, Any]:
        from calm.environment import environment
        from calm.metrics import metric_signature

        stamped = {name: value for name, value in environment().items() if name != "argv"}  # its argv holds a path
        return {
            "program": self.program,
            "started": self.started,
            "wall_s": round(time.monotonic() - self._begun, 3),
            "argv": sys.argv[1:],
            "metric": metric_signature(),
            "config": self.config,
            "environment": stamped,
        }


def can_draw() -> bool:
    """Whether figures can be drawn; says so where they cannot. matplotlib is told to keep its notes to itself."""
    if find_spec("matplotlib") is None:
        say("no figure: matplotlib is not installed (the extra 'report' brings it)")
        return False
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    return True


def first_articles(
    asked: DataConfig | None, model: "SpeakingModel | None", limits: Mapping[str, int | None]
) -> "tuple[str, dict[str, list[Example]]]":
    """Name of a corpus, the one asked for or the model's own, and of some of its splits the first so many articles.

    Raises:
        ConfigError: there is neither.
        DataError: it cannot be read, or one of these splits is empty.
    """
    from calm.data import load_corpus

    data = corpus_settings(asked, {} if model is None else model.settings.data)
    tokenizer = model.tokenizer if model is not None and data.max_article_tokens is not None else None
    corpus = load_corpus(data, splits=tuple(limits), tokenizer=tokenizer)
    return corpus.name, {split: list(corpus.splits[split][:limit]) for split, limit in limits.items()}


def articles_of(
    asked: DataConfig | None, model: "SpeakingModel | None", n: int | None = None
) -> "tuple[str, list[Example]]":
    """The same of the test split alone."""
    corpus, found = first_articles(asked, model, {"test": n})
    return corpus, found["test"]


def finish(summary: dict[str, Any], run_dir: Path) -> None:
    """Write ``summary.json`` and print the same as the last line of stdout."""
    from calm.checkpoint import write_json

    write_json(run_dir / "summary.json", summary)
    sys.stdout.flush()
    print(json.dumps(summary, ensure_ascii=False, allow_nan=False), flush=True)
