"""Decompositions of reductions that add up in float64 on the CPU, as eager PyTorch's batch norm does there.

Inductor's loops add in the dtype of the result, in a few long chains: in float32 that is up to sixty times the error of
eager PyTorch, which adds in pairs or in float64. On CUDA, where float64 is slow and a sum is a tree of short chains,
everything stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten
_LANES = 16  # sums of neighbours in memory are that many chains
_SHORT_CHAIN = 64  # additions one after another, as few as in a row of a layer norm or of a softmax


def wide_sums(device_type: str) -> dict[Any, Callable[..., Any]]:
    """Op → what computes it with sums in float64; empty where they stay as they are.

    Args:
        device_type: where the tensors are.
    """
    if device_type != "cpu":
        return {}
    return {
        _aten.sum.default: _sum,
        _aten.sum.dim_IntList: _sum,
        _aten.mean.default: _mean,
        _aten.mean.dim: _mean,
        _aten.var_mean.correction: _var_mean,
        _aten.var.correction: _var,
    }


def _stays(x: torch.Tensor, dim: Sequence[int] | None) -> bool:
    """Whether a reduction over some axes is exact enough as Inductor makes it."""
    if x.dtype is torch.float64 or not x.dtype.is_floating_point:
        return True
    axes = _axes(x, dim)
    lanes = _LANES if any(x.stride(axis) == 1 for axis in axes) else 1
    return _count(x, axes) <= lanes * _SHORT_CHAIN


def _axes(x: torch.Tensor, dim: Sequence[int] | None) -> list[int]:
    return list(dim) if dim else list(range(x.dim()))


def _count(x: torch.Tensor, axes: Sequence[int]) -> int:
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return count


def _sum(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    wanted = dtype or x.dtype
    if _stays(x, dim) or not wanted.is_floating_point:
        return NotImplemented
    return _aten.sum.dim_IntList(x.double(), _axes(x, dim), keepdim).to(wanted)


def _mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if _stays(x, dim):
        return NotImplemented
    axes = _axes(x, dim)
    total = _aten.sum.dim_IntList(x.double(), axes, keepdim)
    return (total / _count(x, axes)).to(dtype or x.dtype)


def _var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    if _stays(x, dim):
        return NotImplemented
    # In one sweep: of numbers in float32, squares in float64 lose nothing that the numbers had.
    wide, axes = x.double(), _axes(x, dim)
    count = _count(x, axes)
    mean = _aten.sum.dim_IntList(wide, axes, keepdim) / count
    squares = (_aten.sum.dim_IntList(wide * wide, axes, keepdim) - count * mean * mean).clamp_min(0.0)
    var = squares / max(count - (1 if correction is None else correction), 0)
    return var.to(x.dtype), mean.to(x.dtype)


def _var(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    if _stays(x, dim):
        return NotImplemented
    return _aten.var_mean.correction(x, dim, correction=correction, keepdim=keepdim)[0]
