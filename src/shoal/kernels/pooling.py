"""Max pooling that saves one byte per output.

Where its input comes from a ReLU, the byte also holds the ReLU's mask: its gradient passes where the maximum is
not zero.

One sweep each way where `pooling_sweeps` applies. The reference is PyTorch's own kernels, a few images at a time, so
that no int64 index of the whole batch exists; the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from shoal.codecs import pool_index
from shoal.kernels.memory_format import channels_last_format, suggested_memory_format
from shoal.kernels.pooling_sweeps import NATIVE, TRITON, Options
from shoal.kernels.relu import zeroed
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register

_aten = torch.ops.aten
_PIECE_ELEMS = 1 << 16  # outputs in a piece: each int64 scratch is 512 KiB
_DEVICE_PIECE_ELEMS = 1 << 22  # where every piece costs launches of kernels: 32 MiB


def forward(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Max pooling of (N, C, ...): its result, and for each output the place of the winner within its window, uint8.

    `rest`: kernel, stride, padding, dilation and ceil_mode of the pooling, and whether a ReLU comes before it: a window
    whose maximum is zero then has none.
    """
    *options, after_relu = rest
    *window, ceil_mode = options
    sizes = [_outputs(*of_axis, ceil_mode=ceil_mode) for of_axis in zip(x.shape[2:], *window, strict=True)]
    layout = suggested_memory_format(x)
    implementation = choose(_OP, layout, window[-1], x)
    result: tuple[torch.Tensor, torch.Tensor] = implementation.forward(x, sizes, layout, options, after_relu)
    return result


def backward(
    grad: torch.Tensor, codes: torch.Tensor, input_shape: Sequence[int], channels_last: bool, *rest: Any
) -> torch.Tensor:
    """Max pooling's backward from one-byte codes and the shape of its input, and the ReLU's before it if there is one.

    `rest`: as of `forward`.
    """
    *options, after_relu = rest
    layout = channels_last_format(len(input_shape)) if channels_last else torch.contiguous_format
    result = torch.empty(tuple(input_shape), dtype=grad.dtype, device=grad.device, memory_format=layout)
    if result.numel():
        choose(_OP, layout, options[3], grad, codes).backward(grad, codes, result, options, after_relu)
    return result


class _PoolingByPyTorch:
    """PyTorch's kernels, whose int64 indices exist for a piece at a time."""

    @staticmethod
    def forward(
        x: torch.Tensor, sizes: Sequence[int], layout: torch.memory_format, options: Options, after_relu: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pool = _aten.max_pool2d_with_indices if len(sizes) == 2 else _aten.max_pool3d_with_indices
        windows = pool_index.Windows(x.shape, sizes, *options[:4], device=x.device)

        def of(some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # The library's form that writes into given tensors takes five times as long.
            pooled, indices = pool(some, *options)
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
        pooled = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
        codes = torch.empty_like(pooled, dtype=torch.uint8)
        for some in pieces:
            pooled[some], codes[some] = of(x[some])
        return pooled, codes

    @staticmethod
    def backward(
        grad: torch.Tensor, codes: torch.Tensor, result: torch.Tensor, options: Options, after_relu: bool
    ) -> None:
        two = result.dim() == 4
        packet = _aten.max_pool2d_with_indices_backward if two else _aten.max_pool3d_with_indices_backward
        windows = pool_index.Windows(result.shape, codes.shape[2:], *options[:4], device=codes.device)
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
            packet.grad_input(given, part, *options, indices, grad_input=part)


def _outputs(size: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil_mode: bool) -> int:
    """How many windows there are along an axis; rounding up makes none that begins in the padding after the input."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (room + stride - 1 if ceil_mode else room) // stride + 1
    return count - (ceil_mode and (count - 1) * stride >= size + padding)


def _pieces(outputs: Sequence[int], device: torch.device) -> list[slice]:
    """Some images each; at least one piece, also of no images."""
    piece_elems = _PIECE_ELEMS if device.type == "cpu" else _DEVICE_PIECE_ELEMS
    images = max(1, piece_elems * outputs[0] // max(1, prod(outputs)))
    return [slice(start, start + images) for start in range(0, max(1, outputs[0]), images)]


_OP: DispatchedOp[Any] = register(
    "max_pool",
    _PoolingByPyTorch,
    Implementation("triton", TRITON, TRITON.applies),
    Implementation("native", NATIVE, NATIVE.applies),
)
