"""A compiled function holds no more at a graph break than the same function in eager mode."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from shoal.lowlevel.resume_functions import releasing_arguments

made: list[weakref.ref[torch.Tensor]] = []
alive: list[int] = []


@torch.compiler.disable
def step(x: torch.Tensor) -> torch.Tensor:
    """What breaks the graph: notes how many of the results of earlier calls are alive."""
    alive.append(sum(one() is not None for one in made))
    y = x + 1
    made.append(weakref.ref(y))
    return y


class Step(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return step(x).mul(2)


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, Step()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = step(x).sin()
        x = self.inner(x)
        x = step(x).cos()
        return self.last(x).exp()


def rebinds(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = step(x).sin()
    return x


def in_a_row(x: torch.Tensor) -> torch.Tensor:
    x = step(x.sin()).cos()
    x = step(x.sin()).cos()
    return step(step(step(x).sin()).sin()).cos()


def with_a_residual(x: torch.Tensor) -> torch.Tensor:
    x = step(x).sin()
    y = step(step(x).cos()).cos()
    x = step(x + y).sin()
    return step(step(x).sin()).cos()


def in_a_context(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = step(x).sin()
        with torch.autocast("cpu", torch.bfloat16):
            x = step(x).sin()
            x = step(x).sin()
        x = step(x).sin()
    return step(x).cos()


def by_its_values(x: torch.Tensor) -> torch.Tensor:
    x = step(x).sin()
    x = step(x).sin() if x.sum() > 0 else step(x).cos()
    if step(x).sum() > 0:
        x = x + 1
    return step(step(x).sin())


def with_a_cell(x: torch.Tensor) -> torch.Tensor:
    scale = x.sum()

    def scaled(y: torch.Tensor) -> torch.Tensor:
        return y * scale

    x = step(x).sin()
    x = step(scaled(x)).sin()
    x = step(scaled(x)).sin()
    return scaled(step(x))


def deleting(x: torch.Tensor) -> torch.Tensor:
    y = step(x).sin()
    z = step(y).sin()
    del y
    return step(step(z).sin())


def nested(depth: int) -> nn.Module:
    return Block(nested(depth - 1) if depth else nn.Sequential(Step(), nn.ReLU(), Step(), Step()))


@pytest.mark.parametrize(
    "function",
    [rebinds, in_a_row, with_a_residual, in_a_context, by_its_values, with_a_cell, deleting, nested(0), nested(2)],
    ids=lambda one: getattr(one, "__name__", "modules"),
)
def test_nothing_is_held_that_eager_mode_releases(function: Callable[..., torch.Tensor]) -> None:
    x = torch.rand(3)

    def run(call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        made.clear()
        alive.clear()
        return call(x), list(alive)

    expected, held = run(function)
    with releasing_arguments():
        compiled = torch.compile(function, backend="eager")
        run(compiled)
        result, held_compiled = run(compiled)
    assert torch.equal(result, expected)
    assert max(held) < len(held) - 1
    assert all(mine <= eager for mine, eager in zip(held_compiled, held, strict=True))


@pytest.fixture
def breaks_within_calls() -> Iterator[None]:
    """Dynamo breaks where a called function breaks; else the call does, and the function's graphs are its own."""
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        torch._dynamo.reset()
        yield


@pytest.mark.usefixtures("breaks_within_calls")
def test_functions_without_values_call_them() -> None:
    x = torch.rand(3)

    def without() -> torch.Tensor:
        return in_a_row(x)

    with releasing_arguments():
        assert torch.equal(torch.compile(without, backend="eager")(), in_a_row(x))


@pytest.mark.usefixtures("breaks_within_calls")
@pytest.mark.parametrize("first", [True, False])
def test_what_is_compiled_elsewhere_calls_them_and_they_call_it(first: bool) -> None:
    model, x = nested(1), torch.rand(3)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return in_a_row(model(x)) * 2

    def tripled(x: torch.Tensor) -> torch.Tensor:
        return in_a_row(model(x)) * 3

    for function, releasing in ((doubled, first), (tripled, not first)):
        with releasing_arguments() if releasing else nullcontext():
            assert torch.equal(torch.compile(function, backend="eager")(x), function(x))
