"""Gradients that hooks take while the planned backward pass runs: autograd does with them what it does in plain
PyTorch, and what an optimizer frees there is not counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.errors import BudgetError
from shoal.memory.limit import memory_limit
from tests.engine.compile.compiled import ROOMY, compiled
from tests.engine.training_laws import costs_that_do_not_matter, needs_compiler, same_bits

WIDTH, DEPTH = 128, 4
BATCH = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(32) % 10


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def convolutions() -> nn.Sequential:
    """Backward ops that read the weight come after those that make its gradient."""
    torch.manual_seed(0)
    layers = (layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))
    return nn.Sequential(nn.Unflatten(1, (4, 8, 4)), *layers, nn.Flatten(), nn.Linear(WIDTH, 10))


def steps_in_hooks(model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> list[int]:
    """Let an optimizer of its own train each parameter as soon as its gradient exists, and drop that.

    Returns:
        How many other gradients were there when each came, filled in by the hooks.
    """
    parameters = list(model.parameters())
    optimizers = {parameter: kind([parameter], **options) for parameter in parameters}
    beside: list[int] = []

    def step(parameter: torch.Tensor) -> None:
        beside.append(sum(other.grad is not None for other in parameters) - 1)
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)
    return beside


def train(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    for _ in range(steps):
        cross_entropy(model(BATCH), LABELS).backward()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("make", [network, convolutions])
def test_an_optimizer_that_steps_in_hooks_trains_as_in_plain_pytorch(make: Callable[[], nn.Module]) -> None:
    plain, planned = make(), make()
    for model in (plain, planned):
        beside = steps_in_hooks(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    shoal.compile(planned, budget=ROOMY, optimizer="sgd-momentum")
    with costs_that_do_not_matter():
        assert all(map(same_bits, train(planned), train(plain)))
    assert max(beside) == 0


@needs_compiler
def test_what_the_hooks_free_is_not_counted_and_the_budget_holds() -> None:
    model = network()
    steps_in_hooks(model, torch.optim.SGD, lr=0.1)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    budget_bytes = int(1.8 * parameter_bytes)  # less than parameters and gradients
    shoal.compile(model, budget=budget_bytes, optimizer="sgd")
    with memory_limit(None) as meter:
        before_bytes = meter.live_bytes
        train(model)
        peak_bytes = meter.peak_bytes - before_bytes
    status = model.shoal
    assert status.repairs == 0
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    own_bytes = parameter_bytes + BATCH.nbytes + LABELS.nbytes  # there before the meter
    assert peak_bytes + own_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    assert status.predicted_peak_bytes <= budget_bytes


@needs_compiler
def test_hooks_that_free_nothing_are_found_out() -> None:
    model = network()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    shoal.compile(model, budget=ROOMY, optimizer="sgd")
    for _ in range(2):
        train(model, 1)
        model.zero_grad()
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    assert model.shoal.measured_peak_bytes == pytest.approx(model.shoal.predicted_peak_bytes, rel=0.02)
    tight = network()
    for parameter in tight.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    shoal.compile(tight, optimizer="sgd", budget=model.shoal.predicted_peak_bytes - gradient_bytes // 2)
    with pytest.raises(BudgetError):
        for _ in range(2):
            train(tight, 1)
            tight.zero_grad()


def test_hooks_of_pytorchs_own_optimizer_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    plain, planned = network(), network()
    for model in (plain, planned):
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    shoal.compile(planned, budget=ROOMY, optimizer="sgd")
    with costs_that_do_not_matter():
        assert all(map(same_bits, train(planned), train(plain)))


def two_calls(model: nn.Module) -> None:
    (cross_entropy(model(BATCH), LABELS) + cross_entropy(model(BATCH.flip(0)), LABELS)).backward()


def penalty_on_weights(model: nn.Module) -> None:
    (cross_entropy(model(BATCH), LABELS) + sum(p.square().sum() for p in model.parameters())).backward()


def backward_twice(model: nn.Module) -> None:
    loss = cross_entropy(model(BATCH), LABELS)
    loss.backward(retain_graph=True)
    loss.backward()


def some_inputs(model: nn.Module) -> None:
    cross_entropy(model(BATCH), LABELS).backward(inputs=list(model.parameters())[4:6])


def gradients_alone(model: nn.Module) -> None:
    found = torch.autograd.grad(cross_entropy(model(BATCH), LABELS), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient


def accumulated(model: nn.Module) -> None:
    for batch in BATCH.chunk(2):
        cross_entropy(model(batch), LABELS[:16]).backward()


@pytest.mark.parametrize(
    "use", [two_calls, penalty_on_weights, backward_twice, some_inputs, gradients_alone, accumulated]
)
def test_every_use_of_autograd_finds_the_gradients_of_plain_pytorch(use: Callable[[nn.Module], None]) -> None:
    plain = network()
    for parameter in plain.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    planned = compiled(plain)
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        ours.register_post_accumulate_grad_hook(lambda parameter: None)
        for parameter in (ours, theirs):
            parameter.register_hook(lambda gradient: 2 * gradient)
    with costs_that_do_not_matter():
        for _ in range(2):
            use(planned)
            use(plain)
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or same_bits(ours.grad, theirs.grad)


def test_gradients_arrive_in_plain_pytorchs_order() -> None:
    plain = convolutions()
    planned = copy.deepcopy(plain)
    orders: list[list[int]] = []
    for model in (plain, planned):
        order: list[int] = []
        for number, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number, order=order: order.append(number))
        orders.append(order)
    shoal.compile(planned, budget=ROOMY)
    with costs_that_do_not_matter():
        train(planned, 1)
    train(plain, 1)
    assert orders[0] == orders[1]
