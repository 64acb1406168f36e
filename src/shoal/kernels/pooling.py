"""Max pooling that saves one byte per output, a few images at a time: no int64 index of the whole batch exists.

Where its input comes from a ReLU, the byte also holds the ReLU's mask: its gradient passes where the maximum is
not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from shoal.codecs import pool_index
from shoal.kernels.memory_format import channels_last_format, suggested_memory_format
from shoal.kernels.relu import zeroed

_aten = torch.ops.aten
_PIECE_ELEMS = 1 << 16  # outputs in a piece: each int64 scratch is 512 KiB
_DEVICE_PIECE_ELEMS = 1 << 22  # where every piece costs launches of kernels: 32 MiB


def forward(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    after_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Max pooling of (N, C, ...): its result, and for each output the place of the winner within its window, uint8.

    With `after_relu`, a window whose maximum is zero has none.
    """
    pool = _aten.max_pool2d_with_indices if len(kernel) == 2 else _aten.max_pool3d_with_indices
    axes = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    sizes = [_outputs(*axis, ceil_mode) for axis in axes]
    windows = pool_index.Windows(x.shape, sizes, kernel, stride, padding, dilation, x.device)

    def of(some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The library's form that writes into given tensors takes five times as long.
        pooled, indices = pool(some, kernel, stride, padding, dilation, ceil_mode)
        codes = windows.encode(indices)
        if after_relu:
            none = pooled == 0
            if none.is_cpu:  # where filling by a mask takes ten times as long; NO_PLACE has all bits
                codes.bitwise_or_(none.view(torch.uint8).neg_())
            else:
                codes.masked_fill_(none, pool_index.NO_PLACE)
        return pooled, codes

    shape = (*x.shape[:2], *sizes)
    pieces = _pieces(shape, x.device)
    if len(pieces) == 1:
        return of(x)
    pooled = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=suggested_memory_format(x))
    codes = torch.empty_like(pooled, dtype=torch.uint8)
    for some in pieces:
        pooled[some], codes[some] = of(x[some])
    return pooled, codes


def backward(
    grad: torch.Tensor,
    codes: torch.Tensor,
    input_shape: Sequence[int],
    channels_last: bool,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    after_relu: bool,
) -> torch.Tensor:
    """Max pooling's backward from one-byte codes and the shape of its input; `after_relu`: and the ReLU's before it."""
    layout = channels_last_format(len(input_shape)) if channels_last else torch.contiguous_format
    result = torch.empty(tuple(input_shape), dtype=grad.dtype, device=grad.device, memory_format=layout)
    packet = _aten.max_pool2d_with_indices_backward if len(kernel) == 2 else _aten.max_pool3d_with_indices_backward
    geometry = (input_shape, codes.shape[2:], kernel, stride, padding, dilation)
    windows = pool_index.Windows(*geometry, codes.device)
    for some in _pieces(codes.shape, codes.device):
        indices = windows.decode(codes[some])
        given = grad[some]
        if after_relu:
            none = codes[some] == pool_index.NO_PLACE
            if given.is_cpu:  # from a contiguous gradient, as of `masked_fill`, the kernel copies its result back
                given = zeroed(given, none)
            else:
                given = given.masked_fill(none, 0)
            del none
        # The kernel reads only the sizes of the pool's input, so the result stands in for it.
        part = result[some]
        packet.grad_input(given, part, kernel, stride, padding, dilation, ceil_mode, indices, grad_input=part)
    return result


def _outputs(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """How many windows there are along an axis; rounding up makes none that begins in the padding behind the input."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (room + stride - 1 if ceil_mode else room) // stride + 1
    return count - (ceil_mode and (count - 1) * stride >= size + padding)


def _pieces(outputs: Sequence[int], device: torch.device) -> list[slice]:
    """Some images each; at least one piece, also of no images."""
    piece_elems = _PIECE_ELEMS if device.type == "cpu" else _DEVICE_PIECE_ELEMS
    images = max(1, piece_elems * outputs[0] // max(1, prod(outputs)))
    return [slice(start, start + images) for start in range(0, max(1, outputs[0]), images)]
