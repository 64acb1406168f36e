"""Gradients that `backward()` does not compute, of results that the loss does not read.

A model that computes its loss itself returns the logits with it. For their gradient autograd would allocate zeros
before the backward pass begins, and hold them until it ends, which eager PyTorch does not do. The step allocates them
just before the only op that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from shoal.engine.once_differentiable import with_backward


def leave_undefined(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What AOTAutograd compiled, whose backward pass is given None for such gradients."""
    return with_backward(compiled, lambda _, node: node.set_materialize_grads(False))


def allocate_late(backward: fx.Graph, names: Collection[str]) -> None:
    """Have the backward graph allocate the zeros of these gradients just before it reads them."""
    for node in backward.find_nodes(op="placeholder"):
        users = set(node.users)
        if node.name not in names or not users:
            continue
        value = node.meta["val"]
        with backward.inserting_before(next(one for one in backward.nodes if one in users)):
            sizes = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
            late = backward.call_function(given_or_zeros, (node, *sizes, value.dtype, value.device))
        late.meta = {"val": value}
        node.replace_all_uses_with(late, delete_user_cb=lambda user, late=late: user is not late)


def given_or_zeros(
    gradient: torch.Tensor | None,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The gradient, or zeros if there is none."""
    if gradient is not None:
        return gradient
    return torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()
