"""Ops whose results PyTorch leaves in a larger storage, in which they were computed: here they get one of their size.

The mean of all squares is a number that holds the memory of all squares, and `F.fold` holds as much as it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _copied(op: Any) -> Callable[..., Tensor]:
    """The op, of which a copy is returned."""

    def copied(*args: Any) -> Tensor:
        return op(*args).clone()

    copied.__name__ = copied.__qualname__ = str(op.overloadpacket.__name__)
    copied.__doc__ = f"`{op}`."
    return copied


def col2im(windows: Tensor, output_size: Sequence[int], kernel_size: Sequence[int], *args: Any) -> Tensor:
    """`aten.col2im`, which `F.fold` and the gradient of `F.unfold` are, computed in a tensor of the result's size.

    >>> col2im(torch.ones(1, 9, 16), [4, 4], [3, 3], [1, 1], [1, 1], [1, 1]).untyped_storage().nbytes()
    64
    """
    *batch, rows, _ = windows.shape
    result = windows.new_empty((*batch, rows // prod(kernel_size), *output_size))
    return _aten.col2im.out(windows, output_size, kernel_size, *args, out=result)


_LOSSES = (
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default,
)
OWN = {op: _copied(op) for op in _LOSSES} | {_aten.col2im.default: col2im}
"""The functions by the op that each stands for."""
