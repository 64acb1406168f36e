"""Batch norm's backward on CUDA in pieces, written over the incoming gradient: two tensors instead of three.

PyTorch's kernels return a gradient of their own. A piece at a time is copied over the incoming one:

- native, channels_last: `batch_norm_backward_reduce` over all, then `batch_norm_backward_elemt` on some pixels;
- native, contiguous: the whole kernel on some channels, which are independent;
- cuDNN's: the whole kernel on a copy of some channels.

A piece may be computed by another kernel than the whole, so `choose` tries on the device, with the same shapes, whether
pieces repeat its bits. They take more launches and sweeps, so only the gradients that set a step's peak are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from shoal.kernels import cudnn_batch_norm
from shoal.kernels.memory_format import channels_last_format
from shoal.kernels.pieces import WORTH_PIECES_BYTES, Cut, are_sizes_known, have_same_bits, repeats, spans

_aten = torch.ops.aten
_NATIVE = _aten.native_batch_norm_backward.default
_PIXELS, _CHANNELS = 0, 1
_PIECES = 8
Gradients = tuple[torch.Tensor | None, ...]


def native_backward(grad: torch.Tensor, *rest: Any) -> Gradients:
    """`aten.native_batch_norm_backward` in training mode, in that many pieces: of pixels (0) or of channels (1)."""
    return native_backward_(grad.clone(), *rest)


def native_backward_(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, _: None, __: None, *rest: Any
) -> Gradients:
    """`native_backward` that writes the gradient of the input over `grad`."""
    mean, invstd, train, eps, wanted, dim, pieces = rest
    if dim == _CHANNELS:

        def of(some: slice) -> Gradients:
            part = None if weight is None else weight[some]
            whole: Gradients = _NATIVE(
                grad[:, some], x[:, some], part, None, None, mean[some], invstd[some], train, eps, wanted
            )
            return whole

        return _by_channels(grad, mean, wanted, pieces, of)
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


def cudnn_backward(grad: torch.Tensor, *rest: Any) -> Gradients:
    """`cudnn_batch_norm.backward`, without a reserve, in that many pieces of channels."""
    return cudnn_backward_(grad.clone(), *rest)


def cudnn_backward_(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Gradients:
    """`cudnn_backward` that writes the gradient of the input over `grad`."""
    mean, invstd, reserve, eps, wanted, _, pieces = rest
    layout = torch.contiguous_format if x.is_contiguous() else channels_last_format(x.dim())

    def of(some: slice) -> Gradients:
        own_grad, own_x = (tensor[:, some].contiguous(memory_format=layout) for tensor in (grad, x))
        return cudnn_batch_norm.backward(own_grad, own_x, weight[some], mean[some], invstd[some], reserve, eps, wanted)

    return _by_channels(grad, mean, wanted, pieces, of)


def _by_channels(
    grad: torch.Tensor, like: torch.Tensor, wanted: Sequence[bool], pieces: int, of: Callable[[slice], Gradients]
) -> Gradients:
    of_layer = [torch.empty_like(like) if asked else None for asked in wanted[1:]]
    for some in spans(grad.shape[1], pieces):
        of_input, *of_some = of(some)
        assert of_input is not None
        grad[:, some].copy_(of_input)
        for whole, part in zip(of_layer, of_some, strict=True):
            if whole is not None and part is not None:
                whole[some].copy_(part)
        del of_input  # before the next is allocated
    return grad, *of_layer


IN_PIECES: dict[Any, Callable[..., Gradients]] = {_NATIVE: native_backward, cudnn_batch_norm.backward: cudnn_backward}
"""What computes each in pieces."""


def choose(whole: Callable[..., Any], arguments: Sequence[Any]) -> Cut | None:
    """How batch norm's backward is cut into pieces on CUDA; None: not at all.

    It is cut where its tensors have 4 MiB and more, and pieces repeat its bits on the device with these shapes.

    Args:
        whole: `aten.native_batch_norm_backward.default` or `cudnn_batch_norm.backward`.
        arguments: its arguments. Tensors may be fake: only their shapes, strides, dtypes and devices are read.

    Returns:
        What `IN_PIECES[whole]` takes besides, and what that saves.
    """
    cut = cut_elsewhere(whole, arguments)
    x = arguments[1]
    if cut is None or x.device.type != "cuda":
        return None
    weight, mean, _, wanted = _settings(whole, arguments)
    layout = tuple(x.shape), x.stride()
    dtypes = x.dtype, None if weight is None else weight.dtype, mean.dtype
    same = _repeats_bits(whole, layout, dtypes, x.device, tuple(wanted), cut.dim, cut.count)
    return cut if same else None


def cut_elsewhere(whole: Callable[..., Any], arguments: Sequence[Any]) -> Cut | None:
    """`choose` for a GPU that is not here, on which it cannot be tried whether pieces repeat the bits."""
    grad, x = arguments[:2]
    if not are_sizes_known(grad, x):
        return None
    _, _, trains, wanted = _settings(whole, arguments)
    nbytes = x.numel() * x.element_size()
    if not trains or not wanted[0] or nbytes < WORTH_PIECES_BYTES or x.dim() < 3:
        return None
    if grad.stride() != x.stride() or grad.dtype != x.dtype or x.shape[1] < 2:
        return None
    channels_last = not x.is_contiguous()
    if channels_last and (x.dim() == 3 or not x.is_contiguous(memory_format=channels_last_format(x.dim()))):
        return None
    dim = _PIXELS if whole is _NATIVE and channels_last else _CHANNELS
    pieces = _PIECES if dim == _PIXELS else min(_PIECES, x.shape[1])
    pieces_held = 1 if whole is _NATIVE else 3  # with copies of both operands
    saved_bytes = nbytes - pieces_held * nbytes // pieces
    return Cut(dim, pieces, saved_bytes) if saved_bytes > 0 else None


def _settings(whole: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, Any, bool, Sequence[bool]]:
    """Weight, mean, whether it trains, and which gradients are wanted."""
    if whole is _NATIVE:
        return arguments[2], arguments[5], arguments[7], arguments[9]
    return arguments[2], arguments[3], arguments[5] is None, arguments[7]


@lru_cache(maxsize=256)
def _repeats_bits(
    whole: Callable[..., Any],
    layout: tuple[tuple[int, ...], tuple[int, ...]],
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype],
    device: torch.device,
    wanted: tuple[bool, ...],
    dim: int,
    pieces: int,
) -> bool:
    """Whether pieces give the bits of the whole on this device; False where it has no room to find out."""

    def compare(generator: torch.Generator) -> bool:
        grad, x = (torch.empty_strided(*layout, dtype=dtypes[0], device=device) for _ in range(2))
        for tensor in (grad, x):
            tensor.normal_(generator=generator)
        weight = None if dtypes[1] is None else torch.linspace(0.5, 2, x.shape[1], dtype=dtypes[1], device=device)
        dims = [0, *range(2, x.dim())]
        mean = x.float().mean(dims).to(dtypes[2])
        invstd = torch.rsqrt(x.float().var(dims, correction=0) + 1e-5).to(dtypes[2])
        if whole is _NATIVE:
            arguments: tuple[Any, ...] = (grad, x, weight, None, None, mean, invstd, True, 1e-5, list(wanted))
        else:
            arguments = (grad, x, weight, mean, invstd, None, 1e-5, list(wanted))
        expected = whole(*arguments)
        return have_same_bits(IN_PIECES[whole](*arguments, dim, pieces), expected)

    return repeats(device, compare)
