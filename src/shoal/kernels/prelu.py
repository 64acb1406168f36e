"""PReLU over its input, and its gradients over the incoming one: two tensors instead of four.

PyTorch's kernel makes the gradient of the input and, as large as that, the summands of the slope's. `backward_` has its
bits: the first lies over the incoming gradient, and the second is added up and gone within the op. `in_pieces` makes a
piece of both at a time; the sum is then in another order, each piece's in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.kernels.memory_format import are_channels_last
from shoal.kernels.pieces import WORTH_PIECES_BYTES, Cut, are_sizes_known, spans, tiles

_aten = torch.ops.aten
_WHOLE = _aten._prelu_kernel_backward.default
_ELEMENTS, _CHANNELS = 0, 1
_PIECES = 8
Gradients = tuple[Tensor, Tensor]


def forward_(x: Tensor, weight: Tensor) -> Tensor:
    """`torch._prelu_kernel` that writes over `x`, (N, C, ...); `weight` broadcasts over it: (1, C or 1, 1, ...)."""
    for piece, slope in tiles(x, weight.expand_as(x)):
        piece.copy_(_aten._prelu_kernel(piece, slope))
    return x


def backward(grad: Tensor, x: Tensor, weight: Tensor, dims: list[int], keepdim: bool) -> Gradients:
    """The gradient of a PReLU's input, and that of its slope, summed over `dims`.

    Args:
        grad, x: (N, C, ...) of one layout.
        weight: as for `forward_`.
        dims, keepdim: as for `torch.sum`.
    """
    of_input, summands = _WHOLE(grad, x, weight)
    return of_input, summands.sum(dims, keepdim)


def backward_(grad: Tensor, x: Tensor, weight: Tensor, dims: list[int], keepdim: bool) -> Gradients:
    """`backward` that writes the gradient of the input over `grad`."""
    if grad.stride() != x.stride():
        of_input, of_weight = backward(grad, x, weight, dims, keepdim)
        return grad.copy_(of_input), of_weight
    summands = torch.empty_like(grad)
    for of_piece, piece, summand, slope in tiles(grad, x, summands, weight.expand_as(x)):
        of_input, of_slope = _WHOLE(of_piece, piece, slope)
        of_piece.copy_(of_input)
        summand.copy_(of_slope)
    return grad, summands.sum(dims, keepdim)


def in_pieces(grad: Tensor, x: Tensor, *rest: Any) -> Gradients:
    """`backward` of a dense input, in that many pieces: of elements (0) or of channels (1).

    The incoming gradient has its layout, or is some channels of a contiguous tensor, and the input is contiguous.
    """
    form = torch.contiguous_format if is_part(grad, x) else torch.preserve_format
    return in_pieces_(grad.clone(memory_format=form), x, *rest)


def in_pieces_(
    grad: Tensor, x: Tensor, weight: Tensor, dims: list[int], keepdim: bool, dim: int, pieces: int
) -> Gradients:
    """`in_pieces` that writes the gradient of the input over `grad`."""
    if grad.stride() != x.stride():
        of_input, of_weight = backward(grad, x, weight, dims, keepdim)
        return grad.copy_(of_input), of_weight
    wide = torch.promote_types(grad.dtype, torch.float32)
    of_slope = torch.zeros(weight.numel(), dtype=wide, device=grad.device)
    for of_piece, piece, some in _views(grad, x, weight, dim, pieces):
        slopes = weight.view(-1)[some].view(1, -1, *[1] * (piece.dim() - 2)) if piece.dim() > 1 else weight.view(1)
        of_input, summands = _WHOLE(of_piece, piece, slopes)
        of_piece.copy_(of_input)
        del of_input  # before the sum, which may take scratch
        summed = [axis for axis in range(piece.dim()) if axis != 1 or weight.numel() == 1]
        of_slope[some] += summands.sum(summed, dtype=wide)
        del summands
    shape = torch.empty_like(grad, device="meta").sum(dims, keepdim).shape
    return grad, of_slope.to(grad.dtype).view(shape)


def _views(grad: Tensor, x: Tensor, weight: Tensor, dim: int, pieces: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Views of both that cover them, and which slopes are theirs."""
    if dim == _CHANNELS:
        for some in spans(x.shape[1], pieces):
            yield grad[:, some], x[:, some], some
        return
    every = slice(0, weight.numel())
    if weight.numel() == 1:
        of_rows, rows = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in (grad, x))
    else:  # channels_last: a pixel after the other
        of_rows, rows = (tensor.movedim(1, -1).reshape(-1, tensor.shape[1]) for tensor in (grad, x))
    for some in spans(rows.shape[0], pieces):
        yield of_rows[some], rows[some], every


def is_part(grad: Tensor, x: Tensor) -> bool:
    """Whether an incoming gradient is some channels of a contiguous tensor, as after a concatenation, and `x` is as
    contiguous.
    """
    return x.is_contiguous() and grad.stride() != x.stride() and grad.stride()[1:] == x.stride()[1:]


IN_PIECES: dict[Any, Callable[..., Gradients]] = {backward: in_pieces}
"""What computes it in pieces."""


def choose(whole: Callable[..., Any], arguments: Sequence[Any]) -> Cut | None:
    """How PReLU's gradients are cut into pieces; None: not at all.

    They are cut where a tensor has 4 MiB and more, and those of the input and the incoming gradient are dense and of
    one layout; or the input is contiguous and the incoming gradient is some channels of a larger one, which is copied.

    Args:
        whole: `backward`, or PyTorch's kernel, which takes as many.
        arguments: its arguments. Tensors may be fake: only their shapes, strides, dtypes and devices are read.

    Returns:
        What `in_pieces` takes besides, and what that saves.
    """
    grad, x, weight = arguments[:3]
    if not are_sizes_known(grad, x) or x.dim() < 2:
        return None
    if grad.stride() != x.stride() and not is_part(grad, x):
        return None
    if x.nbytes < WORTH_PIECES_BYTES or not (grad.dtype == x.dtype == weight.dtype):
        return None
    if not x.is_contiguous() and not are_channels_last(x):
        return None
    by_channels = weight.numel() > 1 and x.is_contiguous()
    count = min(_PIECES, x.shape[1]) if by_channels else _PIECES
    if count < 2:
        return None
    # On the CPU the first lies over the incoming gradient already; if that is part of a larger tensor it has its own
    # memory.
    held = 2 if whole is not backward and grad.stride() == x.stride() else 1
    saved_bytes = held * x.nbytes - 2 * -(-x.nbytes // count)
    return Cut(_CHANNELS if by_channels else _ELEMENTS, count, saved_bytes, reordered=True)


cut_elsewhere = choose
"""`choose` for a GPU that is not here."""
