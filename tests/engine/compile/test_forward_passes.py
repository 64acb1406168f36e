"""What a forward pass may do in addition to computing: log, warn, raise; and what it may be given and hand on."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import CaptureError
from tests.engine.compile.compiled import ROOMY, compiled
from tests.engine.training_laws import (
    assert_same_training,
    blocks,
    costs_that_do_not_matter,
    images,
    mean_square,
    same_bits,
)
from tests.raising import raising

log = logging.getLogger(__name__)
adapter = logging.LoggerAdapter(log, {})


class Doing(nn.Module):
    """Two convolutions, and something between them."""

    def __init__(self, between: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        made = self.between(y)
        return self.two(y if made is None else made).sigmoid()


@functools.lru_cache(None)
def warning_once(self: logging.Logger, *arguments: Any) -> None:
    """As transformers gives it to every logger."""
    self.warning(*arguments)


def log_once(y: torch.Tensor) -> None:
    log.warning_once("seldom")  # type: ignore[attr-defined]


LOGGING = [
    lambda y: log.warning("a batch of %s", y.shape),
    lambda y: log.debug("fine") if log.isEnabledFor(logging.DEBUG) else log.log(20, "coarse"),
    lambda y: logging.info("to the root"),
    lambda y: adapter.info("with extras"),
    lambda y: warnings.warn("careful", stacklevel=2),
    log_once,
]


@pytest.mark.parametrize("between", LOGGING, ids=["logger", "level", "root", "adapter", "warnings", "once"])
def test_logging_is_no_part_of_a_step(between: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    assert_same_training(Doing(between), images(2, 2, 3, 8, 8))


def test_a_plan_can_be_made_of_a_model_that_logs() -> None:
    made = shoal.plan(Doing(LOGGING[0]), images(1, 2, 3, 8, 8)[0], ROOMY, hardware="p100-nvlink")
    assert made.graph.ops


def test_logging_is_ignored_in_our_captures_alone() -> None:
    model = compiled(Doing(LOGGING[0]))
    with costs_that_do_not_matter():
        mean_square(model(*images(1, 2, 3, 8, 8))).backward()
    assert logging.Logger.warning not in torch._dynamo.config.ignore_logging_functions
    assert torch._dynamo.config.skip_nnmodule_hook_guards


def test_the_backend_tells_how_to_leave_logging_out() -> None:
    model = torch.compile(Doing(LOGGING[0]), backend="shoal")
    with raising(CaptureError, "ignore_logging_functions"):
        model(*images(1, 2, 3, 8, 8))


def wrong_number(y: torch.Tensor) -> None:
    raise ArithmeticError("wrong number")


def wrong_batch(y: torch.Tensor) -> None:
    assert y.shape[0] == 3, "three wanted"


@pytest.mark.parametrize(
    ("between", "error", "text"),
    [
        (wrong_number, ArithmeticError, ""),
        (wrong_batch, AssertionError, ""),
        (lambda y: {}["key"], KeyError, "'key'"),
        (lambda y: y.nothing, AttributeError, "'nothing'"),
        (lambda y: y.view(7, -1), RuntimeError, "'[7, -1]'"),
    ],
    ids=["raise", "assert", "key", "attribute", "shape"],
)
def test_what_the_model_raises_arrives_as_in_plain_pytorch(
    between: Callable[[torch.Tensor], Any], error: type[Exception], text: str
) -> None:
    with raising(error, text):
        Doing(between)(*images(1, 2, 3, 8, 8))
    with raising(error, text) as caught:
        compiled(Doing(between))(*images(1, 2, 3, 8, 8))
    assert type(caught.value) is error


class Taking(nn.Module):
    """One convolution on what `first` makes of the input."""

    def __init__(self, first: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.first = nn.Conv2d(3, 4, 3, padding=1), first

    def forward(self, x: torch.Tensor) -> Any:
        parts = self.first(x)
        return [self.conv(part).sigmoid().tanh() for part in parts]


@pytest.mark.parametrize(
    "first",
    [
        lambda x: x.chunk(2, 3),
        lambda x: x.split([3, 5], 3),
        lambda x: x.unbind(0),
        lambda x: x.tensor_split(3, 3),
        lambda x: x.topk(4, 3)[:1],
        lambda x: x.sort(3)[:1],
        lambda x: x.max(3, keepdim=True)[:1],
        lambda x: torch.var_mean(x, 3, keepdim=True),
        lambda x: torch.broadcast_tensors(x, torch.ones(1)),
    ],
    ids=["chunk", "split", "unbind", "tensor_split", "topk", "sort", "max", "var_mean", "broadcast"],
)
def test_the_first_op_may_hand_on_several_tensors(first: Callable[[torch.Tensor], Any]) -> None:
    def loss(outputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([mean_square(output) for output in outputs]).sum()

    assert_same_training(Taking(first), images(2, 2, 3, 8, 8), loss_of=loss)


def test_an_empty_batch_trains_as_in_plain_pytorch() -> None:
    full, empty = images(1, 2, 3, 8, 8), images(1, 0, 3, 8, 8)
    net = nn.Sequential(*blocks(3, 4), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Conv2d(4, 4, 1))

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.square().sum()

    assert_same_training(net, [*full, *empty, *full], loss_of=loss)


def test_an_empty_batch_that_pytorch_cannot_trace_is_refused_in_one_line() -> None:
    model = compiled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2)))
    with costs_that_do_not_matter(), raising(CaptureError, "PyTorch"):
        model(*images(1, 0, 3, 8, 8))
    assert same_bits(model.forward(*images(1, 0, 3, 8, 8)), torch.empty(0, 4, 12, 12))
