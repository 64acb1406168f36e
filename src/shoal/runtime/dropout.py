"""Dropout on the CPU with the bits that eager PyTorch gives, and a mask of one byte per element for its backward pass.

Eager PyTorch multiplies by noise that is 0 or 1 / (1 - p), rounded to the input's dtype; a capture of dropout instead
multiplies by a mask and then by a factor of higher precision, which is not the same in the last bit.
"""

from __future__ import annotations

import torch


def dropout(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What `torch.nn.functional.dropout(x, p)` gives on the CPU, and the mask of the elements that stayed."""
    return dropout_(x.clone(), p)


def dropout_(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`dropout`, written over `x`."""
    mask = torch.empty_like(x, dtype=torch.bool)
    if p == 1:
        return x.mul_(0), mask.zero_()
    mask.bernoulli_(1 - p)
    return x.mul_(mask).mul_(_factor(x, p)), mask


def dropout_backward(grad: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """The gradient of dropout's input."""
    return dropout_backward_(grad.clone(), mask, p)


def dropout_backward_(grad: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """`dropout_backward`, written over `grad`."""
    return grad.mul_(mask).mul_(_factor(grad, p))


def _factor(like: torch.Tensor, p: float) -> torch.Tensor:
    factor = torch.ones((), dtype=like.dtype)
    return factor.zero_() if p == 1 else factor.div_(1 - p)
