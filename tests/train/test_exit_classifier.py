"""Stage 2: what it learns, what it leaves alone, what it reports."""

import copy
import itertools
import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import train.exit_classifier as stage
from calm.config import ClassifierConfig, ClassifierLoss, Precision, TrackingConfig, TrackingMode
from calm.errors import TrainingError
from calm.models.settings import EarlyExitSettings
from calm.models.t5 import EarlyExitT5
from calm.tracking import Tracker, read_metrics
from tests.scripted import early_exit, random_t5, scripted
from train.classifier_report import auroc, f1, layer_reports
from train.exit_classifier import Features, Scale, fit_classifier

QUICK = ClassifierConfig(steps=40, batch_size=8, lr=0.02, warmup_steps=4, log_every=10, eval_rows=16)
STORIES = [([3, 1], [5, 6, 7, 8, 1]), ([4, 1], [10, 11, 1])]


def story_model() -> EarlyExitT5:
    return early_exit(scripted())


def random_rows(count, vocabulary=97, seed=0):
    draw = random.Random(seed)

    def ids(longest):
        return [*(draw.randrange(3, vocabulary) for _ in range(draw.randint(0, longest))), 1]

    return [(ids(7), ids(6)) for _ in range(count)]


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("objective", list(ClassifierLoss))
def test_learns_where_layers_disagree(objective):
    """In the story layers below 4 (after token 6) and 6 (after token 10) say something else than the last one."""
    model = story_model()
    config = ClassifierConfig(steps=150, batch_size=8, lr=0.1, warmup_steps=4, loss=objective, log_every=10)
    report = fit_classifier(model, STORIES * 8, STORIES * 2, config)
    assert [at.layer for at in report.layers] == [1, 2, 3, 4, 5]
    rates = [at.positive_rate for at in report.layers]
    assert rates == pytest.approx([6 / 8, 6 / 8, 6 / 8, 7 / 8, 7 / 8])
    assert all(at.auroc == 1 for at in report.layers)
    assert report.validation_loss < 0.5 * report.untrained_loss
    if objective is ClassifierLoss.independent:
        assert all(at.f1_stay == at.f1_exit == 1 for at in report.layers)


def test_only_the_classifier_changes():
    model = early_exit(random_t5())
    model.train()
    model.settings.has_classifier = False
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    before = state(model)
    fit_classifier(model, random_rows(30), random_rows(30), QUICK)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"classifier.linear.weight", "classifier.linear.bias"}
    assert flags == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training and model.settings.has_classifier


def test_dropout_and_reference_play_no_part():
    """A model in training mode with dropout gives the labels of its eval mode, which are its own words."""
    hf = random_t5()
    rows = random_rows(12)
    model = early_exit(hf)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    report = fit_classifier(model, rows, rows, QUICK)
    model.eval()
    agreeing, tokens = np.zeros(3), 0
    for source, target in rows:
        out = hf(
            input_ids=torch.tensor([source]),
            decoder_input_ids=torch.tensor([[0, *target[:-1]]]),
            output_hidden_states=True,
            use_cache=False,
        )
        full = out.logits.argmax(-1)
        for index in range(3):
            agreeing[index] += int((model.logits(out.decoder_hidden_states[index + 1]).argmax(-1) == full).sum())
        tokens += len(target)
    assert report.validation_tokens == tokens
    assert [at.positive_rate for at in report.layers] == pytest.approx(list(agreeing / tokens))


def test_model_scores_as_the_report_says():
    """The scaling of the features is folded into the weights: the model reads the raw residual."""
    model = early_exit(random_t5(spread=8.0))
    rows = random_rows(16)
    report = fit_classifier(model, rows, rows, QUICK)
    assert report.best_step > 0
    bar = stage.Progress(16, "", shown=False)
    features = stage.read(model, rows, 8, torch.device("cpu"), bar, QUICK)
    with torch.no_grad():
        scores = model.classifier.logit(features.hidden).double().numpy()
    assert layer_reports(scores, features.agrees.numpy(), [1, 2, 3]) == report.layers
    loss = stage.independent_loss(torch.tensor(scores), features.agrees)
    assert loss.item() == pytest.approx(report.validation_loss, rel=1e-5)


def test_folding_is_exact():
    torch.manual_seed(0)
    hidden = torch.randn(6, 2, 5, dtype=torch.float64) * 1e3 + 50
    scale = Scale(torch.randn(5).double() * 40, torch.rand(5).double() * 900)
    weight, bias = torch.randn(1, 5).double(), torch.randn(1).double()
    folded, shift = scale.fold(weight, bias)
    scaled = scale.apply_(Features(hidden.clone(), torch.zeros(6, 2, dtype=torch.bool)))
    torch.testing.assert_close(hidden @ folded.T + shift, scaled.hidden @ weight.T + bias)


def test_scale_is_the_mean_and_spread_and_survives_a_constant():
    torch.manual_seed(0)
    hidden = torch.randn(50, 3, 4) * torch.tensor([1.0, 100.0, 1e-3, 1.0]) + torch.tensor([0.0, 30.0, 0.0, 5.0])
    hidden[..., 3] = 5.0
    scale = stage.measure_scale(Features(hidden, torch.zeros(50, 3, dtype=torch.bool)))
    flat = hidden.flatten(0, 1)
    torch.testing.assert_close(scale.mean, flat.mean(0))
    torch.testing.assert_close(scale.spread[:3], flat.std(0, correction=0)[:3], rtol=1e-4, atol=0)
    assert scale.spread[3] == 1


def test_same_seed_same_weights():
    weights = []
    for seed in (0, 0, 1):
        model = early_exit(random_t5())
        fit_classifier(model, random_rows(16), random_rows(16), QUICK, seed=seed)
        weights.append(model.classifier.linear.weight.detach().clone())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_many_small_pools_take_all_steps(monkeypatch):
    rows, dev = random_rows(60), random_rows(10, seed=1)
    whole = fit_classifier(early_exit(random_t5()), rows, dev, QUICK)
    monkeypatch.setattr(stage, "POOL_BYTES", 20 * 3 * 32 * 4)  # twenty tokens
    sizes = [sum(len(target) for _, target in pool) for pool in stage.pool_sizes(rows, 3 * 32 * 4)]
    assert len(sizes) > 5 and max(sizes) < 60
    pieces = fit_classifier(early_exit(random_t5()), rows, dev, QUICK)
    assert [point["step"] for point in pieces.history] == [10, 20, 30, 40]
    assert pieces.train_tokens == whole.train_tokens and pieces.validation_tokens < whole.validation_tokens


def test_a_sample_of_the_rows_is_enough(monkeypatch):
    monkeypatch.setattr(stage, "TRAIN_TOKENS", 10)
    monkeypatch.setattr(stage, "TOKENS_PER_PARAMETER", 1)
    report = fit_classifier(early_exit(random_t5()), random_rows(200), random_rows(8, seed=1), QUICK)
    assert 32 <= report.train_tokens < 40


def test_best_state_is_kept():
    model = early_exit(random_t5())
    wild = ClassifierConfig(steps=30, batch_size=2, lr=30.0, warmup_steps=0, log_every=1)
    report = fit_classifier(model, random_rows(20), random_rows(10, seed=1), wild)
    losses = [report.untrained_loss, *(point["validation_loss"] for point in report.history)]
    assert report.validation_loss == min(losses) < losses[-1]
    assert losses.index(min(losses)) == report.best_step


def test_zero_steps_leave_an_undecided_classifier():
    model = early_exit(random_t5())
    model.settings.has_classifier = False
    report = fit_classifier(model, [], random_rows(4), ClassifierConfig(steps=0))
    assert not model.settings.has_classifier and report.train_tokens == 0
    assert model.classifier(torch.randn(3, 32)).tolist() == pytest.approx([0.5] * 3)


def test_report_and_metrics_are_written(tmp_path):
    tracker = Tracker(tmp_path, TrackingConfig(mode=TrackingMode.disabled), "train")
    path = tmp_path / "classifier.json"
    report = fit_classifier(story_model(), STORIES, STORIES, QUICK, tracker=tracker, first_step=100, report_path=path)
    tracker.finish()
    assert json.loads(path.read_text()) == report.to_json()
    points = {record["step"]: record for record in read_metrics(tmp_path) if "classifier/validation_loss" in record}
    assert list(points) == [110, 120, 130, 140]
    (last,) = [record for record in read_metrics(tmp_path) if "classifier/auroc_layer_04" in record]
    assert last["step"] == 140 and last["classifier/positive_rate_layer_04"] == 7 / 8
    table = report.lines()
    assert len(table) == 6 and "AUROC" in table[0]


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(TrainingError, match="at least 2 decoder layers"):
        fit_classifier(early_exit(random_t5(decoder_layers=1)), random_rows(4), random_rows(4), QUICK)
    with pytest.raises(TrainingError, match="at least 1 train and 1 dev rows"):
        fit_classifier(early_exit(random_t5()), random_rows(4), [], QUICK)
    broken = early_exit(random_t5())
    with torch.no_grad():
        broken.hf.decoder.block[0].layer[2].DenseReluDense.wo.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="validation loss is nan at step 0"):
        fit_classifier(broken, random_rows(4), random_rows(4), QUICK)


def test_auroc_counts_pairs():
    draw = np.random.default_rng(0)
    for _ in range(20):
        scores = draw.integers(0, 6, 30).astype(float)  # many ties
        actual = draw.random(30) < 0.4
        pairs = [
            1.0 if high > low else 0.5 if high == low else 0.0
            for high, low in itertools.product(scores[actual], scores[~actual])
        ]
        assert auroc(scores, actual) == pytest.approx(sum(pairs) / len(pairs))
    assert auroc(np.ones(3), np.ones(3, dtype=bool)) is None
    assert auroc(np.arange(4.0), np.array([False, False, True, True])) == 1


def test_f1_counts():
    predicted, actual = np.array([1, 1, 0, 0, 1], dtype=bool), np.array([1, 0, 1, 0, 1], dtype=bool)
    precision, recall = 2 / 3, 2 / 3
    assert f1(predicted, actual) == pytest.approx(2 * precision * recall / (precision + recall))
    assert f1(np.zeros(3, dtype=bool), np.zeros(3, dtype=bool)) is None
    assert f1(np.zeros(3, dtype=bool), np.ones(3, dtype=bool)) == 0


class ThreadGroup:
    """The part of torch.distributed that stage 2 uses, with threads for processes."""

    def __init__(self, size):
        self.size, self.own, self.barrier, self.slots = size, threading.local(), threading.Barrier(size), [None] * size

    def is_available(self):
        return True

    def is_initialized(self):
        return hasattr(self.own, "rank")

    def get_rank(self):
        return self.own.rank

    def get_world_size(self):
        return self.size

    def _exchange(self, value):
        self.slots[self.own.rank] = value
        self.barrier.wait(60)
        values = list(self.slots)
        self.barrier.wait(60)
        return values

    def all_reduce(self, tensor):
        tensor.copy_(sum(self._exchange(tensor.clone())))

    def all_gather_object(self, parts, mine):
        parts[:] = self._exchange(mine)

    def run(self, work):
        def enter(rank):
            self.own.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(enter, range(self.size)))


def check_sharing(first, second, folder):
    """(weight, report) of both processes: equal, written once, and close to what one process finds."""
    assert torch.equal(first[0], second[0]) and first[1] == second[1]
    assert (folder / "0.json").is_file() and not (folder / "1.json").exists()
    alone = fit_classifier(early_exit(random_t5()), random_rows(41), random_rows(13), QUICK)
    # one row of an odd number is left out, so that both run the backbone equally often
    assert first[1]["best_step"] > 0 and 0.9 < first[1]["train_tokens"] / alone.train_tokens < 1
    assert 0.8 < first[1]["validation_tokens"] / alone.validation_tokens < 1
    assert first[1]["validation_loss"] == pytest.approx(alone.validation_loss, rel=0.25)


def fit_share(model, rank, folder):
    report = fit_classifier(model, random_rows(41), random_rows(13), QUICK, report_path=folder / f"{rank}.json")
    return model.classifier.linear.weight.detach(), report.to_json()


def test_processes_agree_and_share_the_work(monkeypatch, tmp_path):
    group, models = ThreadGroup(2), [early_exit(random_t5()) for _ in range(2)]
    monkeypatch.setattr(stage, "dist", group)
    first, second = group.run(lambda rank: fit_share(models[rank], rank, tmp_path))
    check_sharing(first, second, tmp_path)


def _fit_in_process(rank, port, folder):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    weight, report = fit_share(early_exit(random_t5()), rank, folder)
    torch.save({"weight": weight, "report": report}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.mark.slow
def test_gloo_processes_agree_and_share_the_work(tmp_path):
    mp.spawn(_fit_in_process, args=(free_port(), tmp_path), nprocs=2)
    first, second = (tuple(torch.load(tmp_path / f"{rank}.pt", weights_only=True).values()) for rank in (0, 1))
    check_sharing(first, second, tmp_path)


def test_settings_without_exits_train_all_the_same():
    """Layers 1..L-1 are the training set whichever of them may exit."""
    model = early_exit(random_t5())
    model.settings = EarlyExitSettings(exit_layers=[2], max_source_tokens=16, max_target_tokens=12)
    narrow = copy.deepcopy(model)
    narrow.settings.exit_layers = [1, 2, 3]
    reports = [fit_classifier(m, random_rows(10), random_rows(5), QUICK) for m in (model, narrow)]
    assert reports[0] == reports[1]


def test_exits_alone_can_be_read_which_a_deep_model_can_afford():
    model = early_exit(random_t5())
    model.settings.exit_layers = [1, 3]
    rows, device = random_rows(10), torch.device("cpu")
    every = stage.read(model, rows, 4, device, stage.Progress(10, "", shown=False), QUICK)
    narrow = replace(QUICK, exits_only=True)
    exits = stage.read(model, rows, 4, device, stage.Progress(10, "", shown=False), narrow)
    assert torch.equal(exits.hidden, every.hidden[:, [0, 2]]) and torch.equal(exits.agrees, every.agrees[:, [0, 2]])
    report = fit_classifier(model, rows, random_rows(5), narrow)
    assert [at.layer for at in report.layers] == [1, 3]


def test_layers_can_be_read_in_bf16_and_as_many_tokens_as_asked_for():
    model = early_exit(random_t5(spread=8.0))
    rows, device = random_rows(20), torch.device("cpu")
    exact = stage.read(model, rows, 4, device, stage.Progress(20, "", shown=False), QUICK)
    low = replace(QUICK, precision=Precision.bf16, tokens=30)
    near = stage.read(model, rows, 4, device, stage.Progress(20, "", shown=False), low)
    assert near.hidden.dtype is torch.float32 and not torch.equal(near.hidden, exact.hidden)
    assert (near.hidden - exact.hidden).std() < 0.03 * exact.hidden.std()
    assert (near.agrees == exact.agrees).float().mean() > 0.9
    read = fit_classifier(model, rows, rows, low).train_tokens
    assert 30 <= read <= 30 + max(len(target) for _, target in rows)
