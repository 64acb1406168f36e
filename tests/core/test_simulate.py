"""The simulated step adds up: bytes by category at every position, and seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.hardware import Link
from shoal.core.residence import Offload, Recompute
from shoal.core.schedule import schedule
from shoal.core.simulate import LinkQueue, peak_and_seconds, simulate
from shoal.core.step import StepGraph
from shoal.errors import PlanError
from shoal.planners.just_in_time import just_in_time
from tests.raising import raising
from tests.random_steps import SLOW_LINK, Builder, offloads, plain_chain, steps


def test_the_bytes_of_a_small_step_by_hand() -> None:
    # batch 10 + weights 1 + 1; conv writes 20 with a workspace of 7, conv writes 5 (handed out); static 100.
    b = Builder()
    x = b.conv(b.input(10), 20, workspace_bytes=7, weight_bytes=1)
    graph = b.step(b.conv(x, 5, weight_bytes=1), static_bytes=100)
    timeline = simulate(graph, {})
    assert [(m.op, m.total_bytes) for m in timeline.moments] == [
        ("conv_0", 112 + 20 + 7),
        ("conv_1", 112 + 20 + 5),
        ("loss_2", 112 + 20 + 5 + 5),
        ("conv_backward_3", 112 + 20 + 5 + 5 + 20 + 1),
        ("conv_backward_4", 112 + 5 + 5 + 20 + 1 + 1),
    ]
    assert timeline.peak.op == "conv_backward_3"
    last = timeline.moments[-1]
    assert (last.resident_bytes, last.kept_bytes, last.activation_gradient_bytes, last.gradient_bytes) == (
        112,
        5,
        25,
        2,
    )


def test_recomputation_costs_its_op_once_more_and_is_counted_apart() -> None:
    graph = plain_chain(3, nbytes=1000, seconds=2.0)
    plain = simulate(graph, {})
    again = simulate(graph, {"conv_1.out": Recompute(("conv_backward_4",))})
    assert again.seconds == pytest.approx(plain.seconds + 2.0)
    assert again.recompute_seconds == 2.0
    (rerun,) = [m for m in again.moments if m.phase == "recompute"]
    assert (rerun.op, rerun.recomputed_bytes, rerun.kept_bytes) == ("conv_1", 1000, 2000)


def test_what_a_recomputation_writes_unasked_counts_while_it_runs() -> None:
    b = Builder()
    x = b.conv(b.input(4), 8)
    x = b.pool(x, 6)
    graph = b.step(b.conv(x, 4))
    (pooled_reader,) = [op.name for op in graph.ops if op.target == "conv_backward" and x in op.reads]
    timeline = simulate(graph, {"pool_1.out": Recompute((pooled_reader,)), "conv_0.out": Recompute((pooled_reader,))})
    (rerun,) = [m for m in timeline.moments if m.phase == "recompute" and m.op.startswith("pool")]
    assert rerun.recomputed_bytes == 8 + 6
    assert rerun.workspace_bytes == 6  # its indices, which were kept from the first run


@given(steps())
def test_taking_over_a_block_never_costs_bytes(graph: StepGraph) -> None:
    runs = schedule(graph, {})
    with_takeover, _ = peak_and_seconds(graph, runs)
    assert (
        with_takeover
        <= peak_and_seconds(graph, [run.__class__(run.op, run.again, run.writes, run.frees) for run in runs])[0]
    )


@given(steps())
def test_the_short_form_agrees_with_the_record(graph: StepGraph) -> None:
    for residences in ({}, just_in_time(graph, ())):
        timeline = simulate(graph, residences)
        peak, seconds = peak_and_seconds(graph, schedule(graph, residences))
        assert peak == max(timeline.peak_bytes, graph.resident_bytes)
        assert seconds == pytest.approx(timeline.seconds)


@given(steps())
def test_the_step_ends_with_what_must_stay(graph: StepGraph) -> None:
    last = simulate(graph, just_in_time(graph, ())).moments[-1]
    gradients = sum(s.nbytes for s in graph.storages if s.kind == "gradient")
    assert last.gradient_bytes == gradients
    assert last.resident_bytes == graph.resident_bytes


def _offloaded_chain(link: Link | None) -> StepGraph:
    """Four convolutions of a second and 1000 bytes each; a backward op takes two."""
    return replace(plain_chain(4, nbytes=1000, seconds=1.0), link=link)


def test_a_copy_as_long_as_an_op_costs_no_time_and_its_bytes_are_gone_in_between() -> None:
    link = Link("link", to_host_bytes_per_second=1000.0, to_device_bytes_per_second=500.0, latency_seconds=0.0)
    graph = _offloaded_chain(link)
    plan = {"conv_0.out": Offload("conv_1", "conv_backward_6")}
    timeline = simulate(graph, plan)
    assert timeline.seconds == pytest.approx(simulate(graph, {}).seconds)
    assert timeline.stall_seconds == 0
    saved = [
        plain.total_bytes - moment.total_bytes
        for plain, moment in zip(simulate(graph, {}).moments, timeline.moments, strict=True)
    ]
    assert saved == [0, 0, 1000, 1000, 1000, 1000, 0, 0, 0]
    to_host, to_device = timeline.transfers
    assert (to_host.storage, to_host.way, to_host.start_seconds, to_host.seconds) == ("conv_0.out", "to host", 1, 1)
    assert (to_device.way, to_device.start_seconds, to_device.seconds) == ("to device", 4.1 + 2, 2)


def test_a_slow_link_stalls_the_device_for_what_the_copy_takes_longer() -> None:
    link = Link("link", to_host_bytes_per_second=500.0, to_device_bytes_per_second=250.0, latency_seconds=0.5)
    graph = _offloaded_chain(link)
    timeline = simulate(graph, {"conv_0.out": Offload("conv_1", "conv_backward_6")})
    stalls = [(m.op, m.target, m.seconds) for m in timeline.moments if m.phase == "stall"]
    assert stalls == [("conv_0.out", "conv", pytest.approx(1.5)), ("conv_0.out", "conv_backward", pytest.approx(2.5))]
    assert timeline.seconds == pytest.approx(simulate(graph, {}).seconds + 4)


def test_copies_of_one_way_queue_and_the_two_ways_run_at_once() -> None:
    link = Link("link", to_host_bytes_per_second=250.0, to_device_bytes_per_second=250.0, latency_seconds=0.0)
    plan = {
        "conv_0.out": Offload("conv_3", "conv_backward_5"),
        "conv_1.out": Offload("conv_3", "conv_backward_5"),
    }
    first, second, *back = simulate(_offloaded_chain(link), plan).transfers
    assert (first.start_seconds, second.start_seconds) == (1, 5)
    assert [transfer.storage for transfer in back] == ["conv_1.out", "conv_0.out"]
    assert back[1].start_seconds == back[0].start_seconds + back[0].seconds


def test_a_link_that_does_not_overlap_adds_every_copy_to_the_step() -> None:
    link = Link("link", 1000.0, 500.0, 0.0, overlaps=False)
    graph = _offloaded_chain(link)
    timeline = simulate(graph, {"conv_0.out": Offload("conv_1", "conv_backward_5")})
    assert timeline.stall_seconds == pytest.approx(1 + 2)


def test_a_step_without_a_link_offloads_nothing() -> None:
    with pytest.raises(PlanError):
        simulate(_offloaded_chain(None), {"conv_0.out": Offload("conv_1", "conv_backward_6")})


@given(steps(), st.data())
def test_the_short_form_agrees_with_the_timeline(graph: StepGraph, data: st.DataObject) -> None:
    graph = replace(graph, link=replace(SLOW_LINK, overlaps=data.draw(st.booleans())))
    residences = data.draw(offloads(graph))
    peak_bytes, seconds = peak_and_seconds(graph, schedule(graph, residences))
    timeline = simulate(graph, residences)
    assert (peak_bytes, seconds) == (timeline.peak_bytes, pytest.approx(timeline.seconds))


LINK = Link("link", to_host_bytes_per_second=1000.0, to_device_bytes_per_second=500.0, latency_seconds=0.5)
GRAPH = replace(plain_chain(4, nbytes=1000), link=LINK)
FIRST, SECOND = (s.id for s in GRAPH.storages if s.name in ("conv_0.out", "conv_1.out"))


def test_a_copy_takes_its_latency_and_its_bytes_over_the_rate_of_its_direction() -> None:
    queue = LinkQueue(GRAPH)
    assert queue.offload(FIRST, 2.0) == (2.0, 3.5)
    assert queue.fetch(FIRST, 10.0) == (10.0, 12.5)


def test_copies_of_one_direction_follow_one_another_and_those_of_the_other_do_not() -> None:
    queue = LinkQueue(GRAPH)
    queue.offload(FIRST, 0.0)
    assert queue.offload(SECOND, 1.0) == (1.5, 3.0)
    assert queue.fetch(FIRST, 1.0) == (1.0, 3.5)


def test_the_device_waits_for_what_is_left_of_the_latest_copy() -> None:
    queue = LinkQueue(GRAPH)
    queue.offload(FIRST, 0.0)
    assert queue.stall(FIRST, 1.0) == pytest.approx(0.5)
    assert queue.stall(FIRST, 2.0) == 0.0
    queue.fetch(FIRST, 2.0)
    assert queue.stall(FIRST, 2.0) == pytest.approx(2.5)


@pytest.mark.parametrize(("overlaps", "waits"), [(True, 0.0), (False, 1.5)])
def test_a_link_that_does_not_overlap_is_waited_for_at_once(overlaps: bool, waits: float) -> None:
    queue = LinkQueue(replace(GRAPH, link=replace(LINK, overlaps=overlaps)))
    queue.offload(FIRST, 0.0)
    assert queue.stall_at_once(FIRST, 0.0) == pytest.approx(waits)


@given(st.lists(st.tuples(st.sampled_from([FIRST, SECOND]), st.floats(0.0, 3.0)), max_size=12))
def test_a_direction_carries_one_copy_at_a_time_and_is_idle_only_when_nothing_waits(
    asked: list[tuple[int, float]],
) -> None:
    queue, now, until = LinkQueue(GRAPH), 0.0, 0.0
    for storage, later in asked:
        now += later
        start, end = queue.offload(storage, now)
        assert start == max(now, until)
        assert end - start == pytest.approx(1.5)
        until = end


def test_a_step_without_a_link_says_what_to_give() -> None:
    with raising(PlanError, "hardware=", "offload_to="):
        LinkQueue(plain_chain(2))
