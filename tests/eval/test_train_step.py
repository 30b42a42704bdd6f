"""The benchmark of the training step: that it measures what it says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calm.cli import settings
from calm.config import Precision, ShapeConfig, StepShape, TrainStepConfig
from calm.errors import ConfigError
from eval import train_step as bench

CPU = torch.device("cpu")
MICRO = bench.Case(
    "micro",
    ShapeConfig(vocab_size=50, d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=1, num_decoder_layers=3),
    rows=4,
    source=6,
    target=10,
)


@pytest.fixture
def micro(monkeypatch):
    monkeypatch.setattr(bench, "CASES", {StepShape.tiny: MICRO})


def test_batch_has_padding_that_is_not_counted():
    batch = bench.make_batch(MICRO, CPU, 0)
    lengths = (batch.labels != -100).sum(1)
    assert lengths.max() == 10 and lengths.min() == 4 and batch.tokens == int(lengths.sum()) < batch.labels.numel()
    assert torch.equal(
        batch.inputs[:, 1:][batch.labels[:, :-1] != -100], batch.labels[:, :-1][batch.labels[:, :-1] != -100]
    )
    assert not batch.inputs[:, 0].any()


def test_the_plain_step_and_ours_are_the_same_loss():
    """Hugging Face's forward and our loop with the last layer only: the comparison is of like with like."""
    stepper = bench.Stepper(MICRO, CPU, None, 0)
    plain, ours = stepper.loss(None), stepper.loss(bench.variants(2)["final_only"])
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_every_variant_trains(dtype):
    for config in bench.variants(1).values():
        stepper = bench.Stepper(MICRO, CPU, dtype, 0)
        before = stepper.loss(config).item()
        for _ in range(8):
            for group in stepper.optimizer.param_groups:
                group["lr"] = 1e-2
            assert stepper.step(config) > 0
        assert stepper.loss(config).item() < before


def test_variants_are_interleaved_and_warm_ups_left_out():
    class Recorder:
        calls: list[object] = []

        def step(self, config):
            self.calls.append(config)
            return float(len(self.calls))

    recorder, ticks = Recorder(), []
    configs = bench.variants(2)
    seconds = bench.time_variants(recorder, configs, warmup=1, repeats=2, tick=lambda: ticks.append(1))
    assert recorder.calls == list(configs.values()) * 3 and len(ticks) == 12
    assert seconds[bench.PLAIN] == [5.0, 9.0] and seconds["weighted"] == [8.0, 12.0]


def test_ratios_and_goals():
    seconds = {"plain": [1.0, 2.0, 9.0], "rotate=2": [2.5, 2.5, 2.5]}
    records = bench.case_records(MICRO, 100, seconds, {"plain": 1000, "rotate=2": 1400})
    plain, rotating = records
    assert (plain["tokens_per_s"], plain["tokens_per_s_ratio"], plain["peak_ratio"]) == (50, 1, 1)
    assert (rotating["tokens_per_s"], rotating["tokens_per_s_ratio"], rotating["peak_ratio"]) == (40, 0.8, 1.4)
    assert bench.goals(records, 2) == {"micro": False}
    assert bench.goals(bench.case_records(MICRO, 100, seconds, {}), 2) == {"micro": True}
    assert bench.goals(bench.case_records(MICRO, 100, {**seconds, "rotate=2": [3.0]}, {}), 2) == {"micro": False}


def test_resident_memory_sees_what_a_process_holds():
    before = bench.resident_bytes("VmRSS")
    block = torch.ones(2**25)  # 128 MiB, touched
    held = bench.resident_bytes("VmRSS")
    assert held - before > 0.9 * block.numel() * 4
    assert bench.resident_bytes("VmHWM") >= held - 2**20  # the kernel counts in batches
    with pytest.raises(OSError, match="no VmNothing"):
        bench.resident_bytes("VmNothing")


def test_program_prints_a_table_and_its_summary_last(micro, tmp_path: Path, capsys):
    config = TrainStepConfig(shapes=[StepShape.tiny], repeats=2, memory=False, precision=Precision.fp32)
    bench.run(config, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert [record["variant"] for record in summary["steps"]] == ["plain", "final_only", "rotate=2", "weighted"]
    assert all(len(record["seconds"]) == 2 and record["peak_bytes"] is None for record in summary["steps"])
    assert lines[0].split()[:3] == ["shape", "variant", "tokens/s"] and len(lines) == 7


@pytest.mark.slow
def test_memory_is_measured_in_a_fresh_process():
    wide = replace(MICRO, shape=replace(MICRO.shape, vocab_size=30_000, d_model=512))
    weights = 4 * sum(p.numel() for p in bench.build(wide, CPU, 0).hf.parameters())
    # weights, gradients and Adam's two moments at the least
    assert 3.9 * weights < bench.peak_in_fresh_process(wide, None, None) < 20 * weights


def test_settings_are_checked():
    assert settings("train_step", TrainStepConfig, ["shapes=[tiny]", "rotate=1"]).rotate == 1
    with pytest.raises(ConfigError, match="at least one"):
        TrainStepConfig(shapes=[])
    with pytest.raises(ConfigError, match="rotate must lie"):
        TrainStepConfig(rotate=0)
    with pytest.raises(ConfigError, match="fp16 is refused"):
        TrainStepConfig(precision=Precision.fp16)
