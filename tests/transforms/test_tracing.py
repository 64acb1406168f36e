from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from shoal.transforms.tracing import UntraceableError, trace


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x


class Stops(nn.Module):
    def __init__(self, *said: str) -> None:
        super().__init__()
        self.said, self.norm = said, nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(*self.said)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_traced_in_the_mode_asked_for(training: bool) -> None:
    graph = trace(Doubled().train(not training), fx.Tracer(), training=training)
    assert [node.op for node in graph.nodes] == ["placeholder"] + ["call_function"] * training + ["output"]


@pytest.mark.parametrize("model", [nn.Sequential(Doubled(), nn.BatchNorm2d(2)), Stops()])
def test_every_module_keeps_its_own_mode(model: nn.Module) -> None:
    frozen = list(model.modules())[-1]
    frozen.eval()
    try:
        trace(model, fx.Tracer(), training=True)
    except UntraceableError:
        assert isinstance(model, Stops)
    assert model.training and not frozen.training


def test_the_reason_is_one_line() -> None:
    for model, said in ((Stops("this\nand that"), "this"), (Stops(), "RuntimeError")):
        with pytest.raises(UntraceableError) as caught:
            trace(model, fx.Tracer(), training=True)
        assert str(caught.value) == said


class Within(nn.Module):
    """A layer in a context, and one after it."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.context, self.layer, self.head = context, nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.context():
            x = self.layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(2, 2), use_reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize(
    "model",
    [
        Within(torch.no_grad),
        Within(partial(torch.autocast, "cpu", torch.bfloat16)),
        Within(torch.autograd.graph.save_on_cpu),
        Checkpointed(use_reentrant=False),
        Checkpointed(use_reentrant=True),
    ],
    ids=["no_grad", "autocast", "save_on_cpu", "checkpoint", "reentrant"],
)
def test_what_a_graph_would_leave_out_without_a_word_is_the_reason(model: nn.Module) -> None:
    with pytest.raises(UntraceableError):
        trace(model, fx.Tracer(), training=True)
    assert len(trace(Within(nullcontext), fx.Tracer(), training=True).nodes) == 4


def test_a_network_may_be_traced_within_a_context() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert len(trace(nn.ReLU(), fx.Tracer(), training=True).nodes) == 3


class WithOptional(nn.Module):
    """Its second argument may be left out."""

    def __init__(self, use: Callable[[torch.Tensor, Any], torch.Tensor], default: object) -> None:
        super().__init__()
        self.use = use

        def forward(self: WithOptional, x: torch.Tensor, more: Any = default) -> torch.Tensor:
            return self.use(x, more)

        self.__class__ = type("Optional", (WithOptional,), {"forward": forward})


@pytest.mark.parametrize(
    ("use", "default"),
    [
        (lambda x, more: x if more is None else x + more, None),
        (lambda x, more: x + 1 if more is None else x, None),
        (lambda x, more: x * (2 if more is None else 3), None),
        (lambda x, more: x * (2 if isinstance(more, float) else 3), 1.0),
    ],
    ids=["is given", "is not given", "another number", "of another type"],
)
def test_what_depends_on_an_argument_being_given_is_the_reason(use: Any, default: object) -> None:
    with pytest.raises(UntraceableError):
        trace(WithOptional(use, default), fx.Tracer(), training=True)


def test_what_cannot_be_traced_where_an_argument_is_left_out_is_not_traced_as_if_it_were_given() -> None:
    def branches(x: torch.Tensor, more: object) -> torch.Tensor:
        return x if more is not None or x.sum() > 0 else -x

    with pytest.raises(UntraceableError):
        trace(WithOptional(branches, None), fx.Tracer(), training=True)


@pytest.mark.parametrize(
    ("use", "default", "given"),
    [
        (lambda x, more: x, None, [3.0]),
        (lambda x, more: x * more, 2.0, [2.0, 3.0]),
        (lambda x, more: x * more[0].sin(), None, [[torch.ones(2)]]),
    ],
    ids=["unread", "a number", "always given"],
)
def test_other_optional_arguments_stay_arguments(use: Any, default: object, given: list[object]) -> None:
    model, x = WithOptional(use, default), torch.tensor([1.0, 2.0])
    traced = fx.GraphModule(model, trace(model, fx.Tracer(), training=True))
    for more in given:
        assert torch.equal(traced(x, more=more), model(x, more))
    if default is not None:
        assert torch.equal(traced(x), model(x))
