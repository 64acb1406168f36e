"""The promise is measured: what was predicted is what is used, and a broken promise is repaired and told."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.core import validate_plan
from shoal.core.joined_step import Interval
from shoal.core.plan import Plan
from shoal.engine.iteration.metered import Iteration
from shoal.engine.session import Session
from shoal.engine.status import Status
from shoal.errors import BudgetError, PlanError
from shoal.lowlevel import allocations
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import distinct_bytes
from shoal.planners.keep_all import keep_all
from tests.engine.training_laws import beyond_rounding, classifier, images, mean_square, train
from tests.raising import raising
from tests.random_steps import HARDWARE, conv_bn_relu_chain

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="the loss is metered only with a C++ compiler"
)


def large_enough() -> tuple[nn.Module, list[torch.Tensor]]:
    """A network whose activations outweigh all that is small."""
    return classifier(3, 16, 16, 16), images(3, 8, 3, 32, 32)


def peak_of_a_step(model: nn.Module, batch: torch.Tensor) -> int:
    """What one more step uses at its peak by PyTorch's own memory events."""

    def step() -> None:
        mean_square(model(batch)).backward()

    model.zero_grad()
    step()
    model.zero_grad()
    resident_bytes = distinct_bytes([*model.parameters(), *model.buffers(), batch])
    return resident_bytes + allocations.peak_bytes(allocations.record(step)[1])


def momentum_bytes(model: nn.Module) -> int:
    """What the optimizer of `train` holds from its first step on."""
    return distinct_bytes(model.parameters())


@needs_compiler
def test_without_a_budget_the_step_keeps_everything_and_its_peak_is_reported() -> None:
    net, batches = large_enough()
    planned = shoal.compile(copy.deepcopy(net))
    train(planned, batches)
    status = planned.shoal
    assert status.budget_bytes is None and status.repairs == 0
    assert not status.plan.recomputed
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    held_bytes = momentum_bytes(net) + 4 * batches[0].shape[0] * 5  # and the outputs of the step before
    assert status.measured_peak_bytes == pytest.approx(peak_of_a_step(planned, batches[0]) + held_bytes, rel=0.0001)
    assert status.measured_peak_bytes <= peak_of_a_step(net, batches[0]) + held_bytes


@pytest.mark.slow
@needs_compiler
def test_inside_a_budget_the_measured_peak_is_the_predicted_one_and_never_over() -> None:
    net, batches = large_enough()
    budget = int(0.6 * peak_of_a_step(net, batches[0]))
    planned = shoal.compile(copy.deepcopy(net), budget=budget)
    assert not beyond_rounding(train(planned, batches), net, batches)
    status = planned.shoal
    assert status.repairs == 0
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    assert max(status.predicted_peak_bytes, status.measured_peak_bytes) <= status.budget_bytes == budget
    assert peak_of_a_step(planned, batches[0]) <= budget
    assert status.planning_seconds > 0
    assert 0 <= status.lower_bound_seconds <= status.plan.added_seconds + 1e-9


@pytest.mark.slow
@needs_compiler
def test_a_step_that_is_captured_while_a_profiler_runs_is_planned_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))  # no op was timed before
    net, batches = large_enough()
    batches = [batches[0], batches[1][:4], batches[2][:4]]
    budget = int(0.6 * peak_of_a_step(net, batches[0]))
    planned = shoal.compile(copy.deepcopy(net), budget=budget)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        ours = train(planned, batches)
    assert not beyond_rounding(ours, net, batches)
    status = planned.shoal
    assert (status.captures, status.repairs) == (2, 0)
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    assert status.measured_peak_bytes <= budget
    assert "aten::convolution_backward" in {event.key for event in profiler.key_averages()}


@needs_compiler
@pytest.mark.parametrize("planner", ["chain", "examples.planners.sqrt:sqrt"])
def test_so_it_is_with_the_other_planners(planner: str) -> None:
    net, batches = large_enough()
    budget = int(0.8 * peak_of_a_step(net, batches[0]))
    planned = shoal.compile(net, budget=budget, options=shoal.Options(planner=planner))
    train(planned, batches)
    status = planned.shoal
    assert (status.plan.planner, status.repairs) == (planner.rpartition(":")[2], 0)
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    assert status.measured_peak_bytes <= budget


@pytest.mark.slow
@needs_compiler
def test_what_another_thread_trains_meanwhile_does_not_count() -> None:
    net, (batch, *_) = large_enough()
    other = shoal.compile(copy.deepcopy(net))

    def train_another() -> None:
        mean_square(other(batch.repeat(4, 1, 1, 1))).backward()

    def measured_bytes(between: Callable[[], None]) -> int:
        model = shoal.compile(copy.deepcopy(net))
        loss = mean_square(model(batch))
        another.submit(between).result()
        loss.backward()
        return int(model.shoal.measured_peak_bytes or 0)

    with ThreadPoolExecutor(1) as another:
        another.submit(train_another).result()
        assert measured_bytes(train_another) == measured_bytes(lambda: None) > 0


@needs_compiler
def test_what_the_step_does_not_read_counts_too() -> None:
    net, (batch, *_) = large_enough()
    shoal.compile(net)(batch)
    before = net.shoal.predicted_peak_bytes
    net.register_buffer("unread", torch.zeros(1000))
    net.register_parameter("frozen", nn.Parameter(torch.zeros(3000), requires_grad=False))
    shoal.compile(net)(batch)
    assert net.shoal.predicted_peak_bytes - before == 4 * (1000 + 3000)


def test_the_optimizers_state_counts_before_its_first_step() -> None:
    net, (batch, *_) = large_enough()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    peaks = []
    for known in (None, optimizer):
        planned = shoal.compile(net, optimizer=known)
        planned(batch)
        peaks.append(planned.shoal.predicted_peak_bytes)
    assert peaks[1] - peaks[0] == distinct_bytes(net.parameters())


@needs_compiler
def test_steps_are_metered_until_the_optimizer_has_stepped() -> None:
    """As where a GradScaler leaves its first steps out."""
    net, (batch, *_) = large_enough()
    optimizer = torch.optim.AdamW(net.parameters())
    planned = shoal.compile(net, optimizer=optimizer)
    peaks = []
    for step in range(5):
        planned.zero_grad()
        mean_square(planned(batch)).backward()
        peaks.append(planned.shoal.measured_peak_bytes)
        if step == 3:
            optimizer.step()
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    assert peaks[4] - peaks[3] == distinct_bytes(state)
    assert peaks[4] == pytest.approx(planned.shoal.predicted_peak_bytes, rel=0.002)
    assert not planned.shoal.has_new_plans()()


@needs_compiler
def test_accumulated_gradients_count_while_they_are_there() -> None:
    net, batches = large_enough()
    planned = shoal.compile(net)
    mean_square(planned(batches[0])).backward()
    before = planned.shoal.predicted_peak_bytes
    mean_square(planned(batches[1])).backward()
    assert planned.shoal.predicted_peak_bytes - before == distinct_bytes(net.parameters())
    assert planned.shoal.measured_peak_bytes == pytest.approx(planned.shoal.predicted_peak_bytes, rel=0.02)


def test_where_gradients_of_an_earlier_step_fill_the_budget_the_error_says_how_to_drop_them() -> None:
    net, batches = large_enough()
    sized = shoal.compile(copy.deepcopy(net))
    mean_square(sized(batches[0])).backward()
    planned = shoal.compile(net, budget=sized.shoal.predicted_peak_bytes, options=shoal.Options(planner="keep_all"))
    mean_square(planned(batches[0])).backward()
    with raising(BudgetError, "optimizer.zero_grad()") as caught:
        planned(batches[1])
    assert "gradients of an earlier step" in caught.value.details
    assert caught.value.least_feasible_bytes > planned.shoal.budget_bytes
    assert caught.value.op and caught.value.largest
    planned.zero_grad()
    mean_square(planned(batches[1])).backward()


@needs_compiler
def test_a_plan_with_accumulated_gradients_stays_in_force_beside_one_without() -> None:
    net, batches = large_enough()
    mean_square(net(batches[0])).backward()
    planned = shoal.compile(net)
    for batch in batches[:2]:
        mean_square(planned(batch)).backward()
        planned.zero_grad()
    assert planned.shoal.predicted_peak_bytes == pytest.approx(planned.shoal.measured_peak_bytes, rel=0.001)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> int:
    """Plans made while this many bytes of what is in use are overlooked."""
    overlooked = 600_000
    monkeypatch.delenv(validate_plan.SWITCH)  # it would tell that fewer than no bytes stay in use
    truth = StaticMemory.bytes_beside
    monkeypatch.setattr(StaticMemory, "bytes_beside", lambda self, graph: truth(self, graph) - overlooked)
    return overlooked


@pytest.mark.slow
@needs_compiler
def test_a_broken_promise_is_told_and_the_next_step_is_planned_with_what_was_learnt(
    forgetful: int, caplog: pytest.LogCaptureFixture
) -> None:
    net, batches = large_enough()
    budget = int(0.65 * peak_of_a_step(net, batches[0]))
    planned = shoal.compile(copy.deepcopy(net), budget=budget, name="forgetful net")
    with caplog.at_level(logging.WARNING, "shoal"):
        assert not beyond_rounding(train(planned, batches * 2), net, batches * 2)
    status = planned.shoal
    assert status.repairs == 1
    assert len(status.plans) == 1
    assert status.measured_peak_bytes <= budget
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "forgetful net" in told and "is over the budget" in told and "planning again" in told


@needs_compiler
def test_where_nothing_can_be_repaired_the_error_says_what_would_do(forgetful: int) -> None:
    net, (batch, *_) = large_enough()
    with pytest.raises(BudgetError) as caught:
        shoal.compile(copy.deepcopy(net), budget="100KiB", allow="bitwise")(batch)
    hoped = caught.value.least_feasible_bytes
    planned = shoal.compile(net, budget=hoped, allow="bitwise")
    with pytest.raises(BudgetError) as caught:  # when the loss is known, or else in the next step
        mean_square(planned(batch)).backward()
        planned.zero_grad()
        planned(batch)
    assert caught.value.least_feasible_bytes == pytest.approx(hoped + forgetful, rel=0.001)


@needs_compiler
def test_a_plan_that_was_given_is_refused_where_it_is_over_the_budget() -> None:
    net, batches = large_enough()
    everything = shoal.plan(net, batches[0])
    budget = everything.predicted_peak_bytes // 2
    with raising(PlanError, budget):
        shoal.compile(copy.deepcopy(net), budget=budget, options=shoal.Options(plan=everything))(batches[0])
    planned = shoal.compile(net, options=shoal.Options(plan=everything))
    train(planned, batches)
    status = planned.shoal
    assert (status.repairs, status.plan.residences) == (0, everything.residences)


def session_with(budget_bytes: int | None, plan: Plan) -> tuple[Session, list[str]]:
    """A session with this plan in force, and the list of what it has asked for."""
    asked: list[str] = []
    session = Session(Status(budget_bytes, plans=(plan,)), name="net", on_repair=lambda: asked.append("repair"))
    return session, asked


def iteration(*peaks_bytes: int) -> Iteration:
    """A metered one, with these peaks of its forward pass, its loss and its backward pass."""
    made = Iteration(0, {}, record=None)
    intervals = (Interval(peak_bytes, 0) for peak_bytes in (0, *peaks_bytes))
    return replace(made, intervals=list(intervals), phases=["forward", "backward"])


PLAN = keep_all(conv_bn_relu_chain(3), HARDWARE, 0)


@pytest.mark.parametrize("part", range(3))
def test_the_peak_is_the_highest_part_of_the_highest_step(part: int) -> None:
    session, asked = session_with(None, PLAN)
    for peak in (500, 900, 700):
        session.learn(iteration(*(peak if place == part else 3 for place in range(3))))
    assert session.status.measured_peak_bytes == 900
    assert not asked


@pytest.mark.parametrize(("measured", "repairs"), [(999, 0), (1000, 0), (1001, 1)])
def test_the_budget_itself_is_inside_the_budget(measured: int, repairs: int) -> None:
    session, asked = session_with(1000, PLAN)
    session.learn(iteration(0, measured, 0))
    assert session.status.repairs == len(asked) == repairs
    assert session.status.plans == (() if repairs else (PLAN,))
    assert session.status.plan is PLAN, "until the next one is made"
    assert session.status.predicted_peak_bytes == PLAN.predicted_peak_bytes
    assert session.status.measured_peak_bytes == measured


def test_the_plan_of_the_status_is_that_of_the_largest_step() -> None:
    small, large = (keep_all(conv_bn_relu_chain(3, nbytes), HARDWARE, 0) for nbytes in (100, 1000))
    for plans in ((small, large), (large, small)):
        status = Status(None, plans)
        assert status.plan is large
        assert status.predicted_peak_bytes == large.predicted_peak_bytes
    assert (Status(None).plan, Status(None).predicted_peak_bytes, Status(None).lower_bound_seconds) == (None,) * 3
