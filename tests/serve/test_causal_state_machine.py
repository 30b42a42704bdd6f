"""Requests of a decoder-only model come, are preempted, aborted and end in any order; no block leaks, none starves."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from calm.config import BatchRule, Preempt
from serve.engine import Engine
from serve.paged import EMPTY, NOWHERE, OWNED

from .causal_models import LAYERS, LENGTH, causal_engine, mixed, policy_for, rows, told
from .test_state_machine import MAX_BATCH, SETTINGS, Requests

BLOCKS = 11 * LAYERS  # of two positions of a layer: one row at full length and depth


class CausalRequests(Requests):
    """The same over a cache that holds two or three rows."""

    length = LENGTH
    kinds = sorted(mixed())
    preempted = MAX_BATCH
    preempt = Preempt.swap
    preemptions = 0  # of all runs
    policy_for = staticmethod(policy_for)
    told = staticmethod(told)

    def make(self, **options: Any) -> Engine:
        return causal_engine(self.batch_rule, preempt=self.preempt, block_size=2, cache_blocks=BLOCKS, **options)

    def text(self, source: int) -> str:
        return rows()[source].source

    @invariant()
    def every_block_has_one_owner_or_none(self) -> None:
        slots, running = self.engine.slots, self.engine._running
        owned = [block for held in slots._held.values() for block in held.all_blocks]
        assert len(owned) == len(set(owned)) == slots.num_blocks_used
        assert set(owned).isdisjoint({EMPTY, NOWHERE}) and sorted([*owned, *slots.blocks._free]) == list(
            range(OWNED, OWNED + BLOCKS)
        )
        for row in running:
            written, next_written = (row.extent.positions(step) for step in (max(0, row.step - 1), row.reach))
            for layer, own in enumerate(slots._held[row.slot].blocks):
                table = slots.table[row.slot, layer].tolist()
                assert table[: len(own)] == own and set(table[len(own) :]) <= {EMPTY}
                assert -(-written[layer] // slots.size) <= len(own) <= -(-next_written[layer] // slots.size)

    @invariant()
    def copies_are_of_rows_that_wait(self) -> None:
        kept = set(self.engine.preemption._kept)
        assert kept <= {row.id for row in self.engine._waiting if row.tokens}
        assert not kept or self.preempt is Preempt.swap

    def teardown(self) -> None:
        super().teardown()
        type(self).preemptions += self.engine.preemption.count
        assert not self.engine.slots.num_blocks_used and not self.engine.preemption.held_bytes


@pytest.mark.parametrize("preempt", list(Preempt), ids=lambda how: how.value)
@pytest.mark.parametrize("batch_rule", [BatchRule.own, BatchRule.rebatch, BatchRule.sync], ids=lambda each: each.value)
def test_requests_come_and_go_in_any_order(batch_rule: BatchRule, preempt: Preempt) -> None:
    name = f"CausalRequestsOf{batch_rule.value.title()}{preempt.value.title()}"
    machine = type(name, (CausalRequests,), {"batch_rule": batch_rule, "preempt": preempt})
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=20, stateful_step_count=50))
    assert machine.preemptions >= 3
