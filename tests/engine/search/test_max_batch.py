"""The largest batch that fits, held against trying every one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal import planners
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.engine.search.max_batch import MAX_IMAGES, largest_batch, largest_batches, table
from shoal.errors import BudgetError, CaptureError, InputError
from shoal.planners.keep_all import keep_all
from shoal.planners.papers.sqrt import sqrt
from tests.random_steps import HARDWARE, conv_bn_relu_chain, steps


class Steps:
    """A step by batch: all but parameters and their gradients grow with the images."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.asked: list[int] = []

    def __call__(self, batch: int) -> StepGraph:
        self.asked.append(batch)
        storages = (
            s if s.kind in ("parameter", "gradient") else replace(s, nbytes=batch * s.nbytes)
            for s in self.graph.storages
        )
        ops = (replace(op, seconds=batch * op.seconds) for op in self.graph.ops)
        return replace(self.graph, storages=tuple(storages), ops=tuple(ops), link=HARDWARE.link)


def peak_bytes(steps: Steps, batch: int) -> int:
    return keep_all(steps(batch), HARDWARE, 0).predicted_peak_bytes


@given(steps(), st.integers(0, 190), st.integers(1, 300), st.integers(0, 10))
def test_up_to_200_images_the_next_one_does_not_fit(graph: StepGraph, batch: int, first: int, spare: int) -> None:
    steps = Steps(graph)
    budget = max(1, min(peak_bytes(steps, batch) + spare, peak_bytes(steps, batch + 1) - 1))
    answer = largest_batch(steps, HARDWARE, budget, "keep_all", first=first)
    assert answer.batch == batch
    assert answer.too_many == batch + 1
    if answer.plan is None:
        assert batch == 0 and answer.reason.startswith("no plan of test fits")
    else:
        assert answer.plan == keep_all(steps(batch), HARDWARE, budget)
        assert answer.images_per_second == pytest.approx(batch / answer.plan.predicted_seconds)


@given(steps(), st.integers(200, 20_000), st.integers(1, 300))
def test_above_200_images_one_per_cent_more_does_not_fit(graph: StepGraph, batch: int, first: int) -> None:
    steps = Steps(graph)
    answer = largest_batch(steps, HARDWARE, peak_bytes(steps, batch), "keep_all", first=first)
    assert answer.batch <= batch < answer.too_many <= 1.01 * answer.batch


def test_it_takes_few_tries() -> None:
    steps = Steps(conv_bn_relu_chain(4))
    budget = peak_bytes(steps, 5000)
    steps.asked.clear()
    assert largest_batch(steps, HARDWARE, budget, "keep_all", first=64).batch in range(4950, 5001)
    assert len(steps.asked) <= 12  # 64, 128, ... 8192 are eight of them


def test_a_near_answer_takes_two_tries() -> None:
    steps = Steps(conv_bn_relu_chain(4))
    budget = peak_bytes(steps, 150)
    steps.asked.clear()
    assert largest_batch(steps, HARDWARE, budget, "keep_all", first=150, near=True).batch == 150
    assert steps.asked == [150, 151]
    assert largest_batch(steps, HARDWARE, budget, "keep_all", first=20, near=True).batch == 150


def test_it_ends_also_where_the_least_budget_misleads() -> None:
    def misleading(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        try:
            return keep_all(graph, hardware, budget_bytes)
        except BudgetError as error:
            raise BudgetError(str(error), least_feasible_bytes=error.least_feasible_bytes**3) from None

    steps = Steps(conv_bn_relu_chain(4))
    budget = peak_bytes(steps, 150)
    steps.asked.clear()
    assert largest_batch(steps, HARDWARE, budget, misleading, first=1000).batch == 150
    assert len(steps.asked) <= 40


def test_where_every_batch_fits_it_stops_at_the_most() -> None:
    answer = largest_batch(Steps(conv_bn_relu_chain(2)), HARDWARE, 2**60, "keep_all")
    assert (answer.batch, answer.too_many) == (MAX_IMAGES, 0)


def test_a_stronger_planner_has_a_larger_batch() -> None:
    steps = Steps(conv_bn_relu_chain(16))
    budget = peak_bytes(steps, 20)
    keeping, recomputing = largest_batches(steps, HARDWARE, budget, ("keep_all", "sqrt"), first=8)
    assert keeping.batch == 20
    assert recomputing.batch > 20
    assert recomputing.plan is not None and recomputing.plan.predicted_peak_bytes <= budget
    with pytest.raises(BudgetError):
        sqrt(steps(recomputing.batch + 1), HARDWARE, budget)


def test_every_planner_has_its_answer_in_the_order_asked_for() -> None:
    tried: list[tuple[str, int]] = []
    steps = Steps(conv_bn_relu_chain(2))
    answers = largest_batches(
        steps, HARDWARE, peak_bytes(steps, 9), first=4, trying=lambda planner, batch: tried.append((planner, batch))
    )
    assert [answer.planner for answer in answers] == list(planners.NAMES)
    assert {planner for planner, _ in tried} == set(planners.NAMES)
    assert [batch for _, batch in tried] == steps.asked[1:]
    assert all(answer.batch >= 9 for answer in answers if answer.planner in ("joint", "chain", "sqrt", "keep_all"))


def test_a_planner_that_is_not_for_the_step_says_why() -> None:
    def refuses(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        raise InputError("there is no link")

    answer = largest_batch(Steps(conv_bn_relu_chain(2)), HARDWARE, 1000, refuses)
    assert (answer.planner, answer.batch, answer.plan, answer.reason) == ("refuses", 0, None, "there is no link")
    assert answer.to_json()["predicted_peak_bytes"] is None


def test_a_batch_too_small_for_the_network_ends_the_search() -> None:
    steps = Steps(conv_bn_relu_chain(2))

    def step_of(batch: int) -> StepGraph:
        if batch < 2:
            raise CaptureError("batch norm takes more than one value")
        return steps(batch)

    answer = largest_batch(step_of, HARDWARE, peak_bytes(steps, 1), "keep_all", first=8)
    assert answer.batch == 0
    assert answer.reason.startswith("no plan of conv_bn_relu_chain_2 fits")
    assert largest_batch(step_of, HARDWARE, peak_bytes(steps, 1), "keep_all", first=1).reason.startswith("batch norm")


@pytest.mark.parametrize("wrong", [{"first": 0}, {"max_images": 0}, {"budget_bytes": 0}, {"planner": "keepall"}])
def test_wrong_arguments_are_refused(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {"budget_bytes": 100, "planner": "keep_all", **wrong}
    with pytest.raises(InputError, match=str(next(iter(wrong)))):
        largest_batch(Steps(conv_bn_relu_chain(2)), HARDWARE, **arguments)  # type: ignore[arg-type]


def test_the_table_has_a_row_for_each_planner() -> None:
    steps = Steps(conv_bn_relu_chain(4))
    fitting = largest_batch(steps, HARDWARE, peak_bytes(steps, 7), "keep_all")
    none = largest_batch(steps, HARDWARE, 10, "sqrt")
    console = Console(width=200)
    with console.capture() as printed:
        console.print(table([fitting, none]))
    rows = {line.split("│")[1].strip(): line for line in printed.get().splitlines() if line.startswith("│")}
    assert "7" in rows["keep_all"] and "8 does not fit" in rows["keep_all"]
    assert f"{fitting.images_per_second:.1f}" in rows["keep_all"]
    assert "none" in rows["sqrt"] and "no plan of" in rows["sqrt"]
