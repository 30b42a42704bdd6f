"""What exit training costs: tokens/s and peak memory of one optimizer step against a plain T5's.

Four variants of forward + backward + AdamW on the same model and batch:
  plain       Hugging Face's T5 with ``labels=``, as one would fine-tune without exits
  final_only  our decoder loop, last layer's loss only
  rotate=M    the last layer and M others, drawn anew in every step
  weighted    every layer in every step
Steps are interleaved, so that a noisy machine disturbs all variants alike; rates are medians. Tokens are target tokens
without padding. On a CPU, memory is the peak resident set of a fresh process above that before the model was built
(weights, gradients, optimizer and activations); on a GPU what torch allocated at most. Ignored: data loading, several
processes, gradient accumulation.

    python -m eval.train_step shapes=[tiny]
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from calm.checkpoint import write_json
from calm.cli import program
from calm.config import ExitLoss, FinetuneConfig, Precision, ShapeConfig, StepShape, TrainStepConfig
from calm.device import choose_device
from calm.environment import environment
from calm.losses import layer_losses
from calm.models.build import t5_from_scratch
from calm.models.settings import EarlyExitSettings
from calm.models.t5 import EarlyExitT5
from calm.progress import Progress

PLAIN = "plain"
GOAL_RATE, GOAL_MEMORY = 0.7, 1.3  # of the rotating variant against the plain step


@dataclass(frozen=True)
class Case:
    """A model shape and its batch; targets are 40 to 100 % of ``target`` long, the rest is padding."""

    name: str
    shape: ShapeConfig
    rows: int
    source: int
    target: int


CASES = {
    StepShape.tiny: Case("tiny", ShapeConfig(), rows=64, source=48, target=24),
    StepShape.small: Case(
        "small",
        ShapeConfig(
            vocab_size=32128,
            d_model=512,
            d_kv=64,
            num_heads=6,
            d_ff=1024,
            num_layers=8,
            num_decoder_layers=8,
            tied=False,
        ),
        rows=2,
        source=512,
        target=128,
    ),
}


@dataclass
class Batch:
    sources: Tensor
    source_mask: Tensor
    inputs: Tensor
    labels: Tensor

    @property
    def tokens(self) -> int:
        return int((self.labels != -100).sum())


def variants(rotate: int) -> dict[str, FinetuneConfig | None]:
    """Name to loss settings; None is the plain step."""
    return {
        PLAIN: None,
        "final_only": FinetuneConfig(loss=ExitLoss.final_only),
        f"rotate={rotate}": FinetuneConfig(rotate=rotate),
        "weighted": FinetuneConfig(),
    }


def word_tokenizer(size: int) -> PreTrainedTokenizerBase:
    """A vocabulary of the right size; no text is read here."""
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, size)}}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def build(case: Case, device: torch.device, seed: int) -> EarlyExitT5:
    torch.manual_seed(seed)
    settings = EarlyExitSettings(exit_layers=list(range(1, case.shape.num_decoder_layers)))
    model = t5_from_scratch(case.shape, word_tokenizer(case.shape.vocab_size), settings)
    return model.to(device).train()


def make_batch(case: Case, device: torch.device, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    vocab = case.shape.vocab_size
    sources = torch.randint(3, vocab, (case.rows, case.source), generator=draw)
    labels = torch.randint(3, vocab, (case.rows, case.target), generator=draw)
    shortest = max(1, int(0.4 * case.target))
    lengths = torch.linspace(case.target, shortest, case.rows).long()
    labels[torch.arange(case.target) >= lengths[:, None]] = -100
    inputs = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1].clamp_min(0)], dim=1)
    mask = torch.ones_like(sources, dtype=torch.bool)
    return Batch(*(part.to(device) for part in (sources, mask, inputs, labels)))


class Stepper:
    """One model and optimizer; ``step`` is one optimizer step of a variant."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype | None, seed: int) -> None:
        self.model, self.batch = build(case, device, seed), make_batch(case, device, seed)
        self.optimizer = torch.optim.AdamW(self.model.hf.parameters(), lr=1e-4)
        self.device, self.dtype, self.seed, self.count = device, dtype, seed, 0

    def loss(self, config: FinetuneConfig | None) -> Tensor:
        """Token mean, as the trainer takes it."""
        model, batch = self.model, self.batch
        if config is None:
            loss: Tensor = model.hf(
                input_ids=batch.sources,
                attention_mask=batch.source_mask.long(),
                decoder_input_ids=batch.inputs,
                labels=batch.labels,
                use_cache=False,
            ).loss
            return loss
        encoded = model.encode(batch.sources, batch.source_mask)
        hiddens = model.decoder_hiddens(encoded, batch.source_mask, batch.inputs)
        parts = layer_losses(model, hiddens, batch.labels, config, self.count, self.seed)
        return parts.total / parts.num_tokens

    def step(self, config: FinetuneConfig | None) -> float:
        """Seconds of one step."""
        self.count += 1
        self._wait()
        start = time.perf_counter()
        low = torch.autocast(self.device.type, dtype=self.dtype) if self.dtype is not None else nullcontext()
        with low:
            loss = self.loss(config)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def time_variants(
    stepper: Stepper, configs: dict[str, FinetuneConfig | None], warmup: int, repeats: int, tick: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of every counted step of every variant, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    for repeat in range(warmup + repeats):
        for name, config in configs.items():
            taken = stepper.step(config)
            if repeat >= warmup:
                seconds[name].append(taken)
            tick()
    return seconds


def resident_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def peak_bytes(case: Case, config: FinetuneConfig | None, device: torch.device, dtype: torch.dtype | None) -> int:
    """Peak memory of two steps from nothing (the second has the optimizer's state as well), in this process."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resident_bytes("VmRSS")
    stepper = Stepper(case, device, dtype, seed=0)
    for _ in range(2):
        stepper.step(config)
    return (torch.cuda.max_memory_allocated() if device.type == "cuda" else resident_bytes("VmHWM")) - before


def _child(
    pipe: Connection, case: Case, config: FinetuneConfig | None, dtype: torch.dtype | None, threads: int
) -> None:
    torch.set_num_threads(threads)
    pipe.send(peak_bytes(case, config, torch.device("cpu"), dtype))
    pipe.close()


def peak_in_fresh_process(case: Case, config: FinetuneConfig | None, dtype: torch.dtype | None) -> int:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, case, config, dtype, torch.get_num_threads()))
    child.start()
    theirs.close()
    try:
        return int(ours.recv())
    finally:
        child.join()


def measure(config: TrainStepConfig, device: torch.device, dtype: torch.dtype | None) -> list[dict[str, Any]]:
    """One flat record per shape and variant."""
    records: list[dict[str, Any]] = []
    configs = variants(config.rotate)
    for name in config.shapes:
        case = CASES[name] if config.batch_size is None else replace(CASES[name], rows=config.batch_size)
        work = (config.warmup + config.repeats + int(config.memory)) * len(configs)
        with Progress(work, f"{case.name} shape", unit="step") as bar:
            peaks: dict[str, int] = {}
            for variant, loss in configs.items() if config.memory else ():
                if device.type == "cuda":
                    peaks[variant] = peak_bytes(case, loss, device, dtype)
                else:
                    peaks[variant] = peak_in_fresh_process(case, loss, dtype)
                bar.update()
            stepper = Stepper(case, device, dtype, config.seed)
            seconds = time_variants(stepper, configs, config.warmup, config.repeats, bar.update)
        records += case_records(case, stepper.batch.tokens, seconds, peaks)
    return records


def case_records(
    case: Case, tokens: int, seconds: dict[str, list[float]], peaks: dict[str, int]
) -> list[dict[str, Any]]:
    """Rates, peaks and both as ratios to the plain step."""
    median = {name: statistics.median(samples) for name, samples in seconds.items()}
    return [
        {
            "shape": case.name,
            "variant": name,
            "tokens_per_s": tokens / median[name],
            "tokens_per_s_ratio": median[PLAIN] / median[name],
            "peak_bytes": peaks.get(name),
            "peak_ratio": peaks[name] / peaks[PLAIN] if peaks else None,
            "seconds": samples,
            "rows": case.rows,
            "source_tokens": case.rows * case.source,
            "target_tokens": tokens,
        }
        for name, samples in seconds.items()
    ]


def table(records: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'shape':<7} {'variant':<11} {'tokens/s':>9} {'ratio':>6} {'peak MiB':>9} {'ratio':>6}"]
    for record in records:
        peak, ratio = record["peak_bytes"], record["peak_ratio"]
        memory = f"{'-':>9} {'-':>6}" if peak is None else f"{peak / 2**20:>9.0f} {ratio:>6.2f}"
        lines.append(
            f"{record['shape']:<7} {record['variant']:<11} {record['tokens_per_s']:>9.0f} "
            f"{record['tokens_per_s_ratio']:>6.2f} {memory}"
        )
    return lines


def goals(records: list[dict[str, Any]], rotate: int) -> dict[str, bool]:
    """Per shape: does the rotating variant keep the goals on rate and (where measured) memory?"""
    return {
        record["shape"]: record["tokens_per_s_ratio"] >= GOAL_RATE
        and (record["peak_ratio"] is None or record["peak_ratio"] <= GOAL_MEMORY)
        for record in records
        if record["variant"] == f"rotate={rotate}"
    }


def run(config: TrainStepConfig, run_dir: Path) -> None:
    device = torch.device(choose_device(config.device))
    low = config.precision is Precision.bf16 or (config.precision is Precision.auto and device.type == "cuda")
    records = measure(config, device, torch.bfloat16 if low else None)
    met = goals(records, config.rotate)
    print("\n".join(table(records)))
    print(f"goal of rotate={config.rotate}: >= {GOAL_RATE} of plain's tokens/s, <= {GOAL_MEMORY} x its memory: {met}")
    summary = {
        "program": "train_step",
        "device": str(device),
        "precision": "bf16" if low else "fp32",
        "threads": torch.get_num_threads(),
        "warmup": config.warmup,
        "repeats": config.repeats,
        "goal_met": met,
        "steps": records,
        "environment": environment(),
    }
    write_json(run_dir / "summary.json", summary)
    print(json.dumps(summary))


main = program("train_step", TrainStepConfig, run)

if __name__ == "__main__":
    main()
