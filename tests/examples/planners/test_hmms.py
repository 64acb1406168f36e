"""The steps of the HMMS paper, one by one: what can leave, how much of it, when offloads end and prefetches start."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.planners.hmms import (
    hmms,
    offload_ends,
    offload_plan,
    offloadable,
    prefetch_starts,
    theoretical_limit,
    within_limit,
)
from shoal.core.hardware import Link
from shoal.core.residence import Keep, Offload
from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import BudgetError, InputError
from shoal.planners.keep_all import keep_all
from shoal.planners.transfer_places import last_forward_reader
from tests.raising import raising
from tests.random_steps import HARDWARE, SLOW_LINK, Builder, conv_bn_relu_chain, plain_chain, steps


def link_of(to_host: float, to_device: float = 1e12, host_bytes: int = 0) -> Link:
    return Link("link", to_host, to_device, 0.0, host_bytes)


def names(graph: StepGraph, storages: object) -> list[str]:
    return [graph.storages[s].name for s in storages]  # type: ignore[attr-defined]


def by_name(graph: StepGraph, places: dict[int, int]) -> dict[str, str]:
    return {graph.storages[s].name: graph.ops[op].name for s, op in places.items()}


slow_links = st.builds(
    replace,
    st.just(SLOW_LINK),
    to_host_bytes_per_second=st.floats(0.5, 200.0),
    to_device_bytes_per_second=st.floats(0.5, 200.0),
    host_bytes=st.sampled_from([0, 1, 4096, 3 * 4096]),
)


def test_forward_results_that_the_backward_pass_reads_can_leave_but_not_what_the_caller_holds() -> None:
    b = Builder()
    x = b.conv_bn_relu(b.input(10), 20)
    graph = b.step(b.relu(b.conv(x, 5)))
    # The batch norm's result is overwritten by the ReLU and read by no backward op; the last ReLU's is handed out.
    assert names(graph, offloadable(graph)) == ["conv_0.out", "bn_1.mean", "bn_1.invstd", "relu_2.out"]


def test_the_limit_is_what_the_link_carries_in_the_forward_pass_over_what_that_generates() -> None:
    graph = plain_chain(4, nbytes=1000, seconds=1.0)  # three of the four results are saved: 3000 bytes in 4 seconds
    assert theoretical_limit(graph, link_of(300.0)) == pytest.approx(4 * 300 / 3000)
    assert theoretical_limit(graph, link_of(750.0)) == pytest.approx(1.0)
    assert theoretical_limit(graph, link_of(10_000.0)) == 1.0


def test_a_step_that_saves_nothing_can_offload_all_of_it() -> None:
    graph = plain_chain(1)
    assert offloadable(graph) == ()
    assert theoretical_limit(graph, link_of(1.0)) == 1.0


@given(steps(), slow_links)
def test_what_leaves_is_within_the_limit_after_every_op_and_within_the_host(graph: StepGraph, link: Link) -> None:
    limit = theoretical_limit(graph, link)
    leaving = within_limit(graph, link)
    seen_bytes = offloaded_bytes = 0
    for storage in offloadable(graph):
        seen_bytes += graph.storages[storage].nbytes
        offloaded_bytes += graph.storages[storage].nbytes if storage in leaving else 0
        assert offloaded_bytes <= limit * seen_bytes
    assert not link.host_bytes or sum(graph.storages[s].host_bytes for s in leaving) <= link.host_bytes
    if limit == 1.0 and not link.host_bytes:
        assert leaving == offloadable(graph)


def test_half_the_limit_offloads_every_other_of_equal_storages() -> None:
    graph = plain_chain(7, nbytes=1000, seconds=1.0)  # six saved in seven seconds
    leaving = within_limit(graph, link_of(6000 / 7 / 2))
    assert names(graph, leaving) == ["conv_1.out", "conv_3.out", "conv_5.out"]


def test_an_offload_ends_at_the_first_op_after_which_the_balance_is_not_negative() -> None:
    graph = plain_chain(5, nbytes=1000, seconds=1.0)
    # Balance after conv_1 -1000 + 500, after conv_2 0: conv_0.out ends there; what was written meanwhile counts too.
    ends = offload_ends(graph, link_of(500.0), [offloadable(graph)[0]])
    assert by_name(graph, ends) == {"conv_0.out": "conv_2"}
    ends = offload_ends(graph, link_of(1000.0), offloadable(graph))
    assert by_name(graph, ends) == {f"conv_{i}.out": f"conv_{i + 1}" for i in range(4)}


def test_offloads_that_are_in_debt_together_end_together() -> None:
    b = Builder()
    x = b.conv(b.input(10), 1500, seconds=1.0)
    x = b.conv(x, 100, seconds=1.0)  # -1500 + 1000 - 100
    x = b.conv(x, 700, seconds=1.0)  # -600 + 1000: both are over; -700 again
    graph = b.step(b.conv(b.conv(x, 10, seconds=1.0), 1, seconds=1.0))
    ends = offload_ends(graph, link_of(1000.0), offloadable(graph))
    assert by_name(graph, ends) == {
        "conv_0.out": "conv_2",
        "conv_1.out": "conv_2",
        "conv_2.out": "conv_3",
        "conv_3.out": "conv_4",
    }


def test_what_the_link_could_have_carried_while_nothing_waited_is_not_saved_up() -> None:
    b = Builder()
    x = b.conv(b.input(10), 1000, seconds=50.0)
    graph = b.step(b.conv(b.conv(b.conv(x, 10, seconds=1.0), 10, seconds=1.0), 1, seconds=1.0))
    ends = offload_ends(graph, link_of(500.0), [offloadable(graph)[0]])
    assert by_name(graph, ends) == {"conv_0.out": "conv_2"}


def test_the_last_op_ends_what_is_still_in_debt() -> None:
    graph = plain_chain(4, nbytes=1000, seconds=1.0)
    assert set(offload_ends(graph, link_of(1.0), offloadable(graph)).values()) == {graph.n_forward - 1}


def test_an_offload_does_not_end_before_the_last_forward_reader() -> None:
    b = Builder()
    x = b.conv(b.input(10), 1000, seconds=1.0)
    y = b.conv(b.conv(x, 1000, seconds=1.0), 1000, seconds=1.0)
    graph = b.step(b.conv(b.cat([x, y]), 1, seconds=1.0))
    assert offload_ends(graph, link_of(1e9), [x]) == {x: 3}


def test_the_prefetch_is_the_mirror_image() -> None:
    graph = plain_chain(5, nbytes=1000, seconds=1.0)  # backward: conv_backward_6 of conv_4, ..., conv_backward_10
    # conv_0.out is read by conv_backward_9; two ops of two seconds before it carry 1000 bytes at 250 bytes a second.
    starts = prefetch_starts(graph, link_of(1.0, 250.0), [offloadable(graph)[0]])
    assert by_name(graph, starts) == {"conv_0.out": "conv_backward_7"}
    starts = prefetch_starts(graph, link_of(1.0, 500.0), offloadable(graph))
    assert by_name(graph, starts) == {
        "conv_0.out": "conv_backward_8",
        "conv_1.out": "conv_backward_7",
        "conv_2.out": "conv_backward_6",
        "conv_3.out": "conv_backward_6",  # the first op reads it: no op before it hides the copy
    }


@given(st.integers(3, 9), st.floats(50.0, 3000.0), st.sets(st.integers(0, 8)))
def test_on_a_chain_that_is_its_own_mirror_image_so_are_the_places(n: int, rate: float, chosen: set[int]) -> None:
    graph = plain_chain(n, nbytes=1000, seconds=1.0)
    # Backward op k steps from the end reads what forward op k wrote, one op later than it would be read first mirrored.
    link = link_of(rate, rate / 2)
    leaving = [s for i, s in enumerate(offloadable(graph)) if i in chosen]
    ends, starts = offload_ends(graph, link, leaving), prefetch_starts(graph, link, leaving)
    last = len(graph.ops) - 1
    for storage in leaving:
        written, first_read = graph.producer[storage], last - graph.readers[storage][-1]
        assert first_read == written + 1
        at_the_end = starts[storage] == graph.n_forward + 1 or ends[storage] == graph.n_forward - 1
        assert at_the_end or last - starts[storage] == ends[storage] + 1


def test_where_every_copy_fits_beside_the_next_op_the_device_never_waits_but_for_the_first_read_of_all() -> None:
    graph = replace(plain_chain(6, nbytes=1000, seconds=1.0), link=link_of(1000.0, 500.0))
    plan = hmms(graph, HARDWARE, 0)
    assert len(plan.offloaded) == 5
    stalls = [moment.op for moment in plan.timeline.moments if moment.phase == "stall"]
    assert stalls == ["conv_4.out"]
    assert plan.added_seconds == pytest.approx(2.0)


@given(steps())
def test_a_link_that_takes_no_time_costs_no_time(graph: StepGraph) -> None:
    graph = replace(graph, link=link_of(1e12))
    plan = hmms(graph, HARDWARE, 0)
    assert {s.id for s in plan.offloaded} == set(offloadable(graph))
    assert plan.added_seconds == pytest.approx(0.0, abs=1e-6)


@given(steps(), slow_links)
def test_its_plan_is_legal_and_holds_no_more_than_the_host_has(graph: StepGraph, link: Link) -> None:
    graph = replace(graph, link=link)
    plan = hmms(graph, HARDWARE, 0)
    assert check_runs(graph, plan.residences, schedule(graph, plan.residences)) == plan.predicted_peak_bytes
    assert not plan.recomputed
    assert not link.host_bytes or plan.host_bytes <= link.host_bytes
    for storage in plan.offloaded:
        residence = plan.residences[storage.name]
        assert isinstance(residence, Offload)
        end = next(op.id for op in graph.ops if op.name == residence.free_after)
        assert end >= last_forward_reader(graph, storage.id)


def test_the_budget_decides_only_whether_there_is_a_plan() -> None:
    graph = replace(conv_bn_relu_chain(6), link=link_of(2000.0, 2000.0))
    free = hmms(graph, HARDWARE, 0)
    assert free.predicted_peak_bytes < keep_all(graph, HARDWARE, 0).predicted_peak_bytes
    assert hmms(graph, HARDWARE, free.predicted_peak_bytes).residences == free.residences
    with pytest.raises(BudgetError) as refused:
        hmms(graph, HARDWARE, free.predicted_peak_bytes - 1)
    assert refused.value.least_feasible_bytes == free.predicted_peak_bytes


def test_a_step_without_a_link_is_the_callers_mistake() -> None:
    with raising(InputError, "planner='hmms'"):
        hmms(plain_chain(3), HARDWARE, 0)


def test_residences_name_the_ops_and_keep_the_rest() -> None:
    graph = plain_chain(4)
    plan = offload_plan(graph, {offloadable(graph)[0]: 2}, {offloadable(graph)[0]: 6})
    assert plan == {"conv_0.out": Offload("conv_2", "conv_backward_6"), "conv_1.out": Keep(), "conv_2.out": Keep()}
