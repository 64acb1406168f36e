"""A departure from the traced layout is planned with a copy, once, or refused where it cannot be."""

from __future__ import annotations

import logging

import pytest

from shoal.capture.traced_strides import Departure
from shoal.engine.traced_layouts import TracedLayouts
from shoal.errors import CaptureError, PlanError
from tests.joint_graphs import NETWORKS, batch, captured_step
from tests.raising import raising

PADDED = Departure("relu", "aten.relu.default", (2, 4), (4, 1), (1, 2), 32)


def learn(
    layouts: TracedLayouts, departure: Departure = PADDED, *, plan_is_given: bool = False, can_plan_again: bool = True
) -> None:
    layouts.learn(
        "net",
        "captured",
        {departure.node: departure},
        plan_is_given=plan_is_given,
        can_plan_again=can_plan_again,
    )


def test_it_is_said_with_what_the_copies_take(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal"):
        learn(TracedLayouts())
    assert "net: aten.relu.default returns [2, 4] with strides [1, 2], traced [4, 1]; copies of 32 " in caplog.text


def test_a_given_plan_is_not_changed() -> None:
    with raising(PlanError, "budget=", "plan="):
        learn(TracedLayouts(), plan_is_given=True)


def test_what_is_known_already_or_cannot_be_planned_is_an_error() -> None:
    layouts = TracedLayouts()
    with pytest.raises(CaptureError):
        learn(layouts, can_plan_again=False)
    learn(layouts)
    with pytest.raises(CaptureError):
        learn(layouts)


def test_the_step_gets_a_copy_behind_the_op_that_departs() -> None:
    captured = captured_step(NETWORKS["residual"](), batch())
    layouts = TracedLayouts()
    n_ops = len(captured.graph.ops)
    assert len(layouts.restored(captured).graph.ops) == n_ops
    name = next(op.name for op in captured.graph.ops if "convolution" in op.name)
    value = captured.node_of[name].meta["val"]
    departure = Departure(name, "convolution", tuple(value.shape), value.stride(), value.stride(), 8)
    fingerprint = captured.graph.fingerprint
    layouts.learn("net", fingerprint, {name: departure}, plan_is_given=False, can_plan_again=True)
    assert len(layouts.restored(captured).graph.ops) == n_ops + 1
