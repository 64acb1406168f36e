"""What a change of a few residences does, against scheduling and simulating the whole step again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.residence import Offload, Recompute, Residence
from shoal.core.schedule import schedule
from shoal.core.simulate import bytes_and_seconds
from shoal.core.step import StepGraph
from shoal.errors import PlanError
from shoal.planners.changed_runs import PlannedRuns
from shoal.planners.just_in_time import just_in_time
from tests.random_steps import SLOW_LINK, launches, plain_chain, steps

Outcome = tuple[list[int], float] | None


def scheduled(graph: StepGraph, residences: Mapping[str, Residence]) -> Outcome:
    """The bytes during each run and the seconds of all, by the long way; None of what is no plan."""
    try:
        return bytes_and_seconds(graph, schedule(graph, residences))
    except PlanError:
        return None


def changed(planned: PlannedRuns, changes: Mapping[str, Recompute]) -> Outcome:
    try:
        total_bytes, seconds = planned.after(changes)
    except PlanError:
        return None
    return total_bytes.tolist(), seconds


@given(steps() | steps().flatmap(launches), st.data())
def test_a_change_counts_as_the_whole_step_scheduled_again(graph: StepGraph, data: st.DataObject) -> None:
    ids = st.sets(st.sampled_from([s.id for s in graph.storages]))
    residences: Mapping[str, Residence] = just_in_time(graph, data.draw(ids))
    later = [op.name for op in graph.ops[graph.n_forward :]]
    places = st.sets(st.sampled_from(later or [""]), max_size=3).map(
        lambda names: Recompute(tuple(name for name in later if name in names))
    )
    storages = [s.name for s in graph.storages]
    for _ in range(3):  # changes of changes
        before = scheduled(graph, residences)
        if before is None:
            return
        planned = PlannedRuns(graph, residences, schedule(graph, residences))
        assert changed(planned, {}) == before
        changes = data.draw(st.dictionaries(st.sampled_from(storages), places, max_size=4))
        residences = {**residences, **changes}
        assert changed(planned, changes) == scheduled(graph, residences)


@given(steps(), st.data())
def test_what_is_recomputed_earlier_counts_as_the_whole_step_scheduled_again(
    graph: StepGraph, data: st.DataObject
) -> None:
    residences = just_in_time(graph, ())
    planned = PlannedRuns(graph, residences, schedule(graph, residences))
    later = [op.name for op in graph.ops[graph.n_forward :]]
    served, earlier = (data.draw(st.sampled_from(later or [""])) for _ in range(2))
    changes = {}
    for name, residence in residences.items():
        if isinstance(residence, Recompute) and served in residence.before:
            names = {*residence.before, earlier} - {served}
            changes[name] = Recompute(tuple(one for one in later if one in names))
    assert changed(planned, changes) == scheduled(graph, {**residences, **changes})


def test_a_recomputed_storage_is_back_from_its_recomputation_to_its_last_reader() -> None:
    graph = plain_chain(4)
    first = graph.ops[0].writes[0]
    backward = [op.id for op in graph.ops if op.phase == "backward"]
    residences = {graph.storages[first].name: Recompute((graph.ops[backward[0]].name,))}
    planned = PlannedRuns(graph, residences, schedule(graph, residences))
    reader = max(graph.readers[first])
    assert [planned.is_back(first, op) for op in backward] == [backward[0] < op <= reader for op in backward]


def test_what_cannot_run_twice_stays() -> None:
    graph = plain_chain(3)
    planned = PlannedRuns(graph, {}, schedule(graph, {}))
    gradient = next(s.name for s in graph.storages if s.kind not in ("activation", "parameter", "input"))
    with pytest.raises(PlanError):
        planned.after({gradient: Recompute((graph.ops[-1].name,))})


def test_a_plan_that_offloads_is_refused() -> None:
    graph = replace(plain_chain(3), link=SLOW_LINK)
    forward, backward = graph.ops[1], next(op for op in graph.ops if op.phase == "backward")
    residences = {graph.storages[graph.ops[0].writes[0]].name: Offload(forward.name, backward.name)}
    with pytest.raises(PlanError):
        PlannedRuns(graph, residences, schedule(graph, residences))
