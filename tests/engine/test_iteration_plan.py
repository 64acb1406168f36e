"""A turn as a step with steps inside: every step in order, those inside between two passes of the outer one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.joined_step import Interval, Part, Pass, joined_step
from shoal.core.residence import Recompute
from shoal.core.shares import Share
from shoal.core.simulate import simulate
from shoal.engine.compile_options import CompileOptions
from shoal.engine.iteration.plan import InOrder, MeasuredIteration, Surroundings, in_order, plan_iteration
from tests.core.test_joined_step import Y, layer_of_two_ops


@st.composite
def nested(draw: st.DrawFn, first: int = 0, depth: int = 2) -> list[Pass]:
    """Passes of a step in order, with such steps between its forward passes or before its first backward pass."""
    n = draw(st.integers(1, 3))
    passes: list[Pass] = []
    number = first
    own = []
    for _ in range(n):
        own.append(number)
        passes.append((number, "forward"))
        number += 1
        if depth and draw(st.booleans()):
            inner = draw(nested(number, depth - 1))
            passes += inner
            number = 1 + max(run for run, _ in inner)
    backward: list[Pass] = [(run, "backward") for run in draw(st.permutations(own))]
    return [*passes, *backward]


def steps_of(step: InOrder) -> list[InOrder]:
    return [step, *(one for inner in step.inner for one in steps_of(inner))]


@given(nested())
def test_steps_inside_steps_are_found(passes: list[Pass]) -> None:
    whole = in_order(passes)
    assert whole is not None
    steps = steps_of(whole)
    assert sorted(place for step in steps for place in step.places) == list(range(len(passes)))
    for step in steps:
        own = [passes[place] for place in step.places]
        phases = [phase for _, phase in own]
        assert phases == sorted(phases, reverse=True) and len(set(own)) == len(own)  # forward passes first, none twice
        runs = {run for run, _ in own}
        assert all((run, phase) in own for run in runs for phase in ("forward", "backward"))
        assert step.first == min(place for one in steps_of(step) for place in one.places)
        for inner in step.inner:
            inside = [place for one in steps_of(inner) for place in one.places]
            assert any(before < min(inside) for before in step.places) or inner.first == step.first
            assert not any(min(inside) < place < max(inside) for place in step.places)
            assert max(inside) < max(step.places)


def test_a_step_of_one_model_is_one() -> None:
    whole = in_order([(0, "forward"), (1, "forward"), (1, "backward"), (0, "backward")])
    assert whole == InOrder((0, 1, 2, 3), (), 0)


def test_a_result_that_waits_while_another_model_takes_its_step_encloses_it() -> None:
    turn: list[Pass] = [(0, "forward"), (1, "forward"), (1, "backward")]
    turn += [(2, "forward"), (2, "backward"), (0, "backward")]
    assert in_order(turn) == InOrder((0, 3, 4, 5), (InOrder((1, 2), (), 1),), 0)


def test_what_does_not_go_back_belongs_to_the_step_around_it() -> None:
    assert in_order([(0, "forward"), (1, "forward"), (1, "backward")]) == InOrder((0, 1, 2), (), 0)


def test_passes_that_overlap_otherwise_are_no_step_and_neither_is_a_second_backward_pass() -> None:
    overlapping: list[Pass] = [(0, "forward"), (1, "forward"), (0, "backward"), (2, "forward")]
    assert in_order([*overlapping, (1, "backward"), (2, "backward")]) is None
    assert in_order([(0, "forward"), (0, "backward"), (0, "backward")]) is None


def test_what_eager_code_uses_is_told_by_the_shares_under_which_it_was_measured() -> None:
    """Not by those that its graphs have in the plan of another iteration, which was made since."""
    part = Part(layer_of_two_ops(100), {Y})
    passes: tuple[Pass, ...] = ((0, "forward"), (0, "backward"))
    recomputing = Share({"hidden": Recompute(("second_back",))})
    bare = joined_step("", [part], passes)
    in_use = {
        m.op: m.total_bytes
        for m in simulate(bare, {"part0.hidden": Recompute(("part0.second_back",))}).moments
        if m.phase != "recompute"
    }
    ops = ("eager0", "part0.second", "loss", "part0.first_back")
    intervals = tuple(Interval(in_use[op] + (30 if op == "loss" else 0), in_use[op]) for op in ops)
    measured = MeasuredIteration((part,), passes, (recomputing,), intervals, bare.resident_bytes, torch.device("cpu"))
    for shares in (None, (Share(),)):
        planned = plan_iteration(measured, Surroundings(CompileOptions()), ["net"], fixed=True, shares=shares)
        assert planned is not None
        (plan,) = planned.plans
        loss = plan.graph.op_called["loss"]
        assert loss.workspace_bytes == 30 and plan.graph.static_bytes == 0
        assert planned.shares == (shares or (recomputing,))
