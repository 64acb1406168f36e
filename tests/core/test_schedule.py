"""From residences to runs: what runs when, and when each storage dies."""

from __future__ import annotations

import pytest
from hypothesis import given

from shoal.core.residence import Keep, Offload, Recompute
from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.errors import PlanError
from shoal.planners.just_in_time import just_in_time
from tests.raising import raising
from tests.random_steps import Builder, plain_chain, steps


def _story(graph: StepGraph, residences: dict[str, Keep | Recompute]) -> list[str]:
    """The runs as text: the op, whether it runs again, what dies after it."""
    found = []
    for run in schedule(graph, residences):
        dead = ",".join(graph.storages[s].name for s in run.frees)
        found.append(f"{graph.ops[run.op].name}{' again' if run.again else ''}{' -' + dead if dead else ''}")
    return found


def test_without_residences_every_storage_lives_until_its_last_reader() -> None:
    assert _story(plain_chain(3), {}) == [
        "conv_0",
        "conv_1",
        "conv_2",
        "loss_3",
        "conv_backward_4 -conv_1.out",
        "conv_backward_5 -conv_backward_4.grad4,conv_0.out",
        "conv_backward_6 -conv_backward_5.grad2",
    ]


def test_a_recomputed_storage_dies_in_the_forward_pass_and_comes_back_before_the_op_it_names() -> None:
    residences = {"conv_1.out": Recompute(("conv_backward_4",))}
    assert _story(plain_chain(3), residences) == [
        "conv_0",
        "conv_1",
        "conv_2 -conv_1.out",
        "loss_3",
        "conv_1 again",
        "conv_backward_4 -conv_1.out",
        "conv_backward_5 -conv_backward_4.grad4,conv_0.out",
        "conv_backward_6 -conv_backward_5.grad2",
    ]


def test_naming_a_second_op_frees_the_storage_in_between() -> None:
    residences = {
        "conv_0.out": Recompute(("conv_backward_4", "conv_backward_5")),
        "conv_1.out": Recompute(("conv_backward_4",)),
    }
    assert _story(plain_chain(3), residences)[4:] == [
        "conv_0 again",
        "conv_1 again -conv_0.out",
        "conv_backward_4 -conv_1.out",
        "conv_0 again",
        "conv_backward_5 -conv_backward_4.grad4,conv_0.out",
        "conv_backward_6 -conv_backward_5.grad2",
    ]


def test_an_op_takes_over_the_block_of_an_input_that_dies_in_it() -> None:
    b = Builder()
    x = b.batchnorm(b.conv(b.input(4), 4))
    y = b.relu(x)
    graph = b.step(b.conv(y, 4))
    (relu,) = [run for run in schedule(graph, {}) if graph.ops[run.op].target == "relu"]
    assert relu.takes_over == x


def test_an_input_that_is_read_later_is_not_taken_over() -> None:
    b = Builder()
    x = b.batchnorm(b.conv(b.input(4), 4))
    y = b.relu(x)
    graph = b.step(b.conv(b.add(y, x), 4))
    (relu,) = [run for run in schedule(graph, {}) if graph.ops[run.op].target == "relu"]
    assert relu.takes_over == -1


@given(steps())
def test_every_first_run_is_there_once_and_in_order(graph: StepGraph) -> None:
    runs = schedule(graph, just_in_time(graph, ()))
    assert [run.op for run in runs if not run.again] == list(range(len(graph.ops)))
    assert all(graph.ops[run.op].phase == "forward" for run in runs if run.again)


@given(steps())
def test_all_that_is_written_dies_or_must_stay(graph: StepGraph) -> None:
    runs = schedule(graph, just_in_time(graph, ()))
    written = sum(len(run.writes) for run in runs if run.writes)
    freed = sum(len(run.frees) for run in runs)
    staying = sum(s in graph.producer for s in graph.never_freed)
    assert written == freed + staying


@pytest.mark.parametrize(
    "residences",
    [
        {"nothing": Recompute()},
        {"batch": Recompute(("conv_backward_4",))},
        {"conv_2.out": Recompute(("conv_backward_4",))},
        {"conv_backward_4.grad4": Recompute(("conv_backward_5",))},
        {"conv_1.out": Recompute(("conv_2",))},
        {"conv_1.out": Recompute()},
        {"conv_1.out": Recompute(("conv_backward_5",))},
        {"conv_0.out": Recompute(), "conv_1.out": Recompute(("conv_backward_4",))},
    ],
)
def test_residences_that_do_not_fit_the_step_are_refused(residences: dict[str, Recompute]) -> None:
    with pytest.raises(PlanError):
        schedule(plain_chain(3), residences)


def test_what_must_not_run_twice_is_not_recomputed() -> None:
    b = Builder()
    x = b.dropout(b.conv(b.input(4), 4), recomputable=False)
    graph = b.step(b.conv(x, 4))
    (reader,) = [op.name for op in graph.ops if op.target == "dropout_backward"]
    with pytest.raises(PlanError):
        schedule(graph, {"dropout_1.mask": Recompute((reader,))})


def _transfers(graph: StepGraph, residences: dict[str, Keep | Recompute | Offload]) -> list[str]:
    """Every transfer as text: what happens to which storage around which run."""
    return [
        f"{kind} {graph.storages[storage].name} at {graph.ops[run.op].name}{' again' if run.again else ''}"
        for run in schedule(graph, residences)
        for kind in ("fetches", "awaits", "offloads", "releases")
        for storage in getattr(run, kind)
    ]


def test_an_offloaded_storage_leaves_when_it_is_written_and_is_back_before_its_first_reader() -> None:
    residences = {"conv_0.out": Offload("conv_2", "conv_backward_4")}
    assert _transfers(plain_chain(3), residences) == [
        "offloads conv_0.out at conv_0",
        "releases conv_0.out at conv_2",
        "fetches conv_0.out at conv_backward_4",
        "awaits conv_0.out at conv_backward_5",
    ]
    assert _story(plain_chain(3), residences)[5] == "conv_backward_5 -conv_backward_4.grad4,conv_0.out"


def test_a_recomputation_can_be_the_first_reader_of_what_was_offloaded() -> None:
    residences = {
        "conv_0.out": Offload("conv_1", "conv_backward_4"),
        "conv_1.out": Recompute(("conv_backward_4",)),
    }
    assert _transfers(plain_chain(3), residences)[2:] == [
        "fetches conv_0.out at conv_1 again",
        "awaits conv_0.out at conv_1 again",
    ]


def test_what_is_waited_for_first_is_fetched_first() -> None:
    residences = {name: Offload("conv_3", "conv_backward_5") for name in ("conv_0.out", "conv_1.out", "conv_2.out")}
    runs = schedule(plain_chain(4), residences)
    (fetches,) = [run.fetches for run in runs if run.fetches]
    names = [plain_chain(4).storages[s].name for s in fetches]
    assert names == ["conv_2.out", "conv_1.out", "conv_0.out"]


@pytest.mark.parametrize(
    ("residences", "said"),
    [
        ({"batch": Offload("conv_2", "conv_backward_4")}, ""),
        ({"nothing": Offload("conv_2", "conv_backward_4")}, ""),
        ({"conv_0.out": Offload("conv_9", "conv_backward_4")}, ""),
        ({"conv_0.out": Offload("conv_backward_4", "conv_backward_4")}, ""),
        ({"conv_0.out": Offload("conv_2", "conv_2")}, ""),
        ({"conv_0.out": Offload("conv_0", "conv_backward_4")}, "'conv_1'"),
        ({"conv_0.out": Offload("conv_2", "conv_backward_6")}, "'conv_backward_5'"),
    ],
)
def test_an_offload_that_cannot_be_is_told(residences: dict[str, Offload], said: str) -> None:
    with raising(PlanError, said):
        schedule(plain_chain(3), residences)
