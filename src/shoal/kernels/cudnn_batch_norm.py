"""cuDNN's batch norm, which eager PyTorch runs on CUDA for float32, and for float16 with float32 weights.

AOTAutograd's graphs name PyTorch's native kernels, which round otherwise. `shoal.rewrites.norms` puts these
calls in their place where eager PyTorch would choose cuDNN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.lowlevel.cuda_calls import keeps_graph

_aten = torch.ops.aten


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    invstd: Tensor,
    reserve: Tensor | None,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Batch norm's backward in training mode: gradients of input, weight and bias, those that are wanted.

    Args:
        grad: laid out as `x`, (N, C, ...), contiguous or channels_last.
        weight, mean, invstd: (C,), as the forward pass had and saved them.
        reserve: what cuDNN keeps from the forward pass, uint8; None where that has no bytes.
        eps: as the forward pass had it.
        wanted: which of the three.
    """
    if reserve is None:
        reserve = x.new_empty(0, dtype=torch.uint8)
    elif keeps_graph():
        reserve = reserve.clone()  # as eager PyTorch does: cuDNN may write into it
    found = _aten.cudnn_batch_norm_backward.default(x, grad, weight, None, None, mean, invstd, eps, reserve)
    return tuple(one if asked else None for one, asked in zip(found, wanted, strict=True))


def functional(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """`cudnn_batch_norm` that leaves the running statistics as they are and returns new ones, before the reserve.

    `options`: whether it trains, momentum and eps.
    """
    moved = running_mean.clone(), running_var.clone()
    y, mean, invstd, reserve = _aten.cudnn_batch_norm.default(x, weight, bias, *moved, *options)
    return y, mean, invstd, *moved, reserve


def normalise(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """What `cudnn_batch_norm` in training mode returned for `x`: the same kernel again, on no running statistics."""
    y: Tensor = _aten.cudnn_batch_norm.default(x, weight, bias, None, None, True, 0.0, eps)[0]
    return y
