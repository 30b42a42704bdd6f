"""Layers left out row by row are the branch of equation 1 added not at all; one rate reaches all units' dropout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from calm.config import FinetuneConfig
from calm.finetune_config import LayerDropoutConfig
from calm.losses import IGNORED
from calm.models.speaking import SpeakingModel
from tests.causal import early_llama, early_opt, random_llama, random_opt
from tests.scripted import early_exit, random_t5
from train import dropout
from train.batches import Batch
from train.dropout import decoder_layers, draw_kept, only_kept, set_dropout
from train.loop import prepare_model
from train.step import SpeakingLoss

LAYERS, ROWS = 4, 5
MODELS: dict[str, Callable[[], SpeakingModel]] = {
    "llama": lambda: early_llama(random_llama(layers=LAYERS)),
    "opt": lambda: early_opt(random_opt(layers=LAYERS)),
    "t5": lambda: early_exit(random_t5(decoder_layers=LAYERS)),
}
BRANCH_ENDS = ("o_proj", "down_proj", "out_proj", "fc2", "SelfAttention.o", "EncDecAttention.o", "wo")
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def batch() -> Batch:
    draw = torch.Generator().manual_seed(1)
    source = torch.randint(3, 90, (ROWS, 6), generator=draw)
    decoder = torch.randint(3, 90, (ROWS, 5), generator=draw)
    lengths = torch.tensor([6, 3, 5, 6, 2])
    mask = torch.arange(6) < lengths[:, None]
    labels = torch.randint(3, 90, (ROWS, 5), generator=draw)
    labels[1, 3:] = IGNORED
    return Batch(source.masked_fill(~mask, 0), mask, decoder, labels)


def hiddens_of(model: SpeakingModel, data: Batch, rows: slice = slice(None)) -> Tensor:
    return torch.stack(model.answer_hiddens(data.source_ids[rows], data.source_mask[rows], data.decoder_ids[rows]))


@contextmanager
def branches_of_zero(model: SpeakingModel, kept: Tensor) -> Iterator[None]:
    """The layers that are not kept add nothing: their branches end in matrices of zeros."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for layer, keep in zip(decoder_layers(model), kept.tolist(), strict=True):
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear) and name.endswith(BRANCH_ENDS) and not keep:
                    for parameter in module.parameters():
                        parameter.zero_()
    yield
    model.load_state_dict(state)


@every_model
@torch.no_grad()
def test_a_dropped_layer_is_passed_by_row_by_row(make: Callable[[], SpeakingModel]) -> None:
    model, data = make(), batch()
    kept = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 0]], dtype=torch.bool)
    ran: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: ran.append(len(given[0]))) for layer in decoder_layers(model)
    ]
    with only_kept(model, kept):
        found = hiddens_of(model, data)
    assert ran == [5, 3, 2]  # the layers' rows; the third layer is not called at all
    for hook in hooks:
        hook.remove()
    for row in range(ROWS):
        with branches_of_zero(model, kept[:, row]):
            expected = hiddens_of(model, data, slice(row, row + 1))
        torch.testing.assert_close(found[:, row : row + 1], expected, rtol=1e-5, atol=1e-5)
    assert not any(isinstance(layer, dropout._OfSomeRows) for layer in decoder_layers(model))


@every_model
def test_what_no_row_runs_has_no_gradient_and_with_other_processes_one_of_zero(
    make: Callable[[], SpeakingModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = make(), batch()
    kept = torch.ones(LAYERS, ROWS, dtype=torch.bool)
    kept[2] = False
    last = list(decoder_layers(model)[2].parameters())
    with only_kept(model, kept):
        alone = hiddens_of(model, data)
    alone.sum().backward()
    assert all(parameter.grad is None for parameter in last)
    monkeypatch.setattr(dropout.dist, "is_initialized", lambda: True)
    with only_kept(model, kept):
        shared = hiddens_of(model, data)
    shared.sum().backward()
    assert torch.equal(alone, shared)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in last)


def test_recomputed_activations_are_those_of_the_same_rows() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = early_llama(random_llama())
        config = FinetuneConfig(layer_dropout=LayerDropoutConfig(0.6), gradient_checkpointing=checkpointing)
        loss = SpeakingLoss(prepare_model(model, config), config, seed=0).train()
        torch.manual_seed(3)
        total, _ = loss(batch(), 0)
        total.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_layers_are_dropped_in_training_mode_only_and_by_the_state_that_a_step_seeds() -> None:
    config = FinetuneConfig(layer_dropout=LayerDropoutConfig(0.6))
    loss = SpeakingLoss(early_llama(random_llama()), config, seed=0)
    plain = SpeakingLoss(loss.model, FinetuneConfig(), seed=0)

    def value(one: SpeakingLoss, seed: int) -> float:
        torch.manual_seed(seed)
        return float(one(batch(), 0)[0].detach())

    assert value(loss.eval(), 1) == value(loss, 2) == value(plain, 1)
    assert value(loss.train(), 1) == value(loss, 1) != value(loss, 2)


def test_layers_are_left_out_at_their_rates() -> None:
    torch.manual_seed(0)
    dropped = 1 - draw_kept([0.0, 0.1, 0.7], 20_000).float().mean(dim=1)
    assert dropped.tolist() == pytest.approx([0.0, 0.1, 0.7], abs=0.01)


@every_model
def test_one_rate_reaches_the_dropout_of_every_architecture(make: Callable[[], SpeakingModel]) -> None:
    model, data = make(), batch()
    set_dropout(model, 0.5)
    with torch.no_grad():
        model.train()
        first, second = hiddens_of(model, data), hiddens_of(model, data)
        assert not torch.equal(first, second)
        model.eval()
        assert torch.equal(hiddens_of(model, data), hiddens_of(model, data))
    said = [getattr(model.hf.config, name) for name in dropout.OF_A_CONFIG if hasattr(model.hf.config, name)]
    assert said and set(said) == {0.5}
