"""A budget of expected errors of keys and values: the table, the decoders, and that it forces full depth."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from calm.config import Backfill, Measure
from calm.decode import OneDecoder
from calm.decode_batch import BatchDecoder
from calm.errors import ConfigError
from calm.kv_budget import ErrorTable, error_table
from calm.models.speaking import SpeakingModel
from calm.policies import Budgeted, Confident, Full, fixed_depth
from calm.records import DecodeTrace
from tests.calm.comparing import confident, essence, usual
from tests.causal import V, early_llama, random_llama
from tests.scripted import early_exit, examples, random_t5

TABLE = ErrorTable(((0.5, 0.8),) * 3, ((0.3, 0.2, 0.1), (0.5, 0.3, 0.2), (0.9, 0.6, 0.4)))


def models() -> list[SpeakingModel]:
    return [early_exit(random_t5(seed=1)), early_llama(random_llama(seed=1))]


@pytest.fixture(scope="module", params=models(), ids=["t5", "llama"])
def model(request: pytest.FixtureRequest) -> SpeakingModel:
    made: SpeakingModel = request.param
    return made


def exits(model: SpeakingModel, measure: Measure = Measure.softmax) -> Confident:
    return confident(measure, usual(model, measure))


def forced(traces: Sequence[DecodeTrace], plain: Sequence[DecodeTrace]) -> int:
    deep = [sum(layer == 4 for trace in each for layer in trace.crossing_layers) for each in (traces, plain)]
    return deep[0] - deep[1]


@pytest.mark.parametrize("measure", [Measure.softmax, Measure.state, Measure.agreement])
@pytest.mark.parametrize("budget", [0.15, 0.4])
def test_batch_equals_one(model: SpeakingModel, measure: Measure, budget: float) -> None:
    rows, policy = examples(V, 8, seed=6), Budgeted(exits(model, measure), budget, TABLE)
    one = OneDecoder(model)(rows, policy)
    assert [essence(trace) for trace in BatchDecoder(model, batch_size=4)(rows, policy)] == [essence(t) for t in one]
    if measure is not Measure.agreement:  # which leaves just below the top here, where little is spent
        assert forced(one, OneDecoder(model)(rows, policy.exits)) > 0
    assert len({layer for trace in one for layer in trace.crossing_layers[1:]}) >= 3


def test_an_endless_budget_is_none_and_an_empty_one_full_depth(model: SpeakingModel) -> None:
    rows, plain = examples(V, 8, seed=6), exits(model)
    for decoder in (OneDecoder(model), BatchDecoder(model)):
        assert decoder(rows, Budgeted(plain, math.inf, TABLE)) == decoder(rows, plain)
        full = [essence(trace) for trace in decoder(rows, Full())]
        assert [essence(trace) for trace in decoder(rows, Budgeted(plain, 0.0, TABLE))] == full


@pytest.mark.parametrize("count", [1, 2, 3])
def test_with_a_flat_table_so_many_exits_bring_a_step_at_full_depth(model: SpeakingModel, count: int) -> None:
    rows = examples(V, 8, seed=6)
    plain = confident(Measure.softmax, 0.0)  # leaves after layer 1, always
    for trace in OneDecoder(model)(rows, Budgeted(plain, float(count), ErrorTable.flat(4))):
        steps = trace.crossing_layers if trace.crossing_layers[0] == 1 else trace.crossing_layers[1:]
        assert steps == tuple(4 if (n + 1) % (count + 1) == 0 else 1 for n in range(len(steps)))


def test_what_is_spent_is_looked_up_by_layers_and_cosine(model: SpeakingModel) -> None:
    """A trace's depths, and the cosines of the residuals that gave them, explain every step that was forced."""
    rows, policy = examples(V, 6, seed=7), Budgeted(exits(model), 0.7, TABLE)
    decoder, seen = OneDecoder(model), list[float]()
    layer, state = decoder.adapter.layer, {}

    def watched(index: int, hidden: torch.Tensor, row: object, step: int) -> torch.Tensor:
        out = layer(index, hidden, row, step)
        state[step] = float(torch.nn.functional.cosine_similarity(out[0], hidden[0], dim=-1))
        return out

    decoder.adapter.layer = watched  # type: ignore[method-assign]
    for row in rows:
        state.clear()
        trace, spent = decoder([row], policy)[0], 0.0
        for step, crossing in enumerate(trace.crossing_layers):
            if spent >= 0.7:
                assert crossing == 4
            spent = 0.0 if crossing == 4 else spent + TABLE.expected(4 - crossing, state[step])
        seen += state.values()
    assert min(seen) < 0.5 or max(seen) > 0.8, "the cosine must matter"


def test_confidences_are_recorded_alike(model: SpeakingModel) -> None:
    rows, policy = examples(V, 5, seed=6), Budgeted(exits(model), 0.3, TABLE)
    one = OneDecoder(model, record_confidences=True)(rows, policy)
    batch = BatchDecoder(model, record_confidences=True)(rows, policy)
    assert [essence(trace) for trace in one] == [essence(trace) for trace in OneDecoder(model)(rows, policy)]
    for expected, trace in zip(one, batch, strict=True):
        left, right = torch.tensor(expected.confidences), torch.tensor(trace.confidences)
        torch.testing.assert_close(left, right, equal_nan=True, atol=1e-4, rtol=1e-4)


def test_a_table_by_hand() -> None:
    skipped = np.array([1] * 6 + [3] * 4)
    cosine = np.array([0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.1, 0.1, 0.9, 0.9])
    error = np.array([0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.6, 0.6, 0.3, 0.3])
    table = error_table(skipped, cosine, error, num_layers=4, bins=2, least=2)
    assert [len(row) for row in table.edges] == [1, 0, 1] and 0.1 < table.edges[0][0] <= 0.9
    assert table.errors[0] == pytest.approx((0.2, 0.1)) and table.errors[2] == pytest.approx((0.6, 0.3))
    of_a_layer = error.sum() / skipped.sum()
    assert table.errors[1] == pytest.approx((2 * of_a_layer,))  # nobody skipped two
    assert table.expected(1, 0.1) == pytest.approx(0.2) and table.expected(3, 0.95) == pytest.approx(0.3)
    assert table.expected(3, table.edges[2][0]) == pytest.approx(0.3)
    sparse = error_table(skipped, cosine, error, num_layers=4, bins=2, least=3)
    assert sparse.errors[2] == pytest.approx((0.45,))  # parts of two are too few
    alike = error_table(skipped, np.ones(10), error, num_layers=4, bins=2, least=2)
    assert alike.edges == ((), (), ()) and alike.errors[0] == pytest.approx((0.15,))
    edges, errors = (tuple(map(tuple, table.to_json()[name])) for name in ("edges", "errors"))
    assert ErrorTable(edges, errors) == table


def test_what_cannot_be_asked_is_refused_by_name(model: SpeakingModel) -> None:
    plain = exits(model)
    for budget in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="budget must lie in"):
            Budgeted(plain, budget, TABLE)
    with pytest.raises(ConfigError, match="policy 'budgeted' is decoded by calm alone"):
        fixed_depth(Budgeted(plain, 1.0, TABLE), "a", 0, 4)
    short = Budgeted(plain, 1.0, ErrorTable.flat(3))
    for decoder in (OneDecoder, BatchDecoder):
        with pytest.raises(ConfigError, match="it is for 3 layers and the model has 4"):
            decoder(model)(examples(V, 1), short)
        with pytest.raises(ConfigError, match="backfill=copy has none"):
            decoder(model, backfill=Backfill.copy)(examples(V, 1), replace(short, errors=TABLE))
    for edges, errors, message in (
        (((0.5, 0.2),), ((1.0,) * 3,), "edges must ascend"),
        (((0.5,),), ((1.0,),), "one error more"),
        (((0.5,),), (), "1 rows of edges and 0 of errors"),
        (((),), ((math.nan,),), "finite and at least 0"),
    ):
        with pytest.raises(ConfigError, match=f"error table: .*{message}"):
            ErrorTable(edges, errors)
    with pytest.raises(ConfigError, match="no exit to calibrate from"):
        error_table(np.array([], dtype=np.int64), np.array([]), np.array([]), 4)
    with pytest.raises(ConfigError, match=r"exits that skip 1\.\.3 layers"):
        error_table(np.array([4]), np.array([0.5]), np.array([0.5]), 4)
