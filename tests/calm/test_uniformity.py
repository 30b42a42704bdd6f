"""The expected crossing layer and its spread within a column against explicit loops."""

import math

import pytest
import torch
import torch.nn.functional as F

from calm import uniformity
from calm.confidence import CONFIDENCE, LayerView
from calm.config import Measure, UniformityConfig
from calm.errors import ConfigError
from calm.uniformity import confidence, exit_spread

LAYERS, ROWS, LENGTH, WIDTH, WORDS = 5, 3, 4, 6, 11
LIVE = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
SETTINGS = {
    Measure.state: UniformityConfig(1.0, Measure.state, threshold=0.4, temperature=0.3),
    Measure.softmax: UniformityConfig(1.0, Measure.softmax, threshold=0.2, temperature=0.1),
}


@pytest.fixture
def hiddens() -> list[torch.Tensor]:
    torch.manual_seed(0)
    drift = torch.randn(LAYERS, ROWS, LENGTH, WIDTH, dtype=torch.float64).cumsum(0)
    return [layer.clone().requires_grad_() for layer in drift]


@pytest.fixture
def head() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(WORDS, WIDTH, dtype=torch.float64)


def plainly(hiddens: list[torch.Tensor], head: torch.Tensor, config: UniformityConfig, exits: list[int]) -> float:
    """The chance of each way through the layers, one token at a time."""
    expected: dict[tuple[int, int], float] = {}
    for row in range(ROWS):
        for place in range(LENGTH):
            if not LIVE[row, place]:
                continue
            left, total = 1.0, 0.0
            for layer in range(1, LAYERS + 1):
                here, before = hiddens[layer - 1][row, place], hiddens[layer - 2][row, place]
                if config.measure is Measure.state:
                    sure = max(0.0, F.cosine_similarity(here.float(), before.float(), dim=0).item())
                else:
                    top = sorted((here @ head.T).float().softmax(0).tolist())[-2:]
                    sure = top[1] - top[0]
                leaves = 1 / (1 + math.exp((config.threshold - sure) / config.temperature))
                if layer not in exits or (layer == 1 and config.measure is Measure.state):
                    leaves = 0.0
                if layer == LAYERS:
                    leaves = 1.0
                total += left * leaves * layer
                left *= 1 - leaves
            expected[row, place] = total / LAYERS
    spread = 0.0
    for place in range(LENGTH):
        column = [value for (_, at), value in expected.items() if at == place]
        mean = sum(column) / len(column)
        spread += sum((value - mean) ** 2 for value in column)
    return spread


@pytest.mark.parametrize("measure", SETTINGS)
@pytest.mark.parametrize("exits", [[1, 2, 3, 4], [2, 4]])
def test_the_spread_is_what_a_loop_finds(
    hiddens: list[torch.Tensor], head: torch.Tensor, measure: Measure, exits: list[int]
) -> None:
    found = exit_spread(hiddens, LIVE, exits, lambda hidden: hidden @ head.T, SETTINGS[measure])
    assert found.item() == pytest.approx(plainly(hiddens, head, SETTINGS[measure], exits), rel=1e-5)
    assert found.item() > 1e-3


@pytest.mark.parametrize("measure", SETTINGS)
def test_confidences_are_those_that_rows_exit_by(
    hiddens: list[torch.Tensor], head: torch.Tensor, measure: Measure
) -> None:
    here, before = (hidden.detach().flatten(0, 1).float() for hidden in (hiddens[2], hiddens[1]))
    view = LayerView(3, here, before, lambda hidden: hidden @ head.float().T, lambda hidden: hidden[:, 0])
    asked = confidence(here, before, lambda hidden: hidden @ head.float().T, measure)
    torch.testing.assert_close(asked, CONFIDENCE[measure](view))


@pytest.mark.parametrize("measure", SETTINGS)
def test_a_step_along_the_gradient_brings_rows_together(
    hiddens: list[torch.Tensor], head: torch.Tensor, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spread(at: list[torch.Tensor]) -> torch.Tensor:
        return exit_spread(at, LIVE, [1, 2, 3, 4], lambda hidden: hidden @ head.T, SETTINGS[measure])

    before = spread(hiddens)
    before.backward()
    slopes = [hidden.grad for hidden in hiddens]
    assert not any(slope[~LIVE].any() for slope in slopes if slope is not None)  # padding moves nothing
    moved = [h.detach() - 0.05 * (0 if slope is None else slope) for h, slope in zip(hiddens, slopes, strict=True)]
    assert spread(moved) < before
    monkeypatch.setattr(uniformity, "CHUNK", 2 * WORDS)  # two rows at a time
    torch.testing.assert_close(spread(hiddens), before)


def test_a_column_of_one_row_counts_nothing(hiddens: list[torch.Tensor], head: torch.Tensor) -> None:
    alone = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], dtype=torch.bool)
    found = exit_spread(hiddens, alone, [1, 2], lambda hidden: hidden @ head.T, SETTINGS[Measure.softmax])
    assert found.item() == 0.0


def test_settings_out_of_range() -> None:
    for wrong in ({"weight": -1.0}, {"temperature": 0.0}, {"threshold": 1.5}, {"measure": Measure.classifier}):
        with pytest.raises(ConfigError, match="finetune.uniformity"):
            UniformityConfig(**wrong)  # type: ignore[arg-type]
