"""The border of every program: argv in, typed settings out, each mistake of the user one line on stderr.

``program(name, schema, run)`` gives the ``main()`` of a program. It composes ``conf/<name>.yaml`` with Hydra, checks
the result before any folder is made, turns it into plain dataclasses once, and calls ``run(config, run_dir)``.
Everything heavy belongs inside ``run``: a wrong setting is answered without importing torch. Below this module
nobody sees a DictConfig. CALM_DEBUG=1 shows tracebacks.

    main = program("train", TrainConfig, run)
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from .config import CONF_DIR, register
from .errors import ConfigError
from .overrides import Override, is_sweep, quoted, readable, split, text_of
from .run_dir import RUN_DIR_ENV, forget_run_dir, is_first_process, run_dir

T = TypeVar("T")
Run = Callable[[T, Path], int | None]
_PATHS = (
    "path",
    "cache_dir",
    "pretrained",
    "checkpoint",
    "resume",
    "output",
    "targets",
    "tokenised",
    "from_log",
    "api_key_file",
    "prompts",
    "records",
)
_OVERRIDES = "overrides.json"
_CONFIG_DIR = ("--config-dir", "-cd")
_job: list[str] = []


def program(name: str, schema: type[T], run: Run[T]) -> Callable[[], None]:
    """``main()`` for the program whose settings are ``conf/<name>.yaml`` typed by ``schema``.

    ``run`` gets the settings and the run folder and may return an exit status.
    """

    def main() -> None:
        sys.exit(_main(name, schema, run, sys.argv[1:]))

    return main


def job_overrides() -> list[str]:
    """Overrides that start the job now running once more, for a program that launches its own processes.

    Give them the environment variable ``CALM_RUN_DIR`` too, and they share this run's folder.
    """
    return list(_job)


def settings(name: str, schema: type[T], argv: Sequence[str]) -> T:
    """The settings that a command line gives; makes no folder. For tests and notebooks.

    Raises ConfigError and what Hydra, OmegaConf and YAML raise.
    """
    _, overrides = _prepared(schema, argv)
    _register(create=False)
    return _settings(_compose(name, overrides), schema, overrides)


def _main(name: str, schema: type[T], run: Run[T], argv: Sequence[str]) -> int:
    codes: list[int] = []
    _job.clear()

    def job(cfg: Any) -> None:
        codes.append(_run_job(cfg, schema, run))

    try:
        options, overrides = _prepared(schema, argv)
        plain = set(options) <= {"--run", "-r"}
        if plain:
            settings(name, schema, argv)  # a mistake is answered before any folder is made
        forget_run_dir()
        _register(create=plain or is_sweep(options))
        if not is_first_process() or RUN_DIR_ENV in os.environ:
            overrides += ["hydra.output_subdir=null", "hydra.job_logging.root.handlers=[console]"]
        _hydra_main(name, job, [*options, *overrides])
    except Exception as error:
        if isinstance(error, ValueError) and not _job:  # Hydra about options that exclude each other
            error = ConfigError(str(error))
        return _report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    failed = sum(code == 1 for code in codes)
    if failed and len(codes) > 1:
        print(f"error: {failed} of {len(codes)} jobs failed", file=sys.stderr)
    return max(codes, default=0)


def _prepared(schema: type, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options and overrides as Hydra shall get them.

    --config-dir becomes an override, so that processes started from here and a resumed run find it again.
    """
    options, typed = split(argv)
    overrides = _resumed(readable(typed, schema, sweep=is_sweep(options)), schema)
    for option in _CONFIG_DIR:
        while option in options[:-1]:
            at = options.index(option)
            folder = os.path.abspath(options[at + 1])
            del options[at : at + 2]
            if not os.path.isdir(folder):
                raise ConfigError(f"{option} {folder}: no such folder; it should hold model/, data/ or experiment/")
            overrides.append(f"hydra.searchpath=[{quoted('file://' + folder)}]")
    return options, overrides


def _run_job(cfg: Any, schema: type[T], run: Run[T]) -> int:
    """One job: its settings, its folder, its exit status. A sweep goes on after a job that failed."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    given = list(hydra.overrides.task)
    _job[:] = given + [text for text in hydra.overrides.hydra if text.startswith("hydra.searchpath=")]
    try:
        config = _settings(cfg, schema, given)
        if is_first_process():
            _remember(folder, _job)
        return run(config, folder) or 0
    except Exception as error:
        return _report(error)


def _hydra_main(name: str, job: Callable[[Any], None], argv: list[str]) -> None:
    import hydra

    with _patched(argv):
        hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)(job)()


@contextmanager
def _patched(argv: list[str]) -> Iterator[None]:
    """argv as Hydra shall read it, and Hydra's errors raised to us instead of printed."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [before[0], *argv], "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _register(create: bool) -> None:
    """Hand Hydra the schemas and the run folder; ``create`` false only names the folder."""
    from omegaconf import OmegaConf

    register()
    OmegaConf.register_new_resolver("calm.run_dir", lambda name: run_dir(name, create=create), replace=True)


def _compose(name: str, overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose(name, overrides=overrides)


def _settings(cfg: Any, schema: type[T], overrides: Sequence[str]) -> T:
    """Plain objects from the composed settings. Raises ConfigError, naming key and value."""
    from omegaconf import OmegaConf

    for key in ("checkpoint", "resume"):
        if cfg.get(key) == "":
            raise ConfigError(f"{key}= is empty; give a folder")
    if "model" in cfg:
        _check_model(cfg)
    if "data" in cfg and cfg.data is not None and OmegaConf.is_missing(cfg.data, "name"):
        _fill_data(cfg, overrides, required="model" in cfg)
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, schema)
    _expand_home(config)
    return config


def _check_model(cfg: Any) -> None:
    if cfg.model is not None and cfg.checkpoint is not None:
        raise ConfigError(
            f"+model={cfg.model.name} and checkpoint={cfg.checkpoint} exclude each other: "
            "+model= starts a new model, checkpoint= goes on from a folder; drop one"
        )
    if cfg.model is None and cfg.checkpoint is None and cfg.resume is None:
        raise ConfigError(f"no model chosen: give +model=NAME ({', '.join(_choices('model'))}) or checkpoint=FOLDER")


def _choices(group: str) -> list[str]:
    from hydra.core.global_hydra import GlobalHydra

    if GlobalHydra().is_initialized():
        names = GlobalHydra.instance().config_loader().get_group_options(group)
    else:
        names = [each.stem for each in (CONF_DIR / group).glob("*.yaml")]
    return sorted(name for name in names if not name.startswith("_"))


def _fill_data(cfg: Any, overrides: Sequence[str], required: bool) -> None:
    """Without data=NAME the corpus is the one that the checkpoint was trained on; single ``data.x=`` still count."""
    from omegaconf import OmegaConf

    single = [key for key in (Override.parse(text).key for text in overrides) if key.startswith("data.")]
    sidecar = Path(cfg.checkpoint or "").expanduser() / "early_exit.json"
    if cfg.checkpoint is not None and not sidecar.parent.is_dir():
        raise ConfigError(f"checkpoint={cfg.checkpoint}: no such folder; give a model folder such as runs/demo/model")
    if cfg.checkpoint is not None and (required or single) and sidecar.is_file():
        typed = {key: OmegaConf.select(cfg, key) for key in single}
        cfg.data = OmegaConf.merge(cfg.data, json.loads(sidecar.read_text(encoding="utf-8"))["data"])
        for key, value in typed.items():
            OmegaConf.update(cfg, key, value)
    elif required or single:
        raise ConfigError(f"no corpus chosen: give data=NAME ({', '.join(_choices('data'))})")
    else:
        cfg.data = None


def _expand_home(config: Any) -> None:
    """``~/x`` in a path setting means the home folder; the shell expands it only at the start of a word."""
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            _expand_home(value)
        elif each.name in _PATHS and isinstance(value, str) and value.startswith("~"):
            setattr(config, each.name, os.path.expanduser(value))


def _resumed(overrides: list[str], schema: type) -> list[str]:
    """With resume=FOLDER, the overrides of that run first, then those typed now; the run folder stays the same."""
    given = {Override.parse(text).key: Override.parse(text) for text in overrides}
    if "resume" not in given or "resume" not in {each.name for each in fields(schema)}:
        return overrides
    target = text_of(given["resume"])
    if target in (None, "", "auto"):
        return overrides
    folder = Path(str(target)).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"resume={target}: no such folder; give a run folder or one of its checkpoints/step-N")
    found = [each for each in (folder, *folder.absolute().parents[:2]) if (each / _OVERRIDES).is_file()]
    if not found:
        return overrides
    before = json.loads((found[0] / _OVERRIDES).read_text(encoding="utf-8"))
    kept = [text for text in before if Override.parse(text).key not in given]
    if "checkpoint" in given:
        kept = [text for text in kept if Override.parse(text).key != "model"]
    if "hydra.run.dir" not in given and RUN_DIR_ENV not in os.environ:
        kept.append(str(readable([f"hydra.run.dir={found[0]}"], schema, sweep=False)[0]))
    return kept + overrides


def _remember(folder: Path, overrides: Sequence[str]) -> None:
    """Write the job's overrides, so that resume= needs no repetition of them."""
    kept = [text for text in overrides if Override.parse(text).key != "resume"]
    part = folder / f".{_OVERRIDES}.{os.getpid()}"
    part.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    part.replace(folder / _OVERRIDES)


def _report(error: Exception) -> int:
    """Print a user's error as one line and give its exit status; raise what is not the user's to fix."""
    from .cli_errors import one_line

    line = one_line(error)
    if line is None or os.environ.get("CALM_DEBUG") == "1":
        raise error
    print(f"error: {line}", file=sys.stderr)
    return 1
