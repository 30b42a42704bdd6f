"""Stage-1 and stage-2 losses against explicit loops."""

import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from calm.config import ExitLoss, FinetuneConfig
from calm.errors import ConfigError
from calm.losses import (
    agreement_labels,
    draw_probabilities,
    geometric_loss,
    independent_loss,
    layer_losses,
    layer_weights,
    step_layers,
)

B, T, D, V, L = 3, 6, 8, 13, 4
ALL_LOSSES = list(ExitLoss)


class Speaker(nn.Module):
    """The part of an early-exit T5 that turns hidden states into logits."""

    num_layers = L

    def __init__(self, dropout=0.0):
        super().__init__()
        self.head_weight = nn.Parameter(torch.randn(V, D))
        self.gain = nn.Parameter(torch.rand(D) + 0.5)
        self.dropout = nn.Dropout(dropout)

    def norm(self, hidden):
        return self.dropout(F.rms_norm(hidden, (D,), self.gain)) * D**-0.5

    def logits(self, hidden):
        return self.norm(hidden) @ self.head_weight.T


@pytest.fixture
def speaker():
    torch.manual_seed(0)
    return Speaker()


def batch(rows=B, length=T):
    torch.manual_seed(1)
    hiddens = [torch.randn(rows, length, D, requires_grad=True) for _ in range(L)]
    labels = torch.randint(0, V, (rows, length))
    for row, kept in zip(range(rows), itertools.cycle((length, 2, 1))):
        labels[row, kept:] = -100
    return hiddens, labels


def loop(speaker, hiddens, labels, weights, config):
    """Token by token, layer by layer, as the formula is written."""
    total = torch.zeros(())
    for row, position in itertools.product(range(labels.shape[0]), range(labels.shape[1])):
        label = labels[row, position]
        if label == -100:
            continue
        last = speaker.logits(hiddens[-1][row, position]).log_softmax(-1).detach()
        for layer, weight in weights.items():
            logits = speaker.logits(hiddens[layer - 1][row, position])
            log_prob = logits.log_softmax(-1)
            smooth = config.label_smoothing
            loss = -(1 - smooth) * log_prob[label] - smooth * log_prob.mean()
            if layer < L:
                loss = (1 - config.distill) * loss + config.distill * (last.exp() * (last - log_prob)).sum()
            total = total + weight * (loss + config.z_loss * logits.logsumexp(-1) ** 2)
    return total


def leaves(speaker, hiddens):
    return [*hiddens, *speaker.parameters()]


@pytest.mark.parametrize("loss", ALL_LOSSES)
@pytest.mark.parametrize("rotate", [0, 2])
@pytest.mark.parametrize(
    "extra", [{}, {"distill": 0.5}, {"label_smoothing": 0.1, "z_loss": 0.01, "distill": 0.25}], ids=["", "d", "sz"]
)
def test_equals_the_explicit_loop(speaker, loss, rotate, extra):
    config = FinetuneConfig(loss=loss, rotate=rotate, **extra)
    hiddens, labels = batch()
    parts = layer_losses(speaker, hiddens, labels, config, step=5, seed=1)
    expected = loop(speaker, hiddens, labels, step_layers(config, L, 5, 1), config)
    torch.testing.assert_close(parts.total, expected)
    assert parts.num_tokens == int((labels != -100).sum())
    ours = torch.autograd.grad(parts.total, leaves(speaker, hiddens), allow_unused=True)
    theirs = torch.autograd.grad(expected, leaves(speaker, hiddens), allow_unused=True)
    for grad, wanted, leaf in zip(ours, theirs, leaves(speaker, hiddens), strict=True):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(zero if grad is None else grad, zero if wanted is None else wanted)


def test_weights_are_those_of_the_papers():
    assert layer_weights(ExitLoss.weighted, 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert layer_weights(ExitLoss.uniform, 4) == pytest.approx([0.25] * 4)
    assert layer_weights(ExitLoss.last_plus_mean, 4) == pytest.approx([0.125, 0.125, 0.125, 0.625])
    assert layer_weights(ExitLoss.final_only, 4) == [0, 0, 0, 1]
    for loss, layers in itertools.product(ExitLoss, (1, 2, 8, 12)):
        assert sum(layer_weights(loss, layers)) == pytest.approx(1)


def test_padding_changes_nothing(speaker):
    hiddens, labels = batch()
    config = FinetuneConfig(distill=0.2)
    short = layer_losses(speaker, hiddens, labels, config, 0, 0)
    wide = [F.pad(hidden, (0, 0, 0, 5), value=float("nan")) for hidden in hiddens]
    padded = layer_losses(speaker, wide, F.pad(labels, (0, 5), value=-100), config, 0, 0)
    assert padded.num_tokens == short.num_tokens
    torch.testing.assert_close(padded.total, short.total, rtol=0, atol=0)


def test_sums_add_up_over_micro_batches(speaker):
    hiddens, labels = batch()
    config = FinetuneConfig(loss=ExitLoss.last_plus_mean, rotate=1)
    whole = layer_losses(speaker, hiddens, labels, config, 3, 0)
    parts = [layer_losses(speaker, [h[i : i + 1] for h in hiddens], labels[i : i + 1], config, 3, 0) for i in range(B)]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    assert sum(part.num_tokens for part in parts) == whole.num_tokens


def test_a_batch_of_padding_gives_zero_and_a_gradient(speaker):
    hiddens, labels = batch()
    parts = layer_losses(speaker, hiddens, torch.full_like(labels, -100), FinetuneConfig(), 0, 0)
    parts.total.backward()
    assert parts.total == 0 and parts.num_tokens == 0 and not hiddens[0].grad.any()
    assert all(math.isnan(value) for value in parts.per_layer_means().values())


def test_per_layer_means_are_plain_nats(speaker):
    hiddens, labels = batch()
    parts = layer_losses(speaker, hiddens, labels, FinetuneConfig(label_smoothing=0.3, z_loss=1.0), 0, 0)
    expected = {
        layer: F.cross_entropy(speaker.logits(hidden).flatten(0, 1), labels.flatten()).item()
        for layer, hidden in enumerate(hiddens, start=1)
    }
    assert parts.per_layer_means() == pytest.approx(expected)
    assert not any(value.requires_grad for value in parts.per_layer.values())


def test_wrong_number_of_layers_is_refused(speaker):
    hiddens, labels = batch()
    with pytest.raises(ConfigError, match="all 4 decoder layers, got 3"):
        layer_losses(speaker, hiddens[1:], labels, FinetuneConfig(), 0, 0)


def test_output_dropout_acts_in_training_only():
    torch.manual_seed(0)
    speaker = Speaker(dropout=0.5)
    hiddens, labels = batch()
    speaker.eval()
    steady = layer_losses(speaker, hiddens, labels, FinetuneConfig(), 0, 0).total
    torch.testing.assert_close(layer_losses(speaker, hiddens, labels, FinetuneConfig(), 0, 0).total, steady)
    speaker.train()
    assert layer_losses(speaker, hiddens, labels, FinetuneConfig(), 0, 0).total != steady


@pytest.mark.parametrize("loss", [ExitLoss.weighted, ExitLoss.uniform, ExitLoss.last_plus_mean])
@pytest.mark.parametrize("rotate", [1, 2, 5])
def test_rotation_has_the_chosen_weighting_as_its_expectation(loss, rotate):
    layers, steps = 8, 4000
    config = FinetuneConfig(loss=loss, rotate=rotate)
    sums = Counter()
    for step in range(steps):
        drawn = step_layers(config, layers, step, seed=3)
        assert len(drawn) == rotate + 1 and list(drawn) == sorted(drawn) and layers in drawn
        sums.update(drawn)
    means = [sums[layer] / steps for layer in range(1, layers + 1)]
    assert means == pytest.approx(layer_weights(loss, layers), abs=2e-3)


def test_rotation_is_unbiased_over_seeds_at_one_step():
    config = FinetuneConfig(rotate=2)
    sums, seeds = Counter(), 4000
    for seed in range(seeds):
        sums.update(step_layers(config, 6, 17, seed))
    means = [sums[layer] / seeds for layer in range(1, 7)]
    assert means == pytest.approx(layer_weights(ExitLoss.weighted, 6), abs=0.012)


def test_rotation_is_a_function_of_seed_and_step():
    config = FinetuneConfig(rotate=2)
    first = [step_layers(config, 8, step, 7) for step in range(50)]
    assert first == [step_layers(config, 8, step, 7) for step in range(50)]
    assert first != [step_layers(config, 8, step, 8) for step in range(50)]
    assert len({tuple(drawn) for drawn in first}) > 5


def test_drawn_layers_weigh_alike():
    """Drawn in proportion to their weight, the layers need no large correction."""
    config = FinetuneConfig(rotate=2)
    for step in range(30):
        *others, _ = step_layers(config, 8, step, 0).values()
        assert others == pytest.approx([sum(layer_weights(ExitLoss.weighted, 8)[:-1]) / 2] * 2)


def test_no_probability_exceeds_one():
    probabilities = draw_probabilities([0.01, 0.01, 0.1, 5.0], 3)
    assert max(probabilities) == 1 and sum(probabilities) == pytest.approx(3)
    assert draw_probabilities([1, 1, 1, 1], 2) == pytest.approx([0.5] * 4)
    assert draw_probabilities([0.0, 0.0], 1) == [0, 0]


@pytest.mark.parametrize("rotate", [7, 30])
def test_rotating_all_layers_is_no_rotation(rotate):
    assert step_layers(FinetuneConfig(rotate=rotate), 8, 3, 0) == step_layers(FinetuneConfig(), 8, 0, 1)


@pytest.mark.parametrize("rotate", [0, 3])
def test_final_only_touches_no_other_layer(speaker, rotate):
    hiddens, labels = batch()
    parts = layer_losses(speaker, hiddens, labels, FinetuneConfig(loss=ExitLoss.final_only, rotate=rotate), 0, 0)
    parts.total.backward()
    assert list(parts.per_layer) == [L] and all(hidden.grad is None for hidden in hiddens[:-1])


def test_distillation_does_not_move_the_teacher(speaker):
    hiddens, labels = batch()
    grads = [
        torch.autograd.grad(layer_losses(speaker, hiddens, labels, config, 0, 0).total, hiddens)
        for config in (FinetuneConfig(), FinetuneConfig(distill=0.9))
    ]
    torch.testing.assert_close(grads[0][-1], grads[1][-1])
    assert not torch.allclose(grads[0][0], grads[1][0])


def test_one_layer_speaks_alone():
    assert step_layers(FinetuneConfig(rotate=1, distill=0.5), 1, 0, 0) == {1: 1.0}


def stage_two(rows=40, layers=5):
    torch.manual_seed(2)
    logits = torch.randn(rows, layers - 1, requires_grad=True)
    agrees = torch.rand(rows, layers - 1) < torch.tensor([0.3, 0.5, 0.8, 0.9])
    return logits, agrees


def test_agreement_is_with_the_full_model_not_the_reference(speaker):
    torch.manual_seed(3)
    rows = torch.randn(9, L, D)
    rows[:4, 1] = rows[:4, -1]
    agrees = agreement_labels(speaker, rows)
    said = speaker.logits(rows).argmax(-1)
    assert agrees.shape == (9, L - 1) and torch.equal(agrees, said[:, :-1] == said[:, -1:])
    assert agrees[:4, 1].all() and not agrees.all()


def test_independent_loss_equals_the_explicit_loop():
    logits, agrees = stage_two()
    layers = []
    for layer in range(logits.shape[1]):
        share = sum(bool(value) for value in agrees[:, layer]) / len(agrees)
        total = 0.0
        for score, positive in zip(logits[:, layer].tolist(), agrees[:, layer].tolist(), strict=True):
            exits = 1 / (1 + math.exp(-score))
            total += (1 - share) * -math.log(exits) if positive else share * -math.log(1 - exits)
        layers.append(total / len(agrees))
    assert independent_loss(logits, agrees).item() == pytest.approx(sum(layers) / len(layers), rel=1e-5)


def test_independent_loss_balances_the_classes():
    """With one constant score the best P(exit) is one half, however rare a class is."""
    agrees = torch.zeros(1000, 1, dtype=torch.bool)
    agrees[:970] = True
    score = torch.zeros(1, 1, requires_grad=True)
    independent_loss(score.expand(1000, 1), agrees).backward()
    assert score.grad.abs().item() < 1e-6


def test_geometric_loss_equals_the_explicit_loop():
    logits, agrees = stage_two()
    total = 0.0
    for scores, good in zip(logits.tolist(), agrees.tolist(), strict=True):
        exits = [1 / (1 + math.exp(-score)) for score in scores] + [1.0]
        first = [*good, True].index(True)
        chance = math.prod(1 - p for p in exits[:first]) * exits[first]
        assert sum(math.prod(1 - p for p in exits[:i]) * exits[i] for i in range(5)) == pytest.approx(1)
        total -= math.log(chance)
    assert geometric_loss(logits, agrees).item() == pytest.approx(total / len(agrees), rel=1e-5)


def test_classifier_losses_survive_saturation():
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    agrees = torch.tensor([[False, True]])
    for loss in (independent_loss, geometric_loss):
        (grad,) = torch.autograd.grad(loss(logits, agrees), logits)
        assert loss(logits, agrees).isfinite() and grad.isfinite().all()
