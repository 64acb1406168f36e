"""Dropout on the CPU with the bits that eager PyTorch gives, and a mask of one byte per element for its backward pass.

Eager PyTorch multiplies by noise that is 0 or 1 / (1 - p), rounded to the input's dtype; a capture of dropout instead
multiplies by a mask and then by a factor of higher precision, which is not the same in the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor


def noise_like(x: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """`torch.empty_like(x, dtype=dtype).bernoulli_(p)`: drawn in the layout of `x`, as in an eager in-place dropout.

    A capture makes it `torch.bernoulli`, which draws in a contiguous tensor: other numbers for each element.
    """
    return torch.empty_like(x, dtype=dtype).bernoulli_(p)


def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """What `torch.nn.functional.dropout(x, p)` gives on the CPU, and the mask of the elements that stayed."""
    return dropout_(x.clone(), p)


def dropout_(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """`dropout`, written over `x`."""
    mask = torch.empty_like(x, dtype=torch.bool)
    if p == 1:
        return x.mul_(0), mask.zero_()
    mask.bernoulli_(1 - p)
    return _scaled_(x, mask, p), mask


def dropout_backward(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    """The gradient of dropout's input."""
    return dropout_backward_(grad.clone(), mask, p)


def dropout_backward_(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    """`dropout_backward`, written over `grad`."""
    return _scaled_(grad, mask, p)


def _scaled_(x: Tensor, mask: Tensor, p: float) -> Tensor:
    factor = torch.ones((), dtype=x.dtype)
    if p == 1:
        return x.mul_(mask).mul_(factor.zero_())
    factor.div_(1 - p)
    if 1 / (1 - p) < torch.finfo(x.dtype).max:
        return x.mul_(mask).mul_(factor)
    return x.mul_(torch.where(mask, factor, 0.0))  # float16's factor is infinite, and 0 times that is NaN
