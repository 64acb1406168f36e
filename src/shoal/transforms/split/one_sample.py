"""Norms of a slice of one sample, whose strides PyTorch's kernel misreads.

A view of one sample in channels_last has any stride along the batch. Where it is not that of the layout, the CPU's
`native_batch_norm_backward` takes the tensor to be contiguous: the gradients of the weight and of the input are wrong.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.kernels.memory_format import channels_last_format, suggested_memory_format


def with_strides(x: torch.Tensor, contiguous: bool = False) -> torch.Tensor:
    """`x`, of one sample; its strides and those of its gradient say which layout they have.

    Args:
        x: (1, C, ...).
        contiguous: whether the gradient is copied where it is not contiguous, as that of an instance norm of several
            samples is: a view of it would lose its strides again.

    >>> x = torch.ones(1, 3, 4, 5).to(memory_format=torch.channels_last)
    >>> x.view(x.shape).stride(), with_strides(x.view(x.shape)).stride()
    ((3, 1, 15, 3), (60, 1, 15, 3))
    """
    return _WithStrides.apply(x, contiguous)


class _WithStrides(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, contiguous: bool) -> torch.Tensor:
        ctx.contiguous = contiguous
        return _with_strides(x.detach())  # autograd would view an input that is returned

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.contiguous() if ctx.contiguous else _with_strides(grad), None


def _with_strides(x: torch.Tensor) -> torch.Tensor:
    if x.dim() not in (4, 5) or x.is_contiguous():
        return x
    layout = channels_last_format(x.dim())
    if not x.is_contiguous(memory_format=layout) or suggested_memory_format(x) == layout:
        return x
    return x.as_strided(x.shape, (x.numel(), *x.stride()[1:]))
