"""Tensors in another dtype, several by one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.kernels.memory_format import in_traced_layout
from shoal.lowlevel.torch_state import new_tensors


def cast_together(
    tensors: Sequence[Tensor], dtype: torch.dtype, strides: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    """`tuple(x.to(dtype, copy=True) for x in tensors)`, of tensors of one dtype, by few launches.

    Args:
        tensors: of one dtype and device.
        dtype: another one.
        strides: of each result; they lead to the same elements as the tensor's own do, which may differ along an axis
            of one element: PyTorch's kernel wants both to be written alike.

    >>> cast_together([torch.ones(2), torch.zeros(2, 2)], torch.bfloat16, [(1,), (2, 1)])[0]
    tensor([1., 1.], dtype=torch.bfloat16)
    """
    layouts = [(tuple(x.shape), tuple(each), dtype) for x, each in zip(tensors, strides, strict=True)]
    return cast_into([in_traced_layout(x, each) for x, each in zip(tensors, strides, strict=True)], layouts)


def cast_into(
    tensors: list[Tensor], layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
) -> tuple[Tensor, ...]:
    """Copies of tensors in new ones of these layouts.

    Args:
        tensors: of one dtype and device.
        layouts: sizes, strides and dtype of each copy; the strides are those of the tensor.

    >>> cast_into([torch.ones(2)], [((2,), (1,), torch.bfloat16)])[0]
    tensor([1., 1.], dtype=torch.bfloat16)
    """
    made = new_tensors(tensors[0].device, layouts)
    torch._foreach_copy_(made, tensors)
    return tuple(made)
