"""Batch norm's fused ops in a few lines of PyTorch at any precision, by autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """What `norm_conv` reads, and the gradients that reach it."""

    x: torch.Tensor
    mean: torch.Tensor | None
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None
    relu: bool
    grads: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def row(values: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, 1, 1)


def fused(case: Case, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """y, its mean and variance, and the gradients of x, mean, scale, shift, weight and bias."""
    kept = (case.x, case.mean, case.scale, case.shift, case.weight, case.bias)
    leaves = [None if tensor is None else tensor.detach().to(dtype).requires_grad_() for tensor in kept]
    x, mean, scale, shift, weight, bias = leaves
    assert x is not None and weight is not None
    a = x if mean is None or scale is None or shift is None else (x - row(mean)) * row(scale) + row(shift)
    a = a.relu() if case.relu else a
    y = torch.nn.functional.conv2d(a, weight, bias, padding=weight.shape[2] // 2)
    variance_y, mean_y = torch.var_mean(y, (0, 2, 3), correction=0)
    loss = sum(
        (result * grad.to(dtype)).sum()
        for result, grad in zip((y, mean_y, variance_y), case.grads, strict=True)
        if grad is not None
    )
    wanted = [leaf for leaf in leaves if leaf is not None]
    gradients = iter(torch.autograd.grad(loss, wanted))
    return [y.detach(), mean_y.detach(), variance_y.detach()] + [
        None if leaf is None else next(gradients) for leaf in leaves
    ]


def assert_no_worse(
    names: Sequence[str],
    ours: Sequence[torch.Tensor | None],
    naive: Sequence[torch.Tensor | None],
    exact: Sequence[torch.Tensor | None],
    terms: Mapping[str, float] | None = None,
    relative: float = 4e-6,
) -> None:
    """The largest error of ours is at most that of plain float32, and `relative` of the largest value.

    `terms`: how large what is added up to a result gets, for those that may cancel to much less.
    """
    for name, mine, plain, truth in zip(names, ours, naive, exact, strict=True):
        assert (mine is None) == (truth is None), name
        if mine is None or plain is None or truth is None:
            continue
        assert mine.shape == truth.shape, name
        error, allowed = (float((found.double() - truth).abs().max()) for found in (mine, plain))
        slack = relative * max(float(truth.abs().max()), (terms or {}).get(name, 0.0)) + 1e-7
        assert error <= allowed + slack, f"{name}: {error:.2e}, plain float32 {allowed:.2e}, slack {slack:.2e}"
