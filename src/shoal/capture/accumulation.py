"""What autograd does with a gradient whose layout is not its leaf's: AccumulateGrad copies it once the backward graph
is over, while all other gradients are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shoal.core.step import Op, StepGraph

ACCUMULATE = "accumulate_grad"


def with_accumulation(step: StepGraph, leaves: Iterable[fx.Node], gradients: Sequence[Any]) -> StepGraph:
    """The step with those copies as an op after all others, where there are any.

    An input that is no leaf gets its gradient as it is; it is taken for one, since a step cannot tell.

    Args:
        step: the step.
        leaves: nodes of its inputs, tangents left out.
        gradients: nodes of their gradients, in the same order; None for none.
    """
    pairs = zip((leaf.meta.get("val") for leaf in leaves), gradients, strict=False)
    copied = [
        int(gradient.meta["val"].untyped_storage().nbytes())
        for leaf, gradient in pairs
        if isinstance(gradient, fx.Node) and isinstance(leaf, torch.Tensor) and not _fits(leaf, gradient.meta["val"])
    ]
    if not copied:
        return step
    op = Op(len(step.ops), ACCUMULATE, ACCUMULATE, "backward", "", (), (), workspace_bytes=max(copied))
    return replace(step, ops=(*step.ops, op))


def _fits(leaf: torch.Tensor, gradient: Any) -> bool:
    """PyTorch's layout contract for gradients: the leaf's strides where it is dense, else contiguous."""
    if not isinstance(gradient, torch.Tensor) or gradient.shape != leaf.shape:
        return True
    if not torch.ops.aten.is_non_overlapping_and_dense.default(leaf):
        return bool(gradient.is_contiguous())
    sizes = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    return all(size == 1 or mine == its for size, mine, its in sizes)
