"""Stage 1: all layers learn to speak. The loop; what a step is stands in step.py, what is saved in state.py."""

import logging
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calm.config import FinetuneConfig
from calm.decode_batch import BatchDecoder
from calm.errors import TrainingError
from calm.metrics import rouge_l_many
from calm.models.speaking import SpeakingModel
from calm.policies import Full, Policy, SkipSchedule
from calm.progress import Progress
from calm.records import Example

from .batches import Feed
from .context import Context
from .dropout import set_dropout
from .launch import check_divisible
from .lora import merged, put_in
from .memory import peak_memory_gib
from .optim import build_optimizer, learning_rate, load_optimizer, names_in_order, optimizer_state, set_rate
from .sharded import sharded
from .signals import Stopped
from .state import Best, TrainerState, discard, folder_of, is_whole, point, rotate, save_checkpoint, steps_after
from .step import SpeakingLoss, Stepper, StepResult, schedule_of
from .whole import whole_model

log = logging.getLogger(__name__)


class Finetune:
    """One run of stage 1, from its first step or from a checkpoint's.

    Args:
        model: is trained in place; its classifier is left alone.
        train, dev: rows to learn from; rows of which ``finetune.eval_rows`` validate.
        state: where the run stands.
        checkpoint: the folder that ``state`` came from, for the optimizer's state.
    """

    def __init__(
        self,
        context: Context,
        model: SpeakingModel,
        train: list[Example],
        dev: list[Example],
        state: TrainerState,
        checkpoint: Path | None = None,
    ) -> None:
        self.context, self.config, self.state = context, context.config.finetune, state
        check_divisible(self.config, context.world)
        self.model = prepare_model(model, self.config)
        seed = context.config.seed
        self.lora = put_in(context, self.model, checkpoint)
        self.dev = random.Random(seed).sample(dev, min(len(dev), self.config.eval_rows))
        loss = SpeakingLoss(model, self.config, seed)
        optimizer = build_optimizer(model.named_parameters(), self.config)
        self.names = names_in_order(model.named_parameters(), optimizer)
        wrapped, self.optimizer = context.accelerator.prepare(loss, optimizer)
        if checkpoint is not None:
            load_optimizer(checkpoint, self.optimizer, self.names, self.config.optimizer.value)
        self.wrapped: nn.Module = wrapped
        self.feed = Feed(model, train, self.config.batch_size, seed, self.config.one_per_family)
        self.stepper = Stepper(context.accelerator, loss, wrapped, self.optimizer, self.feed, self.config, seed)
        self._saved = state.step if checkpoint is not None else -1
        self._whole: set[Path] = set()  # checkpoints known to be undamaged
        self._abandoned = steps_after(context.run_dir, state.step) if checkpoint is not None else []
        if checkpoint is not None:
            self._check_best()
        self._clock = time.monotonic()

    def _check_best(self) -> None:
        """The best of an earlier step may be gone: the run had gone on to a better one. All processes look."""
        best = self.state.best
        if best.step >= 0 and not is_whole(folder_of(self.context.run_dir, best.step)):
            self.context.say(f"the best model so far, of step {best.step}, is gone or damaged; the best is sought anew")
            self.state.best = Best()

    def run(self) -> None:
        """Train to the last step. Raises Stopped, after saving, when a signal came; TrainingError after bad steps."""
        state, config = self.state, self.config
        shown = self.context.main
        self._clock = time.monotonic()
        with self.context.signals.deferred(), Progress(config.steps, "finetune", "step", state.step, shown) as bar:
            self._validate_when_due(bar)  # a signal may have come between a step and its validation
            self.wrapped.train()
            while state.step < config.steps:
                set_rate(self.optimizer, learning_rate(config, state.step))
                rows = self.feed.next(state.position)
                result = self.stepper.take(rows, state.step, self.context.signals.received)
                self._account(result)
                bar.update(1, **({"loss": result.loss} if result.applied else {"skipped": state.bad_steps}))
                done = state.step == config.steps
                if state.step % config.log_every == 0 or done:
                    self._log(bar)
                if result.signal:
                    self._save()
                    raise Stopped(result.signal)
                self._validate_when_due(bar)
                if state.step % config.save_every == 0 or done:
                    self._save()

    def _account(self, result: StepResult) -> None:
        """Add a step to the window; stop after too many bad ones in a row."""
        state, window = self.state, self.state.window
        state.step += 1
        if result.applied:
            state.tokens += result.tokens
            state.bad_in_a_row = 0
            window.loss += result.loss * result.tokens
            window.tokens += result.tokens
            if result.exit_spread is not None:
                window.exit_spread = (window.exit_spread or 0.0) + result.exit_spread * result.tokens
            for layer, value in result.layer_losses.items():
                key = str(layer)
                window.layer_losses[key] = window.layer_losses.get(key, 0.0) + value * result.tokens
                window.layer_tokens[key] = window.layer_tokens.get(key, 0) + result.tokens
            return
        state.bad_steps += 1
        state.bad_in_a_row += 1
        window.bad_steps += 1
        rows = list(result.bad_rows)
        told = ", ".join(rows[:5]) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
        what = "loss" if not math.isfinite(result.loss) else "gradients"
        if self.context.main:
            log.warning("step %d: %s not finite, update skipped; rows: %s", state.step, what, told)
        self.context.event("bad_step", state.step, what=what, rows=rows, in_a_row=state.bad_in_a_row)
        if state.bad_in_a_row >= self.config.max_bad_steps:
            raise TrainingError(
                f"{state.bad_in_a_row} steps in a row had a {what} that is not finite (last rows: {told}); "
                f"stopped at step {state.step}. {self._last_good()} Remove the rows or lower finetune.lr"
            )

    def _last_good(self) -> str:
        if self._saved < 0:
            return "No checkpoint had been written yet."
        return f"The last good checkpoint is {folder_of(self.context.run_dir, self._saved)}."

    def _log(self, bar: Progress) -> None:
        """One line of means over the window, token-weighted; a window without a good step has no loss."""
        state, window = self.state, self.state.window
        elapsed = time.monotonic() - self._clock
        loss = window.loss / window.tokens if window.tokens else float("nan")
        values: dict[str, float | int | str | None] = {
            "train/loss": loss,
            "lr": learning_rate(self.config, state.step),
            "tokens_per_s": window.tokens / elapsed,
            "train/tokens": state.tokens,
            "train/epoch": state.position.epoch,
            "train/bad_steps": state.bad_steps,
            "peak_memory_gib": peak_memory_gib(self.context.device),
        }
        for layer in sorted(window.layer_losses, key=int):
            values[f"train/loss_layer_{int(layer):02}"] = window.layer_losses[layer] / window.layer_tokens[layer]
        if window.exit_spread is not None and window.tokens:
            values["train/exit_spread"] = window.exit_spread / window.tokens
        self.context.track(values, state.step)
        bar.update(0, tokens_per_s=float(window.tokens / elapsed), gib=float(values["peak_memory_gib"] or 0))
        state.window = type(window)()
        self._clock = time.monotonic()

    def _validate_when_due(self, bar: Progress) -> None:
        """ROUGE-L at full depth, or by the schedule, on the validation rows; a new best is saved and remembered."""
        state = self.state
        due = state.step > state.validated and (
            state.step % self.config.eval_every == 0 or state.step == self.config.steps
        )
        if not due or not self.dev:
            return
        policy = Full() if (schedule := schedule_of(self.model, self.config)) is None else SkipSchedule(schedule)
        with merged(whole_model(self.model)) as model:
            score = evaluate(self.context, model, self.dev, policy)
        self.wrapped.train()
        state.validated = state.step
        self.context.track({"eval/rougeL": score, "eval/rows": len(self.dev)}, state.step)
        how = "full-depth" if isinstance(policy, Full) else "scheduled"
        bar.say(f"step {state.step}: {how} ROUGE-L {score:.4f} on {len(self.dev)} validation rows")
        if score > state.best.rouge_l:
            state.best.step, state.best.rouge_l = state.step, score
            self._save(again=True)  # this step may have been saved before it was validated
        self._clock = time.monotonic()

    def _save(self, again: bool = False) -> None:
        """A checkpoint of this step; once, unless ``again``. All processes take part, the first writes."""
        if self._saved == self.state.step and not again:
            return
        optimizer = optimizer_state(self.optimizer, self.names)
        with merged(whole_model(self.model)) as model:
            self.context.on_main(lambda: self._write(model, optimizer))
        self._saved = self.state.step

    def _write(self, model: SpeakingModel, optimizer: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
        run_dir, state = self.context.run_dir, self.state
        target = save_checkpoint(run_dir, model, optimizer, self.config.optimizer.value, state, self.lora)
        if state.best.step == state.step:
            point(run_dir, "best", target)
        self._whole.add(target)
        gone, self._abandoned = discard(run_dir, self._abandoned, state), []
        if gone:
            self.context.say(f"removed {', '.join(gone)}: the run went on from an earlier step")
        rotate(run_dir, state, self.config.keep, self._whole)


def prepare_model(model: SpeakingModel, config: FinetuneConfig) -> SpeakingModel:
    """Dropout and checkpointing as asked; gradients for all but the exit classifier, which a new backbone voids.

    Raises:
        ConfigError: a schedule exceeds the model's depth.
    """
    model.requires_grad_(True)
    model.classifier.requires_grad_(False)
    model.settings.has_classifier = False
    schedule = schedule_of(model, config)
    model.settings.skip_schedule = None if schedule is None else schedule.to_json()
    if config.dropout_rate is not None:
        set_dropout(model, config.dropout_rate)
    if config.gradient_checkpointing:
        model.hf.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model


def evaluate(context: Context, model: SpeakingModel, rows: list[Example], policy: Policy) -> float:
    """Mean ROUGE-L over ``rows``, decoded by all processes; the same number in each."""
    model.eval()
    score = torch.zeros(1, dtype=torch.float64, device=context.device)
    with sharded(BatchDecoder(model), context.accelerator) as decode:
        if decode is not None:
            traces = decode(rows, policy)
            score += float(rouge_l_many([trace.text for trace in traces], [row.target for row in rows]).mean())
    if context.world > 1:
        score = context.accelerator.reduce(score, "sum")
    return float(score)
