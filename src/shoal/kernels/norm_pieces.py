"""A norm's backward on CUDA in pieces, written over the incoming gradient: two tensors instead of three.

PyTorch's kernels return a gradient of their own. A piece at a time is copied over the incoming one:

- native batch norm, channels_last: `batch_norm_backward_reduce` over all, then `batch_norm_backward_elemt` on some
  pixels;
- native batch norm, contiguous: the whole kernel on some channels, which are independent;
- cuDNN's: the whole kernel on a copy of some channels;
- group norm: the gradients of weight and bias, then the input's, some groups of one sample at a time.

A piece may be computed by another kernel than the whole, so `choose` tries on the device, with the same shapes, whether
pieces repeat its bits. They take more launches and sweeps, so only the gradients that set a step's peak are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.kernels import cudnn_batch_norm
from shoal.kernels.batch_norm import by_channels
from shoal.kernels.group_norm import backward_in_pieces
from shoal.kernels.memory_format import are_channels_last, channels_last_format
from shoal.kernels.pieces import WORTH_PIECES_BYTES, Cut, are_sizes_known, bytes_of, repeats_bits, spans

_aten = torch.ops.aten
_NATIVE = _aten.native_batch_norm_backward.default
_OF_GROUPS = _aten.native_group_norm_backward.default
_PIXELS, _CHANNELS = 0, 1
_PIECES = 8  # of group norms: of a sample
Gradients = tuple[Tensor | None, ...]


def native_backward(grad: Tensor, *rest: Any) -> Gradients:
    """`aten.native_batch_norm_backward` in training mode, in that many pieces: of pixels (0) or of channels (1)."""
    return native_backward_(grad.clone(), *rest)


def native_backward_(grad: Tensor, x: Tensor, weight: Tensor | None, _: None, __: None, *rest: Any) -> Gradients:
    """`native_backward` that writes the gradient of the input over `grad`."""
    mean, invstd, train, eps, wanted, dim, pieces = rest
    if dim == _CHANNELS:

        def of(some: slice) -> Gradients:
            part = None if weight is None else weight[some]
            whole: Gradients = _NATIVE(
                grad[:, some], x[:, some], part, None, None, mean[some], invstd[some], train, eps, wanted
            )
            return whole

        return by_channels(grad, mean, wanted, pieces, of)
    sums = _aten.batch_norm_backward_reduce.default(grad, x, mean, invstd, weight, True, wanted[1], wanted[2])
    of_grad, of_grad_x, *of_layer = sums
    channels = x.shape[1]
    rows = x.numel() // channels
    count = torch.full((1,), rows, dtype=torch.int32, device=x.device)
    grad_rows, x_rows = (tensor.movedim(1, -1).view(rows, channels) for tensor in (grad, x))
    for some in spans(rows, pieces):
        piece = grad_rows[some]
        operands = (piece, x_rows[some], mean, invstd, weight, of_grad, of_grad_x, count)
        piece.copy_(_aten.batch_norm_backward_elemt.default(*operands))
    return grad, *(one if asked else None for one, asked in zip(of_layer, wanted[1:], strict=True))


def cudnn_backward(grad: Tensor, *rest: Any) -> Gradients:
    """`cudnn_batch_norm.backward`, without a reserve, in that many pieces of channels."""
    return cudnn_backward_(grad.clone(), *rest)


def cudnn_backward_(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Gradients:
    """`cudnn_backward` that writes the gradient of the input over `grad`."""
    mean, invstd, reserve, eps, wanted, _, pieces = rest
    layout = torch.contiguous_format if x.is_contiguous() else channels_last_format(x.dim())

    def of(some: slice) -> Gradients:
        own_grad, own_x = (tensor[:, some].contiguous(memory_format=layout) for tensor in (grad, x))
        return cudnn_batch_norm.backward(own_grad, own_x, weight[some], mean[some], invstd[some], reserve, eps, wanted)

    return by_channels(grad, mean, wanted, pieces, of)


def group_backward(grad: Tensor, *rest: Any) -> Gradients:
    """`aten.native_group_norm_backward` of contiguous tensors, in that many pieces of each sample's groups."""
    return group_backward_(grad.clone(), *rest)


def group_backward_(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *rest: Any) -> Gradients:
    """`group_backward` that writes the gradient of the input over `grad`."""
    *settings, _, pieces = rest  # sizes, groups, and what is wanted; along which dimension
    if not (grad.is_contiguous() and x.is_contiguous()):
        of_input, *others = _OF_GROUPS(grad, x, mean, invstd, weight, *settings)
        return grad.copy_(of_input), *others
    return backward_in_pieces(grad, x, weight, mean, invstd, -(-mean.shape[1] // pieces))


IN_PIECES: dict[Any, Callable[..., Gradients]] = {
    _NATIVE: native_backward,
    cudnn_batch_norm.backward: cudnn_backward,
    _OF_GROUPS: group_backward,
}
"""What computes each in pieces."""


def choose(whole: Callable[..., Any], arguments: Sequence[Any]) -> Cut | None:
    """How a norm's backward is cut into pieces on CUDA; None: not at all.

    It is cut where its tensors have 4 MiB and more, and pieces repeat its bits on the device with these shapes.

    Args:
        whole: `aten.native_batch_norm_backward.default`, `cudnn_batch_norm.backward` or
            `aten.native_group_norm_backward.default`.
        arguments: its arguments. Tensors may be fake: only their shapes, strides, dtypes and devices are read.

    Returns:
        What `IN_PIECES[whole]` takes besides, and what that saves.
    """
    cut = cut_elsewhere(whole, arguments)
    if cut is None or arguments[1].device.type != "cuda":
        return None
    return cut if repeats_bits(whole, IN_PIECES[whole], arguments, cut.dim, cut.count) else None


def cut_elsewhere(whole: Callable[..., Any], arguments: Sequence[Any]) -> Cut | None:
    """`choose` for a GPU that is not here, on which it cannot be tried whether pieces repeat the bits."""
    grad, x = arguments[:2]
    if not are_sizes_known(grad, x) or x.dim() < 3 or (nbytes := bytes_of(x)) < WORTH_PIECES_BYTES:
        return None
    if grad.stride() != x.stride() or grad.dtype != x.dtype:
        return None
    if whole is _OF_GROUPS:
        mean, weight, groups, wanted = (arguments[place] for place in (2, 4, 8, 9))
        pieces = min(_PIECES, groups)
        if not all(wanted) or weight is None or weight.dtype != mean.dtype or not x.is_contiguous():
            return None
        parts = x.shape[0] * pieces
        return Cut(_CHANNELS, pieces, nbytes - nbytes // parts) if parts > 1 else None
    wanted, trains = (arguments[9], arguments[7]) if whole is _NATIVE else (arguments[7], arguments[5] is None)
    channels_last = not x.is_contiguous()
    if not trains or not wanted[0] or x.shape[1] < 2:
        return None
    if channels_last and not are_channels_last(x):
        return None
    dim = _PIXELS if whole is _NATIVE and channels_last else _CHANNELS
    pieces = _PIECES if dim == _PIXELS else min(_PIECES, x.shape[1])
    pieces_held = 1 if whole is _NATIVE else 3  # with copies of both operands
    saved_bytes = nbytes - pieces_held * nbytes // pieces
    return Cut(dim, pieces, saved_bytes) if saved_bytes > 0 else None
