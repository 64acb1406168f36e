"""What the loop around a model holds counts in the budget: other calls, outputs, gradients, optimizers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.errors import BudgetError
from shoal.planners.joint import joint
from tests.engine.session_loops import true_peak
from tests.engine.training_laws import (
    blocks,
    classifier,
    differences,
    images,
    mean_square,
    needs_compiler,
    train,
)
from tests.float32_rule import too_far
from tests.raising import raising
from tests.scratch import needs_little_scratch

pytestmark = needs_compiler  # the loss is metered only with one
Loop = Callable[[nn.Module], Any]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def unmodified(net: nn.Module, budget: int | str) -> nn.Module:
    """A planned copy whose step has one variant: others have smaller minima, which take ten times as long to search."""
    return shoal.compile(copy.deepcopy(net), budget, allow="bitwise")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def calls_before_a_backward(batches: list[torch.Tensor]) -> Loop:
    def loop(model: nn.Module) -> None:
        model.zero_grad()
        outputs = [model(batch) for batch in batches]
        sum(F.mse_loss(a, b) for a, b in pairwise(outputs)).backward()

    return loop


@pytest.mark.slow
def test_calls_that_come_before_one_backward_pass_share_the_budget() -> None:
    net, batches = classifier(3, 16, 16, 16), images(3, 4, 3, 16, 16)
    loop = calls_before_a_backward(batches)
    plain = copy.deepcopy(net)
    loop(plain), plain.zero_grad()
    budget = int(0.6 * true_peak(plain, lambda: loop(plain), batches))
    planned = shoal.compile(copy.deepcopy(net), budget=budget, name="twins")
    for _ in range(3):
        loop(planned)
    planned.zero_grad()
    peak = true_peak(planned, lambda: loop(planned), batches)
    status = planned.shoal
    assert peak <= status.measured_peak_bytes <= budget
    assert status.predicted_peak_bytes == pytest.approx(peak, rel=0.02)
    assert status.repairs == 0
    exact = copy.deepcopy(net).double()
    loop(planned), loop(plain), calls_before_a_backward([batch.double() for batch in batches])(exact)
    assert not too_far(gradients(planned), gradients(plain), gradients(exact))


class Returning(nn.Module):
    """Returns what no backward op reads, one a function of the other, in addition to what it is trained for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest, self.last = (
            nn.Sequential(*blocks(3, 8, 8)),
            classifier(8, 8, 8),
            nn.Conv2d(8, 8, 1),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.first(x)
        more = hidden + 1
        twice = more * 2
        return self.rest(twice.relu()), more, twice, self.last(hidden) + 1


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["chain", "joint"])
def test_outputs_are_what_they_were_whatever_the_first_plan_hopes_the_loop_drops(planner: str) -> None:
    torch.manual_seed(0)
    model, batches = Returning(), images(3, 4, 3, 32, 32)
    plain, held = copy.deepcopy(model), []
    budget = int(0.7 * shoal.plan(copy.deepcopy(model), batches[0], budget="1GiB").plain_peak_bytes)

    def loss_of(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        held[:] = outputs
        return mean_square(outputs)

    planned = shoal.compile(model, budget=budget, allow="bitwise", options=shoal.Options(planner=planner))
    assert not differences(train(planned, batches, loss_of=loss_of), train(plain, batches, loss_of=loss_of))


@pytest.mark.slow
def test_calls_that_cannot_fit_together_are_refused_with_a_budget_that_works() -> None:
    net, batches = classifier(3, 16, 16), images(2, 8, 3, 16, 16)
    loop = calls_before_a_backward(batches)
    with pytest.raises(BudgetError) as alone:
        unmodified(net, "100KiB")(batches[0])
    planned = unmodified(net, alone.value.least_feasible_bytes)
    with pytest.raises(BudgetError) as refused:
        loop(planned)
    enough = unmodified(net, refused.value.least_feasible_bytes)
    for _ in range(3):
        loop(enough)
    enough.zero_grad()
    assert true_peak(enough, lambda: loop(enough), batches) <= refused.value.least_feasible_bytes


@pytest.mark.slow
@pytest.mark.parametrize("allow", ["bitwise", "exact"])
def test_calls_of_different_shapes_share_the_budget_too(allow: str) -> None:
    net, (large,), (small,) = nn.Sequential(*blocks(3, 16, 16)), images(1, 4, 3, 24, 24), images(1, 4, 3, 16, 16)

    def loop(model: nn.Module) -> None:
        model.zero_grad()
        (model(large).square().mean() + model(small).square().mean()).backward()

    plain = copy.deepcopy(net)
    loop(plain), plain.zero_grad()
    budget = int(1.1 * true_peak(plain, lambda: loop(plain), [large, small]))
    planned = shoal.compile(copy.deepcopy(net), budget=budget, allow=allow)
    for _ in range(6):
        loop(planned)
    planned.zero_grad()
    assert true_peak(planned, lambda: loop(planned), [large, small]) <= budget


def test_a_graph_that_is_never_sent_back_is_a_call_only_while_it_lives(caplog: pytest.LogCaptureFixture) -> None:
    net, (batch,) = classifier(3, 8, 8), images(1, 4, 3, 8, 8)
    planned = shoal.compile(net, budget="1GiB")
    for _ in range(3):
        planned(batch)
    for _ in range(3):
        planned(batch).sum().backward()
    assert not warnings(caplog)


def segmentation() -> nn.Sequential:
    return nn.Sequential(*blocks(3, 16, 16), nn.Conv2d(16, 21, 1))


def dense_loop(holds: bool, images_: torch.Tensor, labels: torch.Tensor, steps: int) -> Loop:
    def loop(model: nn.Module) -> None:
        for _ in range(steps):
            model.zero_grad()
            if holds:
                outputs = model(images_)
                F.cross_entropy(outputs, labels).backward()
            else:
                F.cross_entropy(model(images_), labels).backward()

    return loop


@needs_little_scratch
@pytest.mark.parametrize("holds", [False, True])
def test_outputs_count_as_long_as_the_loop_holds_them_and_no_longer(holds: bool) -> None:
    net, (batch,) = segmentation(), images(1, 2, 3, 32, 32)
    labels = torch.randint(0, 21, (2, 32, 32))
    loop = dense_loop(holds, batch, labels, 2)
    plain = copy.deepcopy(net)
    loop(plain), plain.zero_grad()
    budget = int(0.7 * true_peak(plain, lambda: loop(plain), [batch, labels]))
    planned = unmodified(net, budget)
    loop(planned), loop(planned)
    planned.zero_grad()
    peak = true_peak(planned, lambda: loop(planned), [batch, labels])
    assert planned.shoal.measured_peak_bytes == peak <= budget
    assert planned.shoal.predicted_peak_bytes == pytest.approx(peak, rel=0.002)


@pytest.mark.slow
def test_a_budget_that_only_a_loop_without_held_outputs_meets_is_tried_and_refused_when_it_holds_them() -> None:
    net, (batch,) = segmentation(), images(1, 2, 3, 32, 32)
    labels = torch.randint(0, 21, (2, 32, 32))
    with pytest.raises(BudgetError) as refused:
        unmodified(net, "60KiB")(batch)
    assert "minimum if the loss frees the outputs" in refused.value.details
    assert f" to {format_bytes(refused.value.least_feasible_bytes)}, by what the loop holds" in refused.value.message
    budget = refused.value.least_feasible_bytes - 1
    frugal = unmodified(net, budget)
    loop = dense_loop(False, batch, labels, 2)
    loop(frugal), loop(frugal)
    frugal.zero_grad()
    assert true_peak(frugal, lambda: loop(frugal), [batch]) <= budget
    tight = refused.value.least_feasible_bytes * 3 // 5
    holding = unmodified(net, tight)
    with pytest.raises(BudgetError) as held:
        dense_loop(True, batch, labels, 4)(holding)
    enough = unmodified(net, held.value.least_feasible_bytes)
    dense_loop(True, batch, labels, 4)(enough)
    assert enough.shoal.measured_peak_bytes <= held.value.least_feasible_bytes


def counting(made: list[int]) -> Callable[[StepGraph, Hardware, int], Plan]:
    def planner(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        made.append(budget_bytes)
        return joint(graph, hardware, budget_bytes)

    return planner


def test_gradients_dropped_between_the_passes_are_counted_and_planned_once() -> None:
    """The order of Lightning: forward, zero_grad, backward, step."""
    net, (batch,), made = classifier(3, 16, 64, 64), images(1, 4, 3, 16, 16)[:1], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    shoal.compile(net, budget="1GiB", optimizer=optimizer, options=shoal.Options(planner=counting(made)))

    def step() -> None:
        loss = net(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(4):
        step()
    assert len(made) == len(net.shoal.plans) == 1
    optimizer.zero_grad()
    assert net.shoal.measured_peak_bytes == true_peak(net, lambda: (step(), step()), [batch], optimizer)
    assert net.shoal.predicted_peak_bytes == pytest.approx(net.shoal.measured_peak_bytes, rel=0.002)


def test_a_step_that_is_captured_again_is_planned_with_what_the_loss_took_in_the_first() -> None:
    """No gradients of a step before the first one are there then: what the loss takes is not less by them."""
    net, (batch,), target = nn.Linear(16, 512, bias=False), images(1, 64, 16), torch.randn(64, 512)
    shoal.compile(net, budget="1GiB", optimizer="sgd")
    predicted_bytes: list[int] = []

    def step() -> None:
        result = net(batch)
        predicted_bytes.append(net.shoal.plans[-1].predicted_peak_bytes)
        ((result - target) ** 2).mean().backward()

    step()
    peak = true_peak(net, step, [batch, target])  # which adds to the gradients
    assert len(net.shoal.plans) == 2
    assert predicted_bytes[1] == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_accumulated_or_kept_as_zeros_count_all_step(set_to_none: bool) -> None:
    net, (batch,) = classifier(3, 16, 64, 64), images(1, 4, 3, 16, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    shoal.compile(net, budget="1GiB", optimizer=optimizer)

    def step() -> None:
        for _ in range(2):
            net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)

    for _ in range(3):
        step()
    assert len(net.shoal.plans) == 2
    assert net.shoal.measured_peak_bytes == true_peak(net, step, [batch], optimizer)
    assert net.shoal.predicted_peak_bytes == pytest.approx(net.shoal.measured_peak_bytes, rel=0.002)


@pytest.mark.parametrize("declared", [True, False])
def test_the_state_of_the_optimizer_that_really_steps_counts(declared: bool, caplog: pytest.LogCaptureFixture) -> None:
    net, (batch,) = classifier(3, 16, 64, 64), images(1, 4, 3, 16, 16)
    idle = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW(net.parameters())
    parameter_bytes = sum(p.nbytes for p in net.parameters())
    shoal.compile(net, budget="1GiB", optimizer=idle if declared else None)

    def step() -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()

    step()
    before = net.shoal.predicted_peak_bytes
    optimizer.step()
    step()
    (told,) = warnings(caplog)
    assert "AdamW has stepped" in told and ("SGD was declared" in told) == declared
    state_bytes = sum(v.nbytes for state in optimizer.state.values() for v in state.values())
    assert state_bytes >= 2 * parameter_bytes
    assert net.shoal.predicted_peak_bytes == pytest.approx(before + state_bytes, rel=0.01)
    optimizer.zero_grad()
    assert net.shoal.measured_peak_bytes == true_peak(net, step, [batch], optimizer)


def test_an_undeclared_optimizer_for_whose_state_there_is_no_room_is_refused_by_name() -> None:
    net, (batch,) = classifier(3, 16, 64, 64), images(1, 4, 3, 16, 16)
    with raising(BudgetError, "optimizer=") as refused:
        unmodified(net, "400KiB")(batch)
    optimizer = torch.optim.Adam(net.parameters())
    shoal.compile(net, budget=refused.value.least_feasible_bytes, allow="bitwise")
    net(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(BudgetError) as refused:
        net(batch)
    assert refused.value.details["optimizer state"].endswith("iB")


@pytest.mark.slow
def test_two_models_in_one_step_are_metered_one_after_the_other() -> None:
    """A generator and a discriminator: what the one saves inside the other's step is part of that step."""
    generator, discriminator = nn.Sequential(*blocks(4, 16, 3)), classifier(3, 16, 16)
    for net in (generator, discriminator):
        shoal.compile(net, budget="1GiB")
    (noise,), (real,) = images(1, 4, 4, 16, 16), images(1, 4, 3, 16, 16)
    for _ in range(6):
        discriminator.zero_grad()
        fake = generator(noise)
        (discriminator(real).mean() - discriminator(fake.detach()).mean()).backward()
        discriminator.zero_grad(), generator.zero_grad()
        discriminator(fake).mean().backward()
    for net in (generator, discriminator):
        assert net.shoal.measured_peak_bytes is not None
        assert net.shoal.predicted_peak_bytes == pytest.approx(net.shoal.measured_peak_bytes, rel=0.1)


def test_results_of_a_call_that_waits_for_its_backward_pass_count_once() -> None:
    net, batches = segmentation(), images(2, 2, 3, 32, 32)

    def loop(model: nn.Module) -> None:
        model.zero_grad()
        outputs = [model(batch) for batch in batches]
        F.mse_loss(outputs[0], outputs[1]).backward()

    planned = shoal.compile(net, budget="1GiB")
    for _ in range(4):
        loop(planned)
    planned.zero_grad()
    peak = true_peak(planned, lambda: loop(planned), batches)
    assert planned.shoal.predicted_peak_bytes == pytest.approx(peak, rel=0.02)


def predicted_and_true_peak(net: nn.Module, loop: Loop, *given: torch.Tensor) -> tuple[int, int]:
    """Bytes of a loop's step, once a step has shown what the loop holds."""
    planned = shoal.compile(net, budget="1GiB")
    for _ in range(2):
        loop(planned)
    planned.zero_grad()
    return planned.shoal.predicted_peak_bytes, true_peak(planned, lambda: loop(planned), given)


def test_a_loss_whose_mean_lies_in_the_storage_of_all_squares_counts_while_it_is_sent_back() -> None:
    net, (batch,), target = segmentation(), images(1, 2, 3, 32, 32), torch.randn(2, 21, 32, 32)
    assert F.mse_loss(target, target).untyped_storage().nbytes() == target.nbytes

    def loop(model: nn.Module) -> None:
        model.zero_grad()
        loss = F.mse_loss(model(batch), target)
        loss.backward()

    predicted, peak = predicted_and_true_peak(net, loop, batch, target)
    assert predicted == pytest.approx(peak, rel=0.005)


class WithLoss(nn.Module):
    """Returns its loss and what that is computed from, of which nothing else is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.body(x)
        return F.cross_entropy(logits, torch.arange(len(x)) % 64), logits


def test_the_gradient_of_logits_beside_a_loss_does_not_count_once_it_is_read() -> None:
    net, x = WithLoss(), torch.randn(512, 16)

    def loop(model: nn.Module) -> None:
        model.zero_grad()
        model(x)[0].backward()

    predicted, peak = predicted_and_true_peak(net, loop, x)
    assert 0 <= predicted - peak <= 1024


class Features(nn.Module):
    """Returns a result that its backward pass reads first, before what takes most."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).tanh()).tanh()


@pytest.mark.parametrize("holds", [False, True])
def test_a_result_that_the_backward_pass_reads_counts_as_long_as_the_loop_holds_it(holds: bool) -> None:
    net, x = Features(), torch.randn(512, 16)

    def loop(model: nn.Module) -> None:
        model.zero_grad()
        result = model(x)
        loss = result.mean()
        if not holds:
            del result
        loss.backward()

    predicted, peak = predicted_and_true_peak(net, loop, x)
    assert 0 <= predicted - peak <= 1024
