"""The independent check agrees with the simulator, and no damaged sequence of runs gets past it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given, note
from hypothesis import strategies as st

from shoal.core.residence import Offload, Residence
from shoal.core.schedule import Run, schedule
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import PlanError
from shoal.planners.just_in_time import just_in_time
from tests.random_steps import SLOW_LINK, Builder, conv_bn_relu_chain, offloads, steps


@st.composite
def planned_steps(draw: st.DrawFn) -> tuple[StepGraph, dict[str, Residence]]:
    """A random step with random storages kept and some computed again more than once."""
    graph = draw(steps())
    forward = [s.id for s in graph.storages if s.kind == "activation"]
    backward = [op.id for op in graph.ops[graph.n_forward :]]
    kept = draw(st.sets(st.sampled_from(forward))) if forward else set()
    again = {}
    if forward and backward:
        twice = draw(st.sets(st.sampled_from(forward), max_size=3))
        again = {s: draw(st.sets(st.sampled_from(backward), max_size=3)) for s in twice}
    residences = just_in_time(graph, kept, again)
    try:
        schedule(graph, residences)
    except PlanError:  # the extra recomputation reads what is gone
        assume(False)
    return graph, residences


@st.composite
def steps_with_offloads(draw: st.DrawFn) -> tuple[StepGraph, dict[str, Residence]]:
    """A random step with storages kept, recomputed and offloaded at random."""
    graph = replace(draw(steps()), link=SLOW_LINK)
    residences = draw(offloads(graph))
    assume(any(isinstance(residence, Offload) for residence in residences.values()))
    return graph, residences


@given(planned_steps() | steps_with_offloads())
def test_its_peak_is_the_simulated_peak(planned: tuple[StepGraph, dict[str, Residence]]) -> None:
    graph, residences = planned
    assert check_runs(graph, residences, schedule(graph, residences)) == simulate(graph, residences).peak_bytes


@given(planned_steps())
def test_the_budget_is_held_to_the_byte(planned: tuple[StepGraph, dict[str, Residence]]) -> None:
    graph, residences = planned
    runs = schedule(graph, residences)
    peak = check_runs(graph, residences, runs)
    assert check_runs(graph, residences, runs, budget_bytes=peak) == peak
    if peak > 1:
        with pytest.raises(PlanError):
            check_runs(graph, residences, runs, budget_bytes=peak - 1)


@given(planned_steps() | steps_with_offloads(), st.data())
def test_a_damaged_sequence_is_rejected(planned: tuple[StepGraph, dict[str, Residence]], data: st.DataObject) -> None:
    graph, residences = planned
    what, damaged = data.draw(st.sampled_from(list(damages(list(schedule(graph, residences))))))
    note(what)
    with pytest.raises(PlanError):
        check_runs(graph, residences, damaged)


def damages(runs: list[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Every way to break a sequence of runs at one place."""
    for i, run in enumerate(runs):
        before, after = runs[:i], runs[i + 1 :]
        yield f"run {i} left out", before + after
        yield f"run {i} doubled", [*before, run, run, *after]
        if after and not run.again and not after[0].again:
            yield f"run {i + 1} and its reads come too early", [*before, after[0], run, *after[1:]]
        for storage in run.writes:
            fewer = tuple(s for s in run.writes if s != storage)
            yield f"run {i} does not write {storage}", [*before, run._replace(writes=fewer), *after]
        for storage in run.frees:
            taken = -1 if run.takes_over == storage else run.takes_over
            kept = run._replace(frees=tuple(s for s in run.frees if s != storage), takes_over=taken)
            yield f"run {i} does not free {storage}", [*before, kept, *after]
            if taken != run.takes_over:
                alive = kept._replace(takes_over=run.takes_over)
                yield f"run {i} takes over {storage}, which lives on", [*before, alive, *after]
            for j, other in enumerate(runs):
                if j != i:
                    moved = list(runs)
                    moved[i], moved[j] = kept, other._replace(frees=(*other.frees, storage))
                    yield f"{storage} dies at run {j}, not at {i}", moved
            for j in range(i, len(runs)):
                if j > i and storage in runs[j].writes:
                    break
                twice = list(runs)
                twice[j] = runs[j]._replace(frees=(*runs[j].frees, storage))
                yield f"{storage} dies again at run {j}", twice


@given(steps_with_offloads(), st.data())
def test_a_transfer_at_a_wrong_place_is_rejected(
    planned: tuple[StepGraph, dict[str, Residence]], data: st.DataObject
) -> None:
    graph, residences = planned
    what, damaged = data.draw(st.sampled_from(list(misplaced_transfers(list(schedule(graph, residences))))))
    note(what)
    with pytest.raises(PlanError):
        check_runs(graph, residences, damaged)


def misplaced_transfers(runs: list[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Every way to leave out, double or move one copy, wait or release."""
    for kind in ("fetches", "awaits", "offloads", "releases"):
        for i, run in enumerate(runs):
            for storage in getattr(run, kind):
                less = list(runs)
                less[i] = run._replace(**{kind: tuple(s for s in getattr(run, kind) if s != storage)})
                yield f"{kind} of {storage} at run {i} left out", less
                for j, other in enumerate(runs):
                    moved = list(runs) if j == i else list(less)
                    moved[j] = other._replace(**{kind: (*getattr(other, kind), storage)})
                    yield f"{kind} of {storage} at run {j}, {'again' if j == i else f'not at {i}'}", moved


def test_a_block_of_another_size_is_not_taken_over() -> None:
    b = Builder()
    x = b.conv(b.input(8), 16)
    y = b.forward("shrink", (x,), [("out", 4)], 1.0, overwrites=x)[0]
    graph = b.step(b.conv(y, 4))
    runs = list(schedule(graph, {}))
    runs[1] = runs[1]._replace(frees=(x,), takes_over=x)
    with pytest.raises(PlanError):
        check_runs(graph, {}, runs)


def test_a_recomputation_must_be_asked_for() -> None:
    graph = conv_bn_relu_chain(2)
    recomputed = just_in_time(graph, ())
    with pytest.raises(PlanError):
        check_runs(graph, {}, schedule(graph, recomputed))


@pytest.mark.parametrize("residences", [{}, "recompute"])
def test_the_highest_bytes_are_those_counted_by_hand(residences: Mapping[str, Residence] | str) -> None:
    # batch 10, weights 1 each; conv 20 -> conv 30 -> conv 5 (handed out), tangent 5
    b = Builder()
    x = b.conv(b.input(10), 20, weight_bytes=1)
    x = b.conv(x, 30, weight_bytes=1)
    graph = b.step(b.conv(x, 5, weight_bytes=1))
    plan = just_in_time(graph, ()) if residences == "recompute" else {}
    # Plain: the backward pass of the third conv: 13 resident + 20 + 30 + 5 + 5 + its gradients 30 + 1.
    # Recomputed: the first comes back on the way to the second and is still needed, so the peak is the same.
    assert check_runs(graph, plan, schedule(graph, plan)) == 104
