"""The sweeps of `inverted_batch_norm` and its backward on CUDA, in Triton; a kernel of `inverted_batch_norm_sweeps`.

The same tensors as for `norm_triton`, computed in float32. Forward is one sweep, which may go over its input; backward
is two over the result and the gradient, the second of which may go over the gradient. Nothing else as large is
allocated.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from shoal.kernels.norm import norm_triton
from shoal.kernels.norm.norm_tiles import laid_out
from shoal.kernels.norm.norm_triton import dense
from shoal.lowlevel.triton_launch import on_device


def applies(source: torch.Tensor, y: torch.Tensor, activation: str) -> bool:
    """As `Sweeps.applies`."""
    return norm_triton.applies(source, y)


def forward_into(
    x: torch.Tensor,
    y: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    activation: str,
    slope: float,
) -> None:
    """As `Sweeps.forward_into`."""
    grid, (of_x, of_y) = laid_out(x, y)
    with on_device(x.device):
        _kernels().forward[grid.by_block](
            x, of_x, *dense(mean, scale, shift), y, of_y, slope, *grid.extent, activation, *grid.tile
        )


def backward_into(
    grad: torch.Tensor,
    result: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    inverse_deviation: torch.Tensor,
    frozen: bool,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Sweeps.backward_into`."""
    grid, (of_y, of_grad, of_result) = laid_out(y, grad, result)
    parts = y.new_empty((2, grid.parts, grid.channels), dtype=torch.float32)
    scale, shift, inverse_deviation = dense(scale, shift, inverse_deviation)
    with on_device(y.device):
        _kernels().sums[grid.by_part](
            grad, of_grad, y, of_y, shift, *parts, slope, *grid.extent, *grid.shares, activation, *grid.tile
        )
        centred, of_shift = parts.sum(1, dtype=torch.float64)
        of_scale = centred / scale
        _kernels().result[grid.by_block](
            grad,
            of_grad,
            y,
            of_y,
            result,
            of_result,
            scale,
            shift,
            inverse_deviation,
            of_scale,
            of_shift,
            float(y.numel() // grid.channels),
            slope,
            *grid.extent,
            frozen,
            activation,
            *grid.tile,
        )
    return of_scale, of_shift


@cache
def _kernels() -> ModuleType:
    return import_module("shoal.kernels.invertible_norm.inverted_batch_norm_triton_kernels")
