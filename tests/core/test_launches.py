"""The host launches ops one after another, the device runs them: a step is never shorter than either queue."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.hardware import Device, Hardware, Link
from shoal.core.plan import Plan
from shoal.core.residence import Offload, Recompute
from shoal.core.schedule import schedule
from shoal.core.simulate import launch_waits, peak_and_seconds, simulate
from shoal.core.step import Again, StepGraph
from shoal.core.timeline import WAITS
from shoal.core.validate_plan import check_step
from shoal.cost.roofline import roofline
from shoal.errors import PlanError
from shoal.planners.just_in_time import just_in_time
from tests.random_steps import SLOW_LINK, launches, offloads, plain_chain, steps

GPU = Hardware(
    "gpu", Device("gpu", 1 << 30, 1e12, 1e12, 1e-6, host_launch_seconds=5e-6), Link("bus", 1e9, 1e9, 0.0), "made up"
)


def chain(n: int, launch_seconds: float) -> StepGraph:
    """Convolutions that take a second each, two in the backward pass."""
    graph = plain_chain(n)
    return replace(graph, ops=tuple(replace(op, launch_seconds=launch_seconds) for op in graph.ops))


def test_launches_that_are_shorter_than_their_ops_cost_the_first_one_alone() -> None:
    graph = chain(3, 0.1)
    timeline = simulate(graph, {})
    assert timeline.seconds == pytest.approx(0.1 + sum(op.seconds for op in graph.ops))
    first, second = timeline.moments[:2]
    assert (first.phase, first.op, first.seconds) == ("launch", "conv_0", 0.1)
    assert (second.phase, second.op, second.start_seconds) == ("forward", "conv_0", 0.1)


def test_a_step_whose_launches_are_longer_than_its_ops_takes_what_they_take_and_its_last_op() -> None:
    graph = chain(3, 5.0)
    timeline = simulate(graph, {})
    assert timeline.seconds == pytest.approx(5.0 * len(graph.ops) + graph.ops[-1].seconds)
    assert timeline.launch_wait_seconds == pytest.approx(timeline.seconds - sum(op.seconds for op in graph.ops))


def test_the_host_goes_on_launching_while_a_long_op_runs() -> None:
    graph = chain(2, 1.0)
    long, *rest = graph.ops
    graph = replace(graph, ops=(replace(long, seconds=100.0), *rest))
    waits = [moment.op for moment in simulate(graph, {}).moments if moment.phase == "launch"]
    assert waits == ["conv_0"]


def test_what_is_launched_again_takes_the_host_again() -> None:
    graph = chain(3, 5.0)
    again = simulate(graph, {"conv_1.out": Recompute(("conv_backward_4",))})
    assert again.seconds == pytest.approx(simulate(graph, {}).seconds + 5.0)


def test_a_second_run_has_a_launch_of_its_own() -> None:
    graph = chain(3, 5.0)
    op = graph.ops[1]
    cheaper = replace(op, again=Again(op.target, op.reads, seconds=0.5, launch_seconds=2.0))
    graph = replace(graph, ops=(graph.ops[0], cheaper, *graph.ops[2:]))
    again = simulate(graph, {"conv_1.out": Recompute(("conv_backward_4",))})
    assert again.seconds == pytest.approx(simulate(graph, {}).seconds + 2.0)


def test_a_wait_for_a_copy_hides_launches() -> None:
    slow = Link("link", to_host_bytes_per_second=500.0, to_device_bytes_per_second=250.0, latency_seconds=0.5)
    plan = {"conv_0.out": Offload("conv_1", "conv_backward_6")}
    launched = simulate(replace(chain(4, 0.5), link=slow), plan)
    without = simulate(replace(plain_chain(4), link=slow), plan)
    assert launched.stall_seconds == pytest.approx(without.stall_seconds)
    assert launched.seconds == pytest.approx(without.seconds + 0.5)  # the first launch: the others are over by then


@given(st.data())
def test_where_launches_take_no_time_the_step_is_that_of_the_device_alone(data: st.DataObject) -> None:
    graph = replace(data.draw(steps()), link=SLOW_LINK)
    residences = data.draw(offloads(graph))
    timeline = simulate(graph, residences)
    assert timeline.launch_wait_seconds == 0
    assert simulate(data.draw(launches(graph)).without_launches(), residences) == timeline
    assert graph.without_launches() is graph
    assert graph.plain_seconds == sum(op.seconds for op in graph.ops)
    ends = accumulate(moment.seconds for moment in timeline.moments)
    assert [moment.start_seconds for moment in timeline.moments[1:]] == list(ends)[:-1]


@given(st.data())
def test_the_step_is_never_shorter_than_either_queue_and_never_longer_than_both(data: st.DataObject) -> None:
    graph = data.draw(launches(data.draw(steps())))
    residences = just_in_time(graph, data.draw(st.sets(st.sampled_from(range(len(graph.storages))))))
    runs = [run.of(graph) for run in schedule(graph, residences)]
    on_host, on_device = sum(op.launch_seconds for op in runs), sum(op.seconds for op in runs)
    seconds = simulate(graph, residences).seconds
    assert max(on_host, on_device) <= seconds * (1 + 1e-12) <= (on_host + on_device) * (1 + 1e-9)


@given(st.data())
def test_the_step_is_its_longest_way_through_both_queues(data: st.DataObject) -> None:
    """Launches up to some op, then that op and all after it on the device: the most over all ops."""
    graph = data.draw(launches(data.draw(steps())))
    residences = just_in_time(graph, data.draw(st.sets(st.sampled_from(range(len(graph.storages))))))
    runs = [run.of(graph) for run in schedule(graph, residences)]
    ways = [
        sum(op.launch_seconds for op in runs[: at + 1]) + sum(op.seconds for op in runs[at:]) for at in range(len(runs))
    ]
    timeline = simulate(graph, residences)
    assert timeline.seconds == pytest.approx(max(ways))
    assert timeline.launch_wait_seconds == pytest.approx(sum(launch_waits(graph, schedule(graph, residences))))
    assert graph.plain_seconds == pytest.approx(simulate(graph, {}).seconds)


@given(st.data())
def test_longer_launches_never_make_a_step_shorter(data: st.DataObject) -> None:
    graph = replace(data.draw(steps()), link=SLOW_LINK)
    residences = data.draw(offloads(graph))
    some = data.draw(launches(graph))
    more = replace(
        some,
        ops=tuple(
            replace(op, launch_seconds=op.launch_seconds + longer.launch_seconds)
            for op, longer in zip(some.ops, data.draw(launches(graph)).ops, strict=True)
        ),
    )
    seconds = [simulate(one, residences).seconds for one in (graph, some, more)]
    assert seconds == sorted(seconds)


@given(st.data())
def test_launches_change_no_byte_and_the_short_form_agrees(data: st.DataObject) -> None:
    graph = replace(data.draw(steps()), link=SLOW_LINK)
    residences = data.draw(offloads(graph))
    launched = data.draw(launches(graph))
    timeline, before = simulate(launched, residences), simulate(graph, residences)
    assert timeline.peak_bytes == before.peak_bytes
    in_use = [
        [(moment.op, moment.total_bytes) for moment in one.moments if moment.phase not in WAITS]
        for one in (timeline, before)
    ]
    assert in_use[0] == in_use[1]
    _, seconds = peak_and_seconds(launched, schedule(launched, residences))
    assert seconds == pytest.approx(timeline.seconds)
    assert timeline.peak.phase != "launch"


def test_a_step_takes_launches_by_signature_and_loses_all_for_a_graph_that_is_replayed() -> None:
    graph = plain_chain(2)
    named = {op.signature for op in graph.ops}
    launched = graph.with_costs({}, {}, dict.fromkeys(named, 3.0))
    assert {op.launch_seconds for op in launched.ops} == {3.0}
    assert launched.has_launches
    assert not graph.has_launches
    assert launched.without_launches() == graph
    assert launched.fingerprint == graph.fingerprint


def test_times_for_a_gpu_that_is_not_here_have_the_launch_beside_the_op() -> None:
    graph = roofline(plain_chain(2), GPU)
    assert {op.launch_seconds for op in graph.ops} == {5e-6}
    assert {op.launch_seconds for op in roofline(plain_chain(2), replace(GPU, device=on_cpu())).ops} == {0.0}


def on_cpu() -> Device:
    return replace(GPU.device, host_launch_seconds=0.0)


def test_a_plan_says_how_long_the_device_waits_for_the_host() -> None:
    graph = chain(3, 0.005)
    graph = replace(graph, ops=tuple(replace(op, seconds=0.001) for op in graph.ops))
    explained = Plan(graph, {}, "by hand").explain().splitlines()
    (line,) = [line for line in explained if line.startswith("launches")]
    n = len(graph.ops)
    waits = f"{5 * n - (n - 1):.1f}"
    in_all = f"{n}, which take the host {5 * n:.1f} ms"
    assert line == f"launches        {in_all}; the device waits {waits} ms of the step for them"
    assert not any(line.startswith("launches") for line in Plan(plain_chain(3), {}, "by hand").explain().splitlines())


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e12])
def test_a_launch_takes_no_impossible_time(seconds: float) -> None:
    graph = chain(1, 1.0)
    with pytest.raises(PlanError):
        check_step(replace(graph, ops=(replace(graph.ops[0], launch_seconds=seconds), *graph.ops[1:])))
