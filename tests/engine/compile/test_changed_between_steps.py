"""What changes between two steps of a compiled model changes the next step, as in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as every_module
from torch.nn.utils import parametrizations, prune

from shoal.errors import CaptureError
from tests.engine.compile.compiled import compiled
from tests.engine.training_laws import costs_that_do_not_matter, images, same_bits

Handles = list[Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.last = nn.Dropout(0.3), nn.Conv2d(4, 2, 3)
        self.tail = nn.ModuleList()
        self.doubled, self.settings, self.act = False, {"shift": 0.0}, torch.relu

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.last(self.drop(self.act(self.norm(self.first(x)))))
        y = 2 * y if self.doubled else y
        y = y if bias is None else y + bias
        for layer in self.tail:
            y = layer(y)
        return y + torch.full((1,), self.settings["shift"])


def step(model: nn.Module, *arguments: torch.Tensor, inside: AbstractContextManager[Any] | None = None) -> list[Any]:
    """One step's output, and what it leaves."""
    model.zero_grad()
    torch.manual_seed(1)
    with inside or nullcontext():
        y = model(*(arguments or images(1, 2, 3, 8, 8)))
    if y.requires_grad:
        y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or same_bits(ours, theirs)


def assert_noticed(*changes: Callable[[Any], Any]) -> None:
    """Each change, made between steps to a plain model and to a compiled one, changes both alike."""
    torch.manual_seed(0)
    plain = Net()
    planned = compiled(plain)
    with costs_that_do_not_matter():
        before = step(plain)
        assert_same(step(planned), before)
        for change in changes:
            for model in (plain, planned):
                torch.manual_seed(2)
                change(model)
            assert_same(step(planned), step(plain))


def hooks(kind: str, hook: Callable[..., Any], *, on: str = "first") -> Callable[[nn.Module], Handles]:
    def add(model: nn.Module) -> Handles:
        return [getattr(model.get_submodule(on), f"register_{kind}")(hook)]

    return add


def triple(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(3)


@pytest.mark.parametrize(
    "add",
    [
        hooks("forward_hook", lambda module, arguments, output: 2 * output),
        hooks("forward_pre_hook", lambda module, arguments: (2 * arguments[0],)),
        hooks("forward_hook", lambda module, arguments, output: 2 * output, on=""),
        hooks("forward_pre_hook", lambda module, arguments: (2 * arguments[0],), on=""),
        lambda model: [model.first.weight.register_hook(lambda gradient: 3 * gradient)],
        lambda model: [model.first.weight.register_post_accumulate_grad_hook(triple)],
    ],
    ids=["forward", "forward-pre", "model-forward", "model-forward-pre", "tensor", "post-accumulate"],
)
def test_hooks_that_come_and_go_between_steps_are_run(add: Callable[[nn.Module], Handles]) -> None:
    torch.manual_seed(0)
    plain = Net()
    planned = compiled(plain)
    with costs_that_do_not_matter():
        without = step(plain)
        assert_same(step(planned), without)
        handles = [*add(plain), *add(planned)]
        hooked = step(plain)
        assert any(not same_bits(a, b) for a, b in zip(hooked[:9], without[:9], strict=True))
        assert_same(step(planned), hooked)
        for handle in handles:
            handle.remove()
        assert_same(step(planned), step(plain))


def test_a_hook_in_the_place_of_another_is_the_one_that_runs() -> None:
    def replace(factor: float) -> Callable[[Net], None]:
        def change(model: Net) -> None:
            model.first._forward_hooks.clear()
            model.first.register_forward_hook(lambda module, arguments, output: factor * output)

        return change

    assert_noticed(replace(2.0), replace(3.0))


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_hooks_of_all_modules_are_run(kind: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    planned = compiled(plain)
    hook = {
        "forward_hook": lambda module, arguments, output: 2 * output,
        "forward_pre_hook": lambda module, arguments: (2 * arguments[0],),
    }[kind]
    with costs_that_do_not_matter():
        assert_same(step(planned), step(plain))
        handle = getattr(every_module, f"register_module_{kind}")(hook)
        try:
            assert_same(step(planned), step(plain))
        finally:
            handle.remove()
        assert_same(step(planned), step(plain))


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("where", ["one", "every"])
def test_backward_hooks_of_modules_are_refused(kind: str, where: str) -> None:
    planned = compiled(Net())
    with costs_that_do_not_matter():
        before = step(planned)
        register = getattr(*((planned.last, f"register_{kind}") if where == "one" else _of_every_module(kind)))
        handle = register(lambda *gradients: None)
        try:
            with pytest.raises(CaptureError):
                step(planned)
        finally:
            handle.remove()
        assert_same(step(planned)[:9], before[:9])


def _of_every_module(kind: str) -> tuple[Any, str]:
    return every_module, f"register_module_{kind}"


def test_replaced_parts_are_those_that_train() -> None:
    def replace_parameter(model: Net) -> None:
        model.first.weight = nn.Parameter(2 * model.first.weight.detach())

    def replace_data(model: Net) -> None:
        model.first.weight.data = torch.ones(4, 3, 1, 1)

    assert_noticed(
        lambda model: setattr(model, "first", nn.Conv2d(3, 4, 3)),
        replace_parameter,
        replace_data,
        lambda model: setattr(model, "last", nn.Conv2d(4, 2, 1)),
        lambda model: setattr(model, "norm", nn.Identity()),
        lambda model: model.tail.append(nn.Conv2d(2, 2, 1)),
        lambda model: model.tail.append(model.tail[0]),
    )


def test_parameters_that_are_frozen_or_computed_between_steps_are() -> None:
    assert_noticed(
        lambda model: model.first.weight.requires_grad_(False),
        lambda model: model.first.weight.requires_grad_(True),
        lambda model: parametrizations.weight_norm(model.last),
        lambda model: prune.l1_unstructured(model.first, "weight", 0.5),
        lambda model: [p.requires_grad_(False) for p in model.parameters()],
    )


@pytest.mark.slow
def test_other_settings_are_those_of_the_next_step() -> None:
    assert_noticed(
        lambda model: model.norm.eval(),
        lambda model: model.drop.eval(),
        lambda model: model.train(),
        lambda model: setattr(model.drop, "p", 0.7),
        lambda model: setattr(model.norm, "momentum", 0.5),
        lambda model: setattr(model.last, "stride", (2, 2)),
        lambda model: setattr(model, "doubled", True),
        lambda model: setattr(model, "act", torch.sigmoid),
        lambda model: model.settings.update(shift=1.0),
    )


def test_another_precision_or_layout_of_the_model_is_that_of_the_next_step() -> None:
    torch.manual_seed(0)
    plain = Net()
    planned = compiled(plain)
    with costs_that_do_not_matter():
        for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
            (x,) = images(1, 2, 3, 8, 8)
            assert_same(step(planned.to(kind), x.to(kind)), step(plain.to(kind), x.to(kind)))
        ours, theirs = (step(model.to(memory_format=torch.channels_last), x) for model in (planned, plain))
        torch.testing.assert_close(ours, theirs)


def test_the_surroundings_of_each_step_count() -> None:
    torch.manual_seed(0)
    plain = Net()
    planned = compiled(plain)
    (x,) = images(1, 2, 3, 8, 8)
    calls: list[Callable[[nn.Module], list[Any]]] = [
        lambda model: step(model),
        lambda model: step(model, inside=torch.autocast("cpu", torch.bfloat16)),
        lambda model: step(model, inside=torch.no_grad()),
        lambda model: step(model, inside=torch.inference_mode()),
        lambda model: step(model, x, torch.ones(1)),
        lambda model: step(model, x, torch.ones(1, dtype=torch.float64)),
        lambda model: step(model, x.clone().requires_grad_()),
        lambda model: step(model, 2 * x.clone().requires_grad_()),
        lambda model: step(model, x.expand(2, 2, 3, 8, 8)[1]),
        lambda model: step(model, torch.cat([x, x], 3)[..., ::2]),
        lambda model: step(model),
    ]
    with costs_that_do_not_matter():
        for call in calls:
            assert_same(call(planned), call(plain))
        try:
            torch.set_default_dtype(torch.float64)
            assert_same(step(planned, x), step(copy.deepcopy(plain), x))
        finally:
            torch.set_default_dtype(torch.float32)
