"""Metrics of a run: ``metrics.jsonl`` always, W&B beside it when it can. The file is the truth, W&B is a view.

Whatever W&B does (no key, no network, full disk, killed service), training goes on. Whatever the file does
(folder gone, disk full), training stops, for a number that is silently lost is worse.
"""

import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .checkpoint import finite, read_json, write_json
from .config import TrackingConfig, TrackingMode
from .errors import TrainingError

if TYPE_CHECKING:
    from .tracking_cards import Card

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
STEP = "train/global_step"
Mode = Literal["online", "offline", "disabled"]


class Tracker:
    """One run folder's metrics.

    Args:
        run_dir: existing folder; holds metrics.jsonl, wandb.json (the run's id) and ``wandb/``.
        job_type: train, calibrate, table1 ...
        settings: resolved settings of the run, recorded once in W&B's config.
        about: what the run is of, such as ``tiny-restaurants``: its group where the settings name none, and a tag.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: TrackingConfig,
        job_type: str,
        settings: Mapping[str, Any] | None = None,
        about: str | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / METRICS
        self._run: Any = None
        self._about, self._step = about, 0
        self._append({"event": "start", "job_type": job_type})
        mode = wandb_mode(config.mode)
        if mode != "disabled":
            self._guard("start", lambda: self._start(config, mode, job_type, settings or {}))

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Record values at an optimizer step. Raises TrainingError when the file cannot be written."""
        values = {key: finite(value) for key, value in metrics.items()}
        self._step = step
        self._append({"step": step, **values})
        self._guard("log", lambda: self._run.log({STEP: step, **values}) if self._run else None)

    def event(self, name: str, step: int | None = None, **details: Any) -> None:
        """Record that something happened: resume, override, bad step, stage."""
        details = finite(details)
        self._append({"event": name, **({} if step is None else {"step": step}), **details})
        self._guard("event", lambda: self._event(name, step, details))

    def settings(self, prefix: str, values: Mapping[str, Any]) -> None:
        """Record settings of one stage under ``prefix/``, so that stages of one run never overwrite each other."""
        named = {f"{prefix}/{key}": finite(value) for key, value in values.items()}
        self._guard("settings", lambda: self._run.config.update(named, allow_val_change=True) if self._run else None)

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A small table, at the step of what was logged last; the file tells its columns, W&B keeps it."""
        self._append({"event": "table", "key": key, "columns": list(columns), "rows": len(rows)})
        self._guard("table", lambda: self._table(key, columns, rows) if self._run else None)

    def made(self, card: "Card") -> None:
        """This run made what the card tells of."""
        self._append({"event": "made", "artifact": card.name, "type": card.type, "sha256": card.sha256})
        self._guard("artifact", lambda: self._make(card) if self._run else None)

    def used(self, card: "Card") -> None:
        """This run started from what the card tells of."""
        self._append({"event": "used", "artifact": card.name, "type": card.type, "sha256": card.sha256})
        self._guard("artifact", lambda: self._use(card) if self._run else None)

    def finish(self, exit_code: int = 0) -> None:
        run, self._run = self._run, None
        self._guard("finish", lambda: run.finish(exit_code=exit_code) if run else None)

    def _append(self, record: Mapping[str, Any]) -> None:
        """One line, on the disk before we return. Opened by name each time: a removed folder must be noticed."""
        line = json.dumps({**record, "time": round(time.time(), 3)}, allow_nan=False) + "\n"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.write(descriptor, line.encode()) != len(line.encode()):
                    raise OSError(28, "short write")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise TrainingError(
                f"cannot write {self.path}: {os.strerror(error.errno or 0)}. The run stops, since its metrics would be "
                "lost; make the folder writable again (free space?) and go on with resume="
            ) from error

    def _start(self, config: TrackingConfig, mode: Mode, job_type: str, settings: Mapping[str, Any]) -> None:
        import wandb  # half a second and 60 MB: only when wanted

        id_file = self.run_dir / "wandb.json"
        if not id_file.is_file():
            write_json(id_file, {"id": secrets.token_hex(4)})
        run_id = str(read_json(id_file)["id"])
        self._run = wandb.init(
            project=config.project,
            group=config.group or self._about,
            tags=[*dict.fromkeys([*config.tags, *([self._about] if self._about else [])])] or None,
            job_type=job_type,
            name=f"{self.run_dir.name}-{run_id}",
            id=run_id,
            resume="allow" if mode == "online" else None,
            dir=str(self.run_dir.resolve()),
            config=finite(dict(settings)),
            allow_val_change=True,
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", init_timeout=30, finish_timeout=60),
        )
        # every metric has one axis of ours: W&B's own counter would drop the steps that a resumed run repeats
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def _table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        with _kept_in(self.run_dir):
            table = wandb.Table(columns=list(columns), data=[finite(list(row)) for row in rows])
            self._run.log({STEP: self._step, key: table})

    def _make(self, card: "Card") -> None:
        with _kept_in(self.run_dir):
            self._run.log_artifact(_artifact(card))

    def _use(self, card: "Card") -> None:
        with _kept_in(self.run_dir):
            if not self._run.offline:
                self._run.use_artifact(_artifact(card))
            else:  # use_artifact asks the server; the record that it leaves behind is what a later `wandb sync` needs
                self._run._log_artifact(_artifact(card), is_user_created=True, use_after_commit=True)

    def _event(self, name: str, step: int | None, details: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        where = f"events/{name}" if step is None else f"events/{name}/step-{step:06d}"
        self._run.config.update({where: dict(details)}, allow_val_change=True)

    def _guard(self, what: str, action: Any) -> None:
        """Run a W&B call; after its first failure W&B is left alone and the file goes on."""
        try:
            action()
        except Exception as error:
            self._run = None
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            log.warning("W&B %s failed (%s); the run goes on, its metrics are in %s", what, reason, self.path)


@contextmanager
def _kept_in(run_dir: Path) -> Iterator[None]:
    """Artifacts of an offline run wait in the run's folder and not in the user's home: they are synced from there."""
    before = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = before or str(run_dir.resolve() / "wandb")
    try:
        yield
    finally:
        if before is None:
            del os.environ["WANDB_DATA_DIR"]


def _artifact(card: "Card") -> Any:
    """A card as W&B has it; equal cards have equal digests."""
    import wandb

    artifact = wandb.Artifact(card.name, card.type, metadata=finite(dict(card.metadata)))
    for name, content in card.files.items():
        if isinstance(content, Path):
            artifact.add_file(str(content), name=name)
        else:
            with artifact.new_file(name, mode="w", encoding="utf-8") as file:
                file.write(content)
    return artifact


def wandb_mode(mode: TrackingMode) -> Mode:
    """``auto`` is online when an API key is set, else offline; WANDB_MODE in the environment narrows, never widens."""
    forced = os.environ.get("WANDB_MODE", "")
    if mode is TrackingMode.disabled or forced == "disabled":
        return "disabled"
    if mode is TrackingMode.offline or forced == "offline":
        return "offline"
    return "online" if mode is TrackingMode.online or has_api_key() else "offline"


def has_api_key() -> bool:
    """In the environment, or where ``wandb login`` puts it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return "wandb" in netrc.read_text()
    except OSError:
        return False


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics.jsonl; a last line cut by a crash is left out."""
    records: list[dict[str, Any]] = []
    for line in (Path(run_dir) / METRICS).read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
