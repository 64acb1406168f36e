"""The gradient of a convolution's input without the input.

PyTorch's `convolution_backward` wants the input also where it is asked for the input's gradient alone, of which only
the shape and the layout matter. On the CPU a stretch of address space that no memory stands behind serves instead, so
that the input can be freed before its gradient is allocated.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import lru_cache

import torch


def input_gradient(
    grad: torch.Tensor,
    weight: torch.Tensor,
    input_shape: Sequence[int],
    input_stride: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """`aten.convolution_backward(grad, input, weight, ..., [True, False, False])[0]` on the CPU, without `input`."""
    unread = _unread(tuple(input_shape), tuple(input_stride), grad.dtype)
    gradient: torch.Tensor = torch.ops.aten.convolution_backward(
        grad, unread, weight, None, stride, padding, dilation, transposed, output_padding, groups, [True, False, False]
    )[0]
    return gradient


@lru_cache(maxsize=4096)
def _unread(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of that shape and layout that takes no memory as long as no one writes to it; it reads as zeros."""
    span_elems = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    pages = mmap.mmap(-1, span_elems * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).as_strided(shape, stride)
