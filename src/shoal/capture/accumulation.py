"""What autograd does with a gradient whose layout is not its leaf's: AccumulateGrad copies it once the backward graph
is over, while all other gradients are there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shoal.core.step import Op, StepGraph

ACCUMULATE = "accumulate_grad"


def with_accumulation(
    step: StepGraph, leaves: Sequence[fx.Node], gradients: Sequence[Any], early: Collection[int] = ()
) -> StepGraph:
    """The step with those copies as an op after all others, where there are any.

    An input that is no leaf gets its gradient as it is; it is taken for one, since a step cannot tell.

    Args:
        step: the step.
        leaves: nodes of its inputs, tangents left out.
        gradients: nodes of their gradients, in the same order; None for none.
        early: places of the gradients that have left before.
    """
    pairs = enumerate(zip(leaves, gradients, strict=False))
    most_bytes = max((copied_bytes(*pair) for place, pair in pairs if place not in early), default=0)
    if not most_bytes:
        return step
    op = Op(len(step.ops), ACCUMULATE, ACCUMULATE, "backward", "", (), (), workspace_bytes=most_bytes)
    return replace(step, ops=(*step.ops, op))


def copied_bytes(leaf: fx.Node, gradient: Any) -> int:
    """What autograd allocates to copy a gradient into its leaf's layout; 0 where it takes it as it is."""
    value = leaf.meta.get("val")
    if not isinstance(gradient, fx.Node) or not isinstance(value, torch.Tensor) or _fits(value, gradient.meta["val"]):
        return 0
    return int(gradient.meta["val"].untyped_storage().nbytes())


def _fits(leaf: torch.Tensor, gradient: Any) -> bool:
    """PyTorch's layout contract for gradients: the leaf's strides where it is dense, else contiguous."""
    if not isinstance(gradient, torch.Tensor) or gradient.shape != leaf.shape:
        return True
    if not torch.ops.aten.is_non_overlapping_and_dense.default(leaf):
        return bool(gradient.is_contiguous())
    sizes = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    return all(size == 1 or mine == its for size, mine, its in sizes)
