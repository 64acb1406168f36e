"""Max pooling that saves one byte per output, a few images at a time: no int64 index of the whole batch exists.

Where its input comes from a ReLU, the byte also holds the ReLU's mask: its gradient passes where the maximum is
not zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shoal.codecs import pool_index
from shoal.kernels.memory_format import channels_last_format, suggested_memory_format

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
    shape = [_outputs(*axis, ceil_mode) for axis in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)]
    pooled = torch.empty(
        (*x.shape[:2], *shape), dtype=x.dtype, device=x.device, memory_format=suggested_memory_format(x)
    )
    codes = torch.empty_like(pooled, dtype=torch.uint8)
    for some in _pieces(pooled):
        # The library's form that writes into given tensors takes five times as long.
        pooled[some], indices = pool(x[some], kernel, stride, padding, dilation, ceil_mode)
        codes[some] = pool_index.encode(indices, x.shape, kernel, stride, padding, dilation)
        if after_relu:
            codes[some].masked_fill_(pooled[some] == 0, pool_index.NO_PLACE)
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
    for some in _pieces(codes):
        indices = pool_index.decode(codes[some], input_shape, kernel, stride, padding, dilation)
        given = grad[some]
        if after_relu:
            given = given.masked_fill(codes[some] == pool_index.NO_PLACE, 0)
        # The kernel reads only the sizes of the pool's input, so the result stands in for it.
        part = result[some]
        packet.grad_input(given, part, kernel, stride, padding, dilation, ceil_mode, indices, grad_input=part)
    return result


def _outputs(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """How many windows there are along an axis; rounding up makes none that begins in the padding behind the input."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (room + stride - 1 if ceil_mode else room) // stride + 1
    return count - (ceil_mode and (count - 1) * stride >= size + padding)


def _pieces(outputs: torch.Tensor) -> Iterator[slice]:
    piece_elems = _PIECE_ELEMS if outputs.device.type == "cpu" else _DEVICE_PIECE_ELEMS
    images = max(1, piece_elems * outputs.shape[0] // max(1, outputs.numel()))
    for start in range(0, outputs.shape[0], images):
        yield slice(start, start + images)
