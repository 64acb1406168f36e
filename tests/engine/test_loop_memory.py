"""A step in a training loop: what the loop holds is in use as long as it holds it, and planners see it so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal import planners
from shoal.core.residence import Recompute
from shoal.core.schedule import schedule
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.core.validate_plan import check_order
from shoal.engine.loop_memory import (
    HELD_GRADIENTS,
    HELD_RESULTS,
    KEPT_OF_LOSS,
    LoopMemory,
    best_case,
    by_itself,
    in_loop,
)
from shoal.errors import BudgetError
from shoal.planners.joint import joint
from tests.random_steps import HARDWARE, Builder, conv_bn_relu_chain, steps

WORST = LoopMemory()  # nothing is known


def outputs_of(graph: StepGraph) -> dict[int, str]:
    return dict(enumerate(s.name for s in graph.storages if s.kind == "output"))


habits = st.builds(
    LoopMemory,
    held_result_bytes=st.sampled_from([0, 70]),
    held_gradient_bytes=st.sampled_from([0, 50]),
    released=st.sampled_from([frozenset(), frozenset({0})]),
    let_go=st.sampled_from([frozenset(), frozenset({0})]),
    tangents_pass=st.booleans(),
    loss_share=st.sampled_from([0.0, 1.0, 2.5]),
    kept_share=st.sampled_from([0.0, 1.0]),
    given_share=st.sampled_from([0.0, 0.5, 1.0]),
    replays=st.booleans(),
    gradients_given=st.booleans(),
)


def tighter_in_another_order() -> StepGraph:
    b = Builder()
    x = b.input(3)
    y = b.conv(x, 1, 1.0, weight_bytes=0)
    b.batchnorm(y)
    b.batchnorm(b.batchnorm(x))
    return b.step(b.batchnorm(y), with_loss=False)


def without_a_backward_pass() -> StepGraph:
    b = Builder()
    return b.step(b.relu(b.input(1)))


@given(steps(), habits)
@example(without_a_backward_pass(), LoopMemory(loss_share=0.0))
@example(tighter_in_another_order(), LoopMemory(loss_share=0.0, kept_share=0.0))
def test_a_step_in_any_loop_is_a_step_that_can_be_planned(graph: StepGraph, loop: LoopMemory) -> None:
    seen = in_loop(graph, loop, outputs_of(graph))
    assert [op.id for op in seen.ops] == list(range(len(seen.ops)))
    assert [s.id for s in seen.storages] == list(range(len(seen.storages)))
    assert check_runs(seen, {}, schedule(seen, {})) == simulate(seen, {}).peak_bytes
    try:
        plan = joint(seen, HARDWARE, int(0.8 * simulate(seen, {}).peak_bytes))
    except BudgetError as refused:
        plan = joint(seen, HARDWARE, refused.least_feasible_bytes or 0)
    known = {s.name for s in graph.storages}
    assert plan.residences.keys() <= known, "what the loop holds is nothing to plan"
    check_order(seen, plan.graph)
    check_runs(plan.graph, plan.residences, schedule(plan.graph, plan.residences), plan.budget_bytes)


@given(steps(), habits.map(lambda loop: replace(loop, replays=False)))
def test_what_is_held_counts_where_it_is_held(graph: StepGraph, loop: LoopMemory) -> None:
    assume(any(op.phase == "loss" for op in graph.ops))

    def in_use(loop: LoopMemory) -> dict[str, int]:
        seen = in_loop(graph, loop, outputs_of(graph))
        own = graph.op_called.keys()
        return {m.op: m.total_bytes for m in simulate(seen, {}).moments if m.op in own}

    tangent_bytes = sum(s.nbytes for s in graph.storages if s.kind == "tangent")
    without = in_use(replace(loop, held_result_bytes=0, held_gradient_bytes=0, kept_share=0.0))
    for name, nbytes in in_use(loop).items():
        phase = graph.op_called[name].phase
        held_bytes = loop.held_result_bytes * (phase == "forward") + loop.held_gradient_bytes * (phase != "backward")
        held_bytes += int(loop.kept_share * tangent_bytes) * (phase != "forward")
        assert nbytes == without[name] + held_bytes
        assert without[name] >= loop.small_bytes


@given(steps(), habits)
def test_what_the_loop_does_can_be_taken_out_again(graph: StepGraph, loop: LoopMemory) -> None:
    assume(any(op.phase == "loss" for op in graph.ops))
    assert by_itself(in_loop(graph, loop, outputs_of(graph))).fingerprint == by_itself(graph).fingerprint


def test_the_worst_is_the_step_as_it_is_captured() -> None:
    graph = conv_bn_relu_chain(3)
    tangent_bytes = sum(s.nbytes for s in graph.storages if s.kind == "tangent")
    seen = in_loop(graph, WORST, outputs_of(graph))
    (loss,) = (op for op in seen.ops if op.phase == "loss")
    assert loss.workspace_bytes == 3 * tangent_bytes > 0
    *own, of_the_loss, gradients, held = seen.storages
    assert tuple(own) == graph.storages
    assert (of_the_loss.name, of_the_loss.nbytes) == (KEPT_OF_LOSS, tangent_bytes)
    assert of_the_loss.kind == "gradient"  # so that it stays until the end in whatever order ops run
    own_gradient_bytes = sum(s.nbytes for s in graph.storages if s.kind == "gradient")
    assert (gradients.name, gradients.nbytes) == (HELD_GRADIENTS, own_gradient_bytes)
    assert (held.name, held.nbytes) == (HELD_RESULTS, sum(s.nbytes for s in graph.storages if s.kind == "output"))


@pytest.mark.parametrize("shares", [1, 3])
def test_of_results_that_share_a_gradient_the_loss_keeps_each_and_reads_one_after_another(shares: int) -> None:
    alone = conv_bn_relu_chain(3)
    tangent_bytes = sum(s.nbytes for s in alone.storages if s.kind == "tangent")
    shared = replace(alone, shared_result_bytes=shares * tangent_bytes)

    def taken(graph: StepGraph, loop: LoopMemory) -> tuple[int, int]:
        seen = in_loop(graph, loop, outputs_of(graph))
        return seen.storage_called[KEPT_OF_LOSS].nbytes, max(op.workspace_bytes for op in seen.ops)

    assert taken(alone, WORST) == (tangent_bytes, 3 * tangent_bytes)
    assert taken(shared, WORST) == ((1 + shares) * tangent_bytes, 3 * tangent_bytes)
    learnt = replace(WORST, learnt=True, loss_share=2.0)
    assert taken(shared, learnt) == ((1 + shares) * tangent_bytes, 2 * tangent_bytes)


def test_what_the_loss_is_given_is_there_all_step() -> None:
    graph = conv_bn_relu_chain(3)
    tangent_bytes = sum(s.nbytes for s in graph.storages if s.kind == "tangent")
    without, given = (
        simulate(in_loop(graph, replace(WORST, given_share=share), outputs_of(graph)), {}) for share in (0.0, 0.5)
    )
    more = {b.total_bytes - a.total_bytes for a, b in zip(without.moments, given.moments, strict=True)}
    assert more == {math.ceil(0.5 * tangent_bytes)}


class Returns(nn.Module):
    """Returns what is made of a hidden tensor and a weight."""

    def __init__(self, results: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.results = results

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.results(self.layer(x), self.layer.weight)


@pytest.mark.parametrize(
    ("results", "has_loss"),
    [
        (lambda h, w: (h.square().mean(), h), True),
        (lambda h, w: (h.square().mean(), h.tanh(), h), False),  # nothing but a second loss reads the second result
        (lambda h, w: (w.square().sum(), h), False),  # a penalty; the loss reads the other result
        (lambda h, w: ((h > 0).float().mean(), h), False),  # an accuracy
        (lambda h, w: (h.square().mean(), w.square().sum(), h, h.argmax(1)), True),
        (lambda h, w: (h,), False),
    ],
)
def test_a_scalar_that_is_computed_from_the_other_results_is_the_loss(
    results: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]], has_loss: bool
) -> None:
    graph = shoal.plan(Returns(results), torch.zeros(4, 8)).graph
    tangents = [s for s in graph.storages if s.kind == "tangent"]
    outputs = outputs_of(graph)
    expected = sum(s.nbytes for s in tangents if s.is_scalar or not has_loss)
    assert graph.loss_gradient_bytes(outputs.values()) == expected
    late = graph.undefined_gradients(outputs.values())
    assert late == {s.name for s in tangents if not s.is_scalar and has_loss}
    in_use = [simulate(in_loop(graph, replace(WORST, gradients_given=given), outputs), {}) for given in (True, False)]
    at_loss = [next(m for m in timeline.moments if m.phase == "loss").total_bytes for timeline in in_use]
    assert at_loss[0] - at_loss[1] == sum(s.nbytes for s in tangents if s.name in late)


def test_in_the_best_loop_outputs_and_their_gradients_die_with_their_last_readers() -> None:
    graph = conv_bn_relu_chain(3)
    best = in_loop(graph, best_case(WORST, outputs_of(graph)), outputs_of(graph))
    at_the_end = [simulate(in_loop(graph, WORST, {}), {}).moments[-1], simulate(best, {}).moments[-1]]
    assert at_the_end[0].total_bytes > at_the_end[1].total_bytes
    assert {s.kind for s in best.storages}.isdisjoint({"output", "tangent"})


@given(steps(), habits)
def test_what_lies_outside_of_a_pool_never_takes_what_is_free_in_it(graph: StepGraph, loop: LoopMemory) -> None:
    seen = in_loop(graph, replace(loop, replays=True), outputs_of(graph))
    tangent_bytes = sum(s.nbytes for s in graph.storages if s.kind == "tangent")
    outside_bytes = math.ceil(loop.loss_share * tangent_bytes) + math.ceil(loop.kept_share * tangent_bytes)
    names = [outputs_of(graph)[place] for place in loop.released if place in outputs_of(graph)]
    saved = {graph.storages[storage].name for storage in graph.saved}
    outside_bytes += sum(graph.storage_called[name].nbytes for name in names if name not in saved)
    outside_bytes += math.ceil(loop.given_share * tangent_bytes)
    assert seen.static_bytes == graph.static_bytes + loop.small_bytes + outside_bytes
    assert all(
        moment.total_bytes >= outside_bytes + tangent_bytes for moment in simulate(seen, {}).moments if tangent_bytes
    )


def test_a_gradient_of_an_output_is_never_written_over() -> None:
    graph = conv_bn_relu_chain(3)
    tangent = next(s.id for s in graph.storages if s.kind == "tangent")
    first = next(op for op in graph.ops if op.phase == "backward")
    graph = replace(graph, ops=tuple(replace(op, overwrites=tangent) if op == first else op for op in graph.ops))
    seen = in_loop(graph, replace(WORST, tangents_pass=True), outputs_of(graph))
    assert all(run.takes_over != tangent for run in schedule(seen, {}))


def test_an_output_that_the_backward_pass_reads_stays_as_long_as_it_does() -> None:
    builder = Builder()
    graph = builder.step(builder.relu(builder.conv(builder.input(8), 8)))
    output = next(s for s in graph.storages if s.kind == "output")
    assert output.id in graph.saved, "the test shows nothing"
    released = replace(WORST, released=frozenset(outputs_of(graph)))
    kept = in_loop(graph, released, outputs_of(graph))
    assert kept.storages[output.id].kind == "output", "whoever holds it may do so for longer"
    let_go = in_loop(graph, replace(released, let_go=frozenset(outputs_of(graph))), outputs_of(graph))
    assert let_go.storages[output.id].kind == "crossing"
    less_bytes = simulate(kept, {}).moments[-1].total_bytes - simulate(let_go, {}).moments[-1].total_bytes
    assert less_bytes == output.nbytes


@given(steps(), st.sampled_from(["chain", "joint"]))
def test_no_planner_gives_up_an_output_before_the_loss_has_read_it(graph: StepGraph, planner: str) -> None:
    outputs = outputs_of(graph)
    seen = in_loop(graph, best_case(WORST, outputs), outputs)
    try:
        plan = planners.get(planner)(seen, HARDWARE, int(0.6 * simulate(seen, {}).peak_bytes))
    except BudgetError as refused:
        plan = planners.get(planner)(seen, HARDWARE, refused.least_feasible_bytes or 0)
    read = {graph.storages[s].name for op in graph.ops if op.phase == "loss" for s in op.reads}
    assert not read & {name for name, residence in plan.residences.items() if isinstance(residence, Recompute)}
