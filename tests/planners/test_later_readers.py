"""Ops that need no copy run while one is on its way: shorter waits inside the same budget, and the same residences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.hardware import Link
from shoal.core.order import op_names
from shoal.core.residence import Keep, Offload
from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.core.validate_plan import check_order
from shoal.planners.joint import joint
from shoal.planners.just_in_time import just_in_time
from shoal.planners.later_readers import with_later_readers
from shoal.planners.limits import DEFAULT, Effort, Guard
from shoal.planners.simulated import Simulated, simulated
from shoal.planners.transfer_places import with_offloads
from tests.random_steps import HARDWARE, SLOW_LINK, Builder, legal_offloads, steps

# A copy of the 1000 bytes that wait takes four seconds back, and next to nothing there.
LINK = Link("link", 1e9, 250.0, latency_seconds=0.0)
ROOMY = 1 << 20
LATER = ("input_gradient_6", "before_it_7", "weight_gradient_5")


def effort(ops: int = DEFAULT.order_ops) -> Effort:
    return Effort("order of ops", ops, Guard(1e9))


def weight_gradient_first(gradient_bytes: int = 100) -> StepGraph:
    """The backward pass begins with an op that reads what waits; the two after it, of three seconds, do not.

    The first of these writes `gradient_bytes`, which the second reads. Between the passes there is room for nothing.
    """
    b = Builder()
    (wide,) = b.op("wide", "forward", (b.input(10),), [("out", 1000, "activation")], 5.0, recomputable=False)
    (middle,) = b.op("middle", "forward", (wide,), [("out", 10, "activation")], 5.0)
    (between,) = b.op("between", "forward", (middle,), [("out", 1000, "activation")], 5.0)
    (narrow,) = b.op("narrow", "forward", (between,), [("out", 10, "output")], 5.0)
    (tangent,) = b.op("loss", "loss", (narrow,), [("out", 10, "tangent")], 0.0)
    b.op("weight_gradient", "backward", (tangent, wide), [("out", 8, "gradient")], 3.0)
    (gradient,) = b.op("input_gradient", "backward", (tangent,), [("out", gradient_bytes, "activation_gradient")], 3.0)
    b.op("before_it", "backward", (gradient,), [("out", 8, "gradient")], 3.0)
    return replace(b.step(narrow, with_loss=False), ops=tuple(b.ops[:8]), link=LINK)


def with_all_away(graph: StepGraph, budget_bytes: int) -> Simulated:
    """Every activation that can wait on the host does so."""
    kept = just_in_time(graph, range(len(graph.storages)))
    away = [graph.storage_called[name].id for name, *_ in legal_offloads(graph, kept, range(len(graph.storages)))]
    return simulated(graph, with_offloads(graph, kept, away, budget_bytes))


def test_what_needs_no_copy_runs_before_what_waits_for_one() -> None:
    graph = weight_gradient_first()
    found = with_all_away(graph, ROOMY)
    assert found.seconds == pytest.approx(29 + 4)
    later = with_later_readers(found, ROOMY, effort())
    assert op_names(later.graph)[5:] == LATER
    assert later.seconds == pytest.approx(29)
    assert isinstance(later.residences["wide_0.out"], Offload)


def test_what_it_writes_must_have_room_beside_what_comes_back() -> None:
    graph = weight_gradient_first(gradient_bytes=500)
    budget_bytes = 1100  # for the copy or for the gradient, not for both
    found = with_all_away(graph, budget_bytes)
    assert with_later_readers(found, budget_bytes, effort()) is found
    later = with_later_readers(found, 1600, effort())
    assert op_names(later.graph)[5:] == LATER


def test_an_op_that_reads_what_the_waiting_one_writes_stays_behind_it() -> None:
    b = Builder()
    (wide,) = b.op("wide", "forward", (b.input(10),), [("out", 1000, "activation")], 5.0)
    (narrow,) = b.op("narrow", "forward", (wide,), [("out", 10, "output")], 5.0)
    (tangent,) = b.op("loss", "loss", (narrow,), [("out", 10, "tangent")], 0.0)
    (gradient,) = b.op("first", "backward", (tangent, wide), [("out", 100, "activation_gradient")], 3.0)
    b.op("second", "backward", (gradient,), [("out", 8, "gradient")], 3.0)
    graph = replace(b.step(narrow, with_loss=False), ops=tuple(b.ops[:5]), link=LINK)
    found = with_all_away(graph, ROOMY)
    assert with_later_readers(found, ROOMY, effort()) is found


@pytest.mark.parametrize("link", [None, replace(LINK, overlaps=False)])
def test_without_copies_beside_the_ops_there_is_no_wait_to_fill(link: Link | None) -> None:
    graph = replace(weight_gradient_first(), link=link)
    found = with_all_away(graph, ROOMY) if link is not None else simulated(graph, {"wide_0.out": Keep()})
    assert with_later_readers(found, ROOMY, effort()) is found


def test_short_waits_are_left_and_so_is_what_there_is_no_effort_for() -> None:
    found = with_all_away(weight_gradient_first(), ROOMY)
    assert with_later_readers(found, ROOMY, effort(), least_wait_seconds=4.1) is found
    assert with_later_readers(found, ROOMY, effort(1)) is found


links = st.builds(
    replace,
    st.just(SLOW_LINK),
    to_host_bytes_per_second=st.sampled_from([2.0, 10.0, 50.0]),
    to_device_bytes_per_second=st.sampled_from([2.0, 10.0, 50.0]),
)


@given(steps(max_ops=7), links, st.data())
def test_it_is_never_slower_fits_can_run_and_leaves_every_residence(
    graph: StepGraph, link: Link, data: st.DataObject
) -> None:
    graph = replace(graph, link=link)
    every = range(len(graph.storages))
    kept = just_in_time(graph, [s for s in every if data.draw(st.booleans())])
    stays = [s for s in every if isinstance(kept.get(graph.storages[s].name), Keep)]
    away = [
        graph.storage_called[name].id for name, *_ in legal_offloads(graph, kept, stays) if data.draw(st.booleans())
    ]
    found = simulated(graph, with_offloads(graph, kept, away))
    budget_bytes = data.draw(st.integers(found.peak_bytes, 2 * found.peak_bytes))
    later = with_later_readers(found, budget_bytes, effort())
    assert later is found or later.seconds < found.seconds
    check_order(graph, later.graph)
    runs = schedule(later.graph, later.residences)
    assert check_runs(later.graph, later.residences, runs, budget_bytes) == later.peak_bytes <= budget_bytes
    assert {s: type(one) for s, one in later.residences.items()} == {
        s: type(one) for s, one in found.residences.items()
    }


def test_joint_hides_a_copy_behind_gradients_that_need_none() -> None:
    graph, budget_bytes = weight_gradient_first(), 1600  # 2030 with everything kept
    as_captured = joint(graph, HARDWARE, budget_bytes, limits=replace(DEFAULT, order=False))
    plan = joint(graph, HARDWARE, budget_bytes)
    assert as_captured.offloaded == plan.offloaded
    assert as_captured.predicted_seconds == pytest.approx(33)
    assert plan.predicted_seconds == pytest.approx(29) == plan.plain_seconds + plan.lower_bound_seconds
    assert plan.order == "3 of 8 ops run earlier or later than captured: copies back have more time until they are read"
