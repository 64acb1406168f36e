"""A convolution's gradient of its input without it, in fewer bytes and the same bits.

PyTorch's `convolution_backward` takes the input even for the input's gradient only, for which only its shape and
strides matter. On the CPU an anonymous mapping that is never touched, so that it takes no memory, stands in for it, and
the input can be freed before its gradient is allocated. On CUDA one element does that is expanded to the shape, as in
`torch.nn.grad`; where its layout would choose another one for the kernel, the input stays.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.kernels.memory_format import are_channels_last, suggested_memory_format
from shoal.kernels.pieces import span_elems

_convolution: Any = torch.convolution
_gradients: Any = torch.ops.aten.convolution_backward.default
_OF_INPUT = (True, False, False)


class ConvOptions(NamedTuple):
    """What `aten.convolution` takes after its bias."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


def input_gradient(
    grad: Tensor, weight: Tensor, input_shape: Sequence[int], input_stride: Sequence[int], *options: Any
) -> Tensor:
    """`aten.convolution_backward(grad, input, weight, ..., [True, False, False])[0]` without `input`.

    On the CPU a tensor that takes no memory stands in for it. cuDNN's gradient is a convolution the other way, which is
    asked for by that name: where strides of a stand-in are 0, PyTorch copies `grad` to another layout, and back.
    """
    shape = tuple(input_shape)
    stride, padding, dilation, transposed, _, groups = options
    if not grad.is_cpu and groups == 1:
        turned = _turned(shape, weight.shape, *map(tuple, (grad.shape, stride, padding, dilation)), transposed)
        if turned is not None and torch.backends.cudnn.enabled:
            return _convolution(grad, weight, None, stride, padding, dilation, not transposed, turned, 1)
    unread = (
        _unread(shape, tuple(input_stride), grad.dtype) if grad.is_cpu else grad.as_strided(shape, (0,) * len(shape))
    )
    gradient: Tensor = _gradients(grad, unread, weight, None, *options, _OF_INPUT)[0]
    return gradient


def resolved_input_gradient(
    grad: Tensor, weight: Tensor, input_shape: Sequence[int], input_stride: Sequence[int], *options: Any
) -> Callable[..., Tensor] | None:
    """`input_gradient` of tensors in these layouts, which may be fake, with what stands in for the input made once.

    Returns:
        It; None on another device than the CPU.
    """
    if not grad.is_cpu:
        return None
    unread = _unread(tuple(input_shape), tuple(input_stride), grad.dtype)

    def resolved(grad: Tensor, weight: Tensor, *_: Any) -> Tensor:
        return _gradients(grad, unread, weight, None, *options, _OF_INPUT)[0]

    return resolved


@lru_cache(maxsize=4096)
def _turned(
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    grad_shape: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
) -> tuple[int, ...] | None:
    """The output padding with which the convolution the other way has results of this shape; None: with none has it."""
    axes = zip(shape[2:], grad_shape[2:], weight_shape[2:], stride, padding, dilation, strict=True)
    extra = []
    for size, given, kernel, step, pad, spread in axes:
        reach = spread * (kernel - 1) + 1
        if transposed:
            extra.append(size - ((given + 2 * pad - reach) // step + 1))
        else:
            extra.append(size - ((given - 1) * step - 2 * pad + reach))
    fits = not any(extra) if transposed else all(0 <= more < step for more, step in zip(extra, stride, strict=True))
    return tuple(extra) if fits and 0 not in grad_shape else None


def can_do_without_input(grad: Tensor, x: Tensor, weight: Tensor, groups: int, *, on_cpu: bool) -> bool:
    """Whether `input_gradient` gives what PyTorch's gradient of an input of this layout would be; all may be fake.

    Args:
        on_cpu: whether it runs on the CPU of this machine.

    >>> x = torch.ones(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    >>> grad, weight = torch.ones(2, 4, 8, 8), torch.ones(4, 3, 1, 1)
    >>> can_do_without_input(grad, x, weight, 1, on_cpu=False)  # x only says that it is channels_last
    False
    >>> can_do_without_input(grad.contiguous(memory_format=torch.channels_last), x, weight, 1, on_cpu=False)
    True
    """
    if not x.is_contiguous() and not are_channels_last(x):
        return False
    told = (grad, weight) if groups == 1 else (weight,)
    return on_cpu or suggested_memory_format(x, weight) == suggested_memory_format(*told)


@lru_cache(maxsize=4096)
def _unread(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of that shape and layout that takes no memory as long as no one writes to it; it reads as zeros."""
    if 0 in shape:  # of an empty batch; no map is of zero bytes
        return torch.empty_strided(shape, stride, dtype=dtype)
    pages = mmap.mmap(-1, span_elems(shape, stride) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).as_strided(shape, stride)
