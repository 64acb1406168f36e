"""Batch norm of fake tensors in one go comes to what PyTorch's fake kernel comes to, or is left to it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.lowlevel.eager_strides import fake_batch_norm

aten = torch.ops.aten
SHAPES = [(2, 8), (2, 8, 4), (2, 8, 4, 4), (1, 8, 4, 4), (2, 8, 1, 1), (2, 8, 3, 4, 5)]


def layouts(shape: tuple[int, ...]) -> list[torch.Tensor]:
    x = torch.empty(shape)
    strange = [
        torch.empty(*shape[:-1], shape[-1] + 1)[..., :-1],
        torch.empty(shape[::-1]).permute(*range(x.dim())[::-1]),
    ]
    return [x, torch.empty(shape[0], *shape[2:], shape[1]).movedim(-1, 1), *strange]


def described(results: Any) -> list[tuple[Any, ...]]:
    return [(value.shape, value.stride(), value.dtype, value.device) for value in results]


def both(op: Any, arguments: tuple[Any, ...], device: str) -> tuple[Any, list[tuple[Any, ...]]]:
    """What is made in one go, None or described, and what PyTorch makes, described."""
    there = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in there]
        made = fake_batch_norm(mode, op, given, {})
        return made and described(made), described(op(*given))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_pytorch_says(shape: tuple[int, ...], device: str) -> None:
    vector = torch.ones(shape[1])
    n_made = 0
    for x, grad in itertools.product(layouts(shape), repeat=2):
        forward = (x, *[vector] * 4, True, 0.1, 1e-5)
        backward = (grad, x, vector, vector, vector, vector, vector, True, 1e-5, [True] * 3)
        for op, arguments in (
            (aten._native_batch_norm_legit_functional.default, forward),
            (aten.native_batch_norm_backward.default, backward),
        ):
            made, theirs = both(op, arguments, device)
            assert made is None or made == theirs
            n_made += made is not None
    assert (n_made == 0) == (1 in shape), "an axis of one can have any stride"


@pytest.mark.parametrize(
    "change",
    [{0: torch.ones(2, 8, 4, 4).half()}, {1: None}, {3: None}, {5: False}, {1: torch.ones(8).double()}],
    ids=["half", "no weight", "no statistics", "eval mode", "another dtype"],
)
def test_what_is_not_plain_is_left_to_pytorch(change: dict[int, Any]) -> None:
    arguments: list[Any] = [torch.ones(2, 8, 4, 4), *[torch.ones(8)] * 4, True, 0.1, 1e-5]
    for place, value in change.items():
        arguments[place] = value
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        assert fake_batch_norm(mode, aten._native_batch_norm_legit_functional.default, given, {}) is None


def test_other_ops_and_fewer_results_are_left_to_pytorch() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 8, 4, 4))
        assert fake_batch_norm(mode, aten.relu.default, [x], {}) is None
        ones = [mode.from_tensor(torch.ones(8))] * 3
        asked = [x, x, ones[0], None, None, *ones[1:], True, 1e-5, [True, False, True]]
        assert fake_batch_norm(mode, aten.native_batch_norm_backward.default, asked, {}) is None
