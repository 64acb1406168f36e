"""A step as data: what it derives agrees with its ops one by one, and it survives being written down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.core.records import read_record
from shoal.core.step import RESIDENT, Again, Op, StepGraph
from shoal.errors import InputError
from tests.raising import raising
from tests.random_steps import steps


@st.composite
def steps_that_run_again(draw: st.DrawFn) -> StepGraph:
    """A random step some of whose forward ops have a cheaper second run, and some of whose ops are random."""
    graph = draw(steps())
    ops = []
    for op in graph.ops:
        again = None
        if op.phase == "forward" and draw(st.booleans()):
            kept = draw(st.sets(st.sampled_from(op.reads + op.writes[1:])))
            again = Again(f"{op.target} again", tuple(sorted(kept)), -1, f"{op.signature}'", 3, 4, 0.5, 6)
        ops.append(replace(op, again=again, random=draw(st.booleans())))
    return replace(graph, ops=tuple(ops))


@given(steps_that_run_again())
def test_written_as_json_and_read_back_it_is_the_same(graph: StepGraph) -> None:
    again = read_record(StepGraph, json.loads(json.dumps(graph.to_json())), "step")
    assert again == graph
    assert again.fingerprint == graph.fingerprint


@given(steps())
def test_producers_and_readers_are_those_of_the_ops(graph: StepGraph) -> None:
    for storage in graph.storages:
        writers = [op.id for op in graph.ops if storage.id in op.writes]
        assert writers == ([graph.producer[storage.id]] if storage.id in graph.producer else [])
        assert list(graph.readers[storage.id]) == [op.id for op in graph.ops if storage.id in op.reads]


@given(steps())
def test_saved_storages_cross_from_the_forward_to_the_backward_pass(graph: StepGraph) -> None:
    assert [op.phase for op in graph.ops[: graph.n_forward]] == ["forward"] * graph.n_forward
    written = {s for op in graph.ops[: graph.n_forward] for s in op.writes}
    read = {s for op in graph.ops[graph.n_forward :] if op.phase == "backward" for s in op.reads}
    assert set(graph.saved) == written & read


@given(steps(), st.integers(0, 99))
def test_what_is_resident_is_what_the_step_neither_makes_nor_frees(graph: StepGraph, static_bytes: int) -> None:
    graph = replace(graph, static_bytes=static_bytes)
    given_bytes = sum(s.nbytes for s in graph.storages if s.id not in graph.producer and s.kind != "tangent")
    with_tangents_of_no_op = {s.kind for s in graph.storages if s.id not in graph.producer} - RESIDENT
    assume(not with_tangents_of_no_op)
    assert graph.resident_bytes == given_bytes + static_bytes


@given(steps_that_run_again())
def test_a_second_run_differs_in_what_it_says_and_writes_the_first_storage_alone(graph: StepGraph) -> None:
    for op in graph.ops:
        if op.again is None:
            assert op.second is op
            continue
        second = op.second
        assert (second.id, second.name, second.phase, second.layer) == (op.id, op.name, op.phase, op.layer)
        assert (second.target, second.reads, second.seconds) == (op.again.target, op.again.reads, op.again.seconds)
        assert second.workspace_bytes == op.again.workspace_bytes
        assert second.writes == op.writes[:1]


@given(steps_that_run_again())
def test_what_second_runs_read_of_their_first_or_do_not_make_again_and_what_the_loss_reads_is_never_given_up(
    graph: StepGraph,
) -> None:
    held = {storage for op in graph.ops if op.phase == "loss" for storage in op.reads}
    for op in graph.ops:
        if op.again:
            held |= set(op.writes) & set(op.again.reads)
            held |= set(op.writes) - set(op.second.writes)
    assert graph.never_given_up == held


@given(steps_that_run_again(), st.data())
def test_costs_go_to_every_run_of_their_signature_and_to_no_other(graph: StepGraph, data: st.DataObject) -> None:
    runs = [run for op in graph.ops for run in (op, op.again) if run is not None]
    named = data.draw(st.sets(st.sampled_from([run.signature for run in runs])))
    costed = graph.with_costs(dict.fromkeys(named, 123.0), dict.fromkeys(named, 456))
    changed = [run for op in costed.ops for run in (op, op.again) if run is not None]
    for before, after in zip(runs, changed, strict=True):
        if before.signature in named:
            assert after == replace(before, seconds=123.0, workspace_bytes=456, **_again(after))
        else:
            assert after == replace(before, **_again(after))
    assert costed.fingerprint == graph.fingerprint
    assert (costed.storages, costed.model) == (graph.storages, graph.model)


def _again(run: Op | Again) -> dict[str, Again | None]:
    return {"again": run.again} if isinstance(run, Op) else {}


@given(steps(), st.data())
def test_the_fingerprint_tells_apart_steps_that_need_other_plans_and_no_others(
    graph: StepGraph, data: st.DataObject
) -> None:
    assert replace(graph, model="another", static_bytes=12345).fingerprint == graph.fingerprint
    storage = data.draw(st.sampled_from(graph.storages))
    larger = replace(storage, nbytes=storage.nbytes + 1)
    other = replace(graph, storages=(*graph.storages[: storage.id], larger, *graph.storages[storage.id + 1 :]))
    assert other.fingerprint != graph.fingerprint
    op = data.draw(st.sampled_from(graph.ops))
    for changed in (replace(op, target="other"), replace(op, reads=op.reads[1:]), replace(op, name="other")):
        if changed != op:
            other = replace(graph, ops=(*graph.ops[: op.id], changed, *graph.ops[op.id + 1 :]))
            assert other.fingerprint != graph.fingerprint
    seconds = replace(op, seconds=op.seconds + 1, workspace_bytes=9)
    assert replace(graph, ops=(*graph.ops[: op.id], seconds, *graph.ops[op.id + 1 :])).fingerprint == graph.fingerprint


@pytest.mark.parametrize("missing", ["ops", "storages", "model"])
def test_a_step_that_lacks_something_is_not_read(missing: str) -> None:
    value = StepGraph("m", (), ()).to_json()
    del value[missing]
    with raising(InputError, f"'{missing}'"):
        read_record(StepGraph, value, "step")
