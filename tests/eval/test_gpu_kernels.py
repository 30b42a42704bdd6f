"""The walk through a step that compares kernels with their twins: right ones pass, and each fault of a verb is told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from calm.config import BatchRule, Measure, Stepping
from calm.errors import CalmError
from calm.rules import Rule
from eval import gpu_kernels
from eval.gpu_asked import Asked
from eval.gpu_kernels import kernels
from serve import backend
from serve.exits import MEASURES
from serve.graph.frame import Frame
from serve.graph.ops import Parts, TorchOps

ASKED = Asked(device="cpu", shapes=["tiny", "tiny"])


def test_the_twins_are_their_own_twins() -> None:
    found = kernels(ASKED)
    assert "status" not in found and not found["wrong"] and set(found["relative_errors"].values()) == {0.0}
    verbs = {name.split()[2] for name in found["relative_errors"] if "int8" not in name}
    assert verbs == {"begin", "layer", "confide", "settle", "words", "backfill", "speak"}
    kinds = {" ".join(name.split()[1:3]) for name in found["relative_errors"]}
    assert {"float32 layer", "bfloat16 layer", "float32 int8", "bfloat16 int8"} <= kinds


def begun(ops: TorchOps, frame: Frame) -> None:
    TorchOps.begin(ops, frame)
    frame.thresholds[3] += 1.0


def begun_elsewhere(ops: TorchOps, frame: Frame) -> None:
    TorchOps.begin(ops, frame)
    frame.hidden[6] *= 1.1


def layered(ops: TorchOps, layer: int, frame: Frame, holds: bool, keeps: bool = True) -> None:
    TorchOps.layer(ops, layer, frame, holds, keeps)
    frame.hidden[2] *= 1.05


def one_head(ops: TorchOps, layer: int, frame: Frame, holds: bool, keeps: bool = True) -> None:
    TorchOps.layer(ops, layer, frame, holds, keeps)
    if bool(frame.runs[0]):
        ops.parts.slots.values[layer - 1, frame.slots[0], 1, frame.steps[0]] *= 1.1


def another_position(ops: TorchOps, layer: int, frame: Frame, holds: bool, keeps: bool = True) -> None:
    TorchOps.layer(ops, layer, frame, holds, keeps)
    ops.parts.slots.keys[layer - 1, frame.slots[0], :, frame.steps[0] - 1] += 1.0


def not_held(ops: TorchOps, layer: int, frame: Frame, holds: bool, keeps: bool = True) -> None:
    TorchOps.layer(ops, layer, frame, False, keeps)
    frame.previous[1] *= 2.0


def first_rows(ops: TorchOps, layer: int, frame: Frame, holds: bool, keeps: bool = True) -> None:
    runs = frame.runs.clone()
    frame.runs.copy_(torch.arange(len(runs)) < frame.active)
    TorchOps.layer(ops, layer, frame, holds, keeps)
    frame.runs.copy_(runs)


def others_too(ops: TorchOps, layer: int, frame: Frame, holds: bool, keeps: bool = True) -> None:
    runs = frame.runs.clone()
    TorchOps.layer(ops, layer, frame, holds, keeps)
    frame.hidden[~runs] += 1.0


def raises(ops: TorchOps, *rest: Any, **named: Any) -> None:
    raise RuntimeError("no\nsuch kernel")


def confided(measure: Measure, by: float) -> Callable[..., None]:
    def confide(ops: TorchOps, layer: int, frame: Frame, *rest: Any) -> None:
        TorchOps.confide(ops, layer, frame, *rest)
        mine = frame.measures == MEASURES.index(measure)
        frame.confidence.copy_(torch.where(mine, frame.confidence * by, frame.confidence))

    return confide


def agreed(ops: TorchOps, layer: int, frame: Frame, *rest: Any) -> None:
    TorchOps.confide(ops, layer, frame, *rest)
    frame.run.add_(1)


def settled(name: BatchRule) -> Callable[..., None]:
    def settle(ops: TorchOps, layer: int, frame: Frame, rule: Rule, confident: bool) -> None:
        TorchOps.settle(ops, layer, frame, rule, confident)
        if rule.name is name:
            frame.stopped.logical_not_()

    return settle


def ordered(ops: TorchOps, layer: int, frame: Frame, rule: Rule, confident: bool) -> None:
    TorchOps.settle(ops, layer, frame, rule, confident)
    frame.order.copy_(frame.order.flip(0))


def worded(ops: TorchOps, frame: Frame) -> Tensor:
    return torch.full_like(frame.tokens, 7)


def filled(ops: TorchOps, frame: Frame, executed: Tensor) -> None:
    TorchOps.backfill(ops, frame, executed + 1)


def scaled(ops: TorchOps, frame: Frame, executed: Tensor) -> None:
    TorchOps.backfill(ops, frame, executed)
    frame.hidden.mul_(3.0)


def fills_all(ops: TorchOps, frame: Frame, rule: Rule) -> None:
    fills = ops.parts.exits.fills.clone()
    ops.parts.exits.fills.fill_(True)
    TorchOps.speak(ops, frame, rule)
    ops.parts.exits.fills.copy_(fills)


def one_word(ops: TorchOps, frame: Frame, rule: Rule) -> None:
    TorchOps.speak(ops, frame, rule)
    frame.said[0] = 3


def emptied(ops: TorchOps, frame: Frame, rule: Rule) -> None:
    TorchOps.speak(ops, frame, rule)
    frame.hidden.zero_()


def spoken(ops: TorchOps, frame: Frame, rule: Rule) -> None:
    TorchOps.speak(ops, frame, rule)
    frame.said[2] += 1


def forgotten(ops: TorchOps, frame: Frame, rule: Rule) -> None:
    before = ops.parts.slots.position.clone()
    TorchOps.speak(ops, frame, rule)
    ops.parts.slots.position.copy_(before)


FAULTS: dict[str, tuple[str, Any, str]] = {
    "a threshold": ("begin", begun, "begin: thresholds"),
    "a hidden state at the start": ("begin", begun_elsewhere, "begin: hidden"),
    "a hidden state": ("layer", layered, "layer: hidden"),
    "a head's value": ("layer", one_head, "layer: values"),
    "another position": ("layer", another_position, "layer: keys elsewhere"),
    "the state before": ("layer", not_held, "layer: previous"),
    "rows of the list's beginning": ("layer", first_rows, "layer: hidden"),
    "rows that do not run": ("layer", others_too, "layer: hidden"),
    "a layer that raises": ("layer", raises, "layer: raised RuntimeError: no such kernel"),
    "words that raise": ("words", raises, "words: raised RuntimeError: no such kernel"),
    **{f"{each.value}": ("confide", confided(each, 1.1), "confide: confidence") for each in Measure},
    "a run": ("confide", agreed, "confide: run"),
    **{
        f"the end under {each.value}": ("settle", settled(each), f"settle {each.value}: stopped")
        for each in (rule.name for rule in gpu_kernels.RULES)
    },
    "the order": ("settle", ordered, "settle own: order"),
    "words": ("words", worded, "words: words"),
    "what is filled in": ("backfill", filled, "backfill: keys"),
    "hidden states while filling in": ("backfill", scaled, "backfill: hidden"),
    "what nobody reads": ("speak", fills_all, "speak own: keys"),
    "a word that is told": ("speak", one_word, "speak own: said"),
    "hidden states at the end": ("speak", emptied, "speak compact: hidden"),
    "a layer that is told": ("speak", spoken, "speak own: said"),
    "where a slot goes on": ("speak", forgotten, "speak sync: position"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_verb_is_told(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, broken, told = FAULTS[fault]

    def step_ops(parts: Parts, most: int, stepping: Stepping) -> TorchOps:
        ops: TorchOps = type("Broken", (TorchOps,), {verb: broken})(parts)
        return ops

    monkeypatch.setattr(backend, "_step_ops", step_ops)
    monkeypatch.setattr(gpu_kernels, "BOUNDS", {torch.float32: gpu_kernels.BOUNDS[torch.float32]})
    found = kernels(ASKED)
    assert found["status"] == "failed" and f"tiny float32 {told}" in found["wrong"], list(found["wrong"])
    assert told in found["why"]


def test_rows_that_do_not_come_as_far_are_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the twin fails: nothing is compared, and nothing is called right."""
    monkeypatch.setattr(TorchOps, "layer", raises)
    with pytest.raises(CalmError, match="such kernel"):
        kernels(ASKED)
