"""A step in another order of its ops: what it keeps, and what `check_order` refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.files import write_json
from shoal.core.order import in_order_of, op_names, reordered
from shoal.core.plan import Plan
from shoal.core.records import read_json
from shoal.core.step import Op, StepGraph
from shoal.core.validate_plan import check_order, check_step
from shoal.errors import PlanError
from tests.random_steps import Builder, any_order, inception_like, joined_steps, steps

STEP = inception_like()
NAMES = op_names(STEP)


def swapped(names: tuple[str, ...], one: int, other: int) -> tuple[str, ...]:
    """The names with two of them in each other's places."""
    changed = list(names)
    changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)


@given(steps() | joined_steps(), st.integers(0, 999))
def test_ops_move_and_storages_stay(graph: StepGraph, seed: int) -> None:
    ordered = reordered(graph, any_order(graph, seed))
    check_order(graph, ordered)
    check_step(ordered)
    assert ordered.storages == graph.storages and ordered.n_forward == graph.n_forward
    assert reordered(ordered, op_names(graph)) == graph


@given(steps(), st.integers(0, 999))
def test_memory_of_the_loop_keeps_its_place_in_the_order_of_a_plan_without_it(graph: StepGraph, seed: int) -> None:
    outside = Op(0, "held", "held", "forward", "", (), ()), Op(0, "copies", "copies", "backward", "", (), ())
    ops = [replace(op, id=place) for place, op in enumerate([outside[0], *graph.ops, outside[1]])]
    ordered = reordered(graph, any_order(graph, seed))
    found = in_order_of(replace(graph, ops=tuple(ops)), op_names(ordered))
    assert op_names(found) == ("held", *op_names(ordered), "copies")


REFUSED: dict[str, Callable[[], tuple[str, ...]]] = {
    "one is missing": lambda: NAMES[1:],
    "one comes twice": lambda: (*NAMES[:-1], NAMES[0]),
    "one is unknown": lambda: (*NAMES[:-1], "conv_99"),
    "read before written": lambda: swapped(NAMES, 0, 1),
    "passes are mixed": lambda: swapped(NAMES, STEP.n_forward - 1, STEP.n_forward),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_order_that_cannot_run_is_refused_in_one_line(case: str) -> None:
    with pytest.raises(PlanError):
        check_order(STEP, reordered(STEP, REFUSED[case]()))


@pytest.mark.parametrize("what", ["random", "writes nothing", "communicates"])
def test_ops_that_do_more_than_write_keep_their_order(what: str) -> None:
    builder = Builder()
    x = builder.input(4)
    one, other = builder.relu(x), builder.relu(x)
    graph = builder.step(builder.cat([one, other]))
    act = {
        "random": lambda op: replace(op, random=True),
        "writes nothing": lambda op: replace(op, reads=(x,), writes=()),
        "communicates": lambda op: replace(op, target="_c10d_functional.all_reduce.default"),
    }[what]
    names = swapped(op_names(graph), 0, 1)
    check_order(graph, reordered(graph, names))
    later = [replace(op, reads=tuple(s for s in op.reads if s not in (one, other))) for op in graph.ops[2:]]
    graph = replace(graph, ops=(act(graph.ops[0]), act(graph.ops[1]), *later))
    with pytest.raises(PlanError):
        check_order(graph, reordered(graph, names))


def test_what_stands_for_things_outside_and_the_last_forward_op_stay_where_they_are() -> None:
    builder = Builder()
    x = builder.input(4)
    one, other = builder.relu(x), builder.relu(x)
    graph = builder.step(builder.cat([one, other]))
    outside = replace(graph, ops=(replace(graph.ops[0], target=graph.ops[0].name), *graph.ops[1:]))
    with pytest.raises(PlanError):
        check_order(outside, reordered(outside, swapped(op_names(graph), 0, 1)))
    no_join = replace(graph, ops=(*graph.ops[:2], *(replace(op, id=op.id - 1, reads=()) for op in graph.ops[3:])))
    with pytest.raises(PlanError):
        check_order(no_join, reordered(no_join, swapped(op_names(no_join), 0, 1)))


@given(joined_steps(), st.integers(0, 999))
def test_no_op_of_a_joined_step_crosses_eager_code_or_the_end_of_a_pass(graph: StepGraph, seed: int) -> None:
    names = op_names(reordered(graph, any_order(graph, seed)))
    outside = [op.id for op in graph.ops if op.is_outside]
    assert [names[place] for place in outside] == [graph.ops[place].name for place in outside]
    one = random.Random(seed).choice([op for op in graph.ops if not op.is_outside])
    for way in (-1, 1):  # to the other side of the nearest op that is outside
        end = next(place for place in range(one.id, -1 if way < 0 else len(names), way) if graph.ops[place].is_outside)
        moved = [name for name in op_names(graph) if name != one.name]
        moved.insert(end, one.name)
        with pytest.raises(PlanError):
            check_order(graph, reordered(graph, moved))


def test_another_step_is_refused() -> None:
    other = replace(STEP, ops=(replace(STEP.ops[0], seconds=77.0), *STEP.ops[1:]))
    with pytest.raises(PlanError):
        check_order(STEP, other)


def test_a_plan_file_carries_the_order_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    names = any_order(STEP, 3)
    plan = Plan(reordered(STEP, names), {}, "mine", captured_order=NAMES)
    path = plan.save(tmp_path / "plan.json")
    loaded = Plan.load(path)
    assert op_names(loaded.graph) == names != NAMES and loaded.captured_graph == STEP
    assert loaded.plain_peak_bytes == Plan(STEP, {}, "mine").predicted_peak_bytes
    assert "run earlier or later than captured" in loaded.explain()
    for bad in (NAMES[1:], swapped(NAMES, 0, 1)):
        write_json(path, {**read_json(path), "captured_order": list(bad)})
        with pytest.raises(PlanError):
            Plan.load(path)
