"""PReLU over its input, and its backward over the incoming gradient: the bits of PyTorch's kernels.

PyTorch's backward makes the gradient of the input and, as large as that, the summands of the slope's. Here the first
lies over the incoming gradient, and the second is added up and gone within the op.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_PIECE_ELEMS = 1 << 16  # 256 KiB of float32: five of a piece stay in L2
_aten = torch.ops.aten


def forward_(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`torch._prelu_kernel` that writes over `x`, (N, C, ...); `weight` broadcasts over it: (1, C or 1, 1, ...)."""
    for piece, slope in _pieces(x, weight):
        piece.copy_(_aten._prelu_kernel(piece, slope))
    return x


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dims: list[int], keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of a PReLU's input, and that of its slope, summed over `dims`.

    Args:
        grad, x: (N, C, ...) of one layout.
        weight: as for `forward_`.
        dims, keepdim: as for `torch.sum`.
    """
    of_input, summands = _aten._prelu_kernel_backward(grad, x, weight)
    return of_input, summands.sum(dims, keepdim)


def backward_(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dims: list[int], keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`backward` that writes the gradient of the input over `grad`."""
    if grad.stride() != x.stride():
        of_input, of_weight = backward(grad, x, weight, dims, keepdim)
        return grad.copy_(of_input), of_weight
    summands = torch.empty_like(grad)
    triples = zip(_pieces(grad, weight), _pieces(x, weight), _pieces(summands, weight), strict=True)
    for (of_piece, slope), (piece, _), (summand, _) in triples:
        of_input, of_slope = _aten._prelu_kernel_backward(of_piece, piece, slope)
        of_piece.copy_(of_input)
        summand.copy_(of_slope)
    return grad, summands.sum(dims, keepdim)


def _pieces(x: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views that cover `x`, each with the slopes that broadcast over it."""
    channels = x.shape[1] if x.dim() > 1 else 1
    rows = x.movedim(1, -1) if x.dim() > 1 else x
    if x.device.type != "cpu" or not (x.is_contiguous() or rows.is_contiguous()):
        yield x, weight
    elif weight.numel() == 1:
        slope = weight.view(1)
        for piece in x.as_strided((x.numel(),), (1,)).split(_PIECE_ELEMS):
            yield piece, slope
    elif not x.is_contiguous() or x.dim() == 2:
        for piece in rows.reshape(-1, channels).split(max(1, _PIECE_ELEMS // channels)):
            yield piece, weight.view(1, channels)
    else:
        planes = x.view(x.shape[0] * channels, -1)
        slopes = weight.view(channels, 1)
        for place, plane in enumerate(planes):
            for piece in plane.split(_PIECE_ELEMS):
                yield piece, slopes[place % channels]
