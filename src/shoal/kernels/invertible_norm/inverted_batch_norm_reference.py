"""The sweeps of `inverted_batch_norm` and its backward in pointwise ops of PyTorch: any dtype, device and activation.

What the kernels of `inverted_batch_norm_sweeps` are held against, and what runs where none applies. On the CPU they go
in pieces that stay in the cache, so that little but the result is allocated; on CUDA each pointwise op is a sweep.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

_PIECE_ELEMS = 1 << 17  # 512 KiB of float32: the operands and temporaries of a piece stay in the second cache
_LEAST_PIECES = 16  # so that temporaries are small beside small tensors too
_LEAST_ELEMS = 1 << 12


def applies(source: torch.Tensor, y: torch.Tensor, activation: str) -> bool:
    """As `Sweeps.applies`: always."""
    return True


def forward_into(
    x: torch.Tensor,
    y: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    activation: str,
    slope: float,
) -> None:
    """As `Sweeps.forward_into`."""
    for (source, _), (target, per_channel) in zip(_pieces(x), _pieces(y), strict=True):
        if x.dtype == scale.dtype:
            torch.sub(source, mean.view(per_channel), out=target)
            torch.addcmul(shift.view(per_channel), target, scale.view(per_channel), out=target)
            _activate_(target, activation, slope)
        else:
            z = source.to(scale.dtype).sub_(mean.view(per_channel))
            torch.addcmul(shift.view(per_channel), z, scale.view(per_channel), out=z)
            target.copy_(_activate_(z, activation, slope))


def backward_into(
    grad: torch.Tensor,
    result: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    inverse_deviation: torch.Tensor,
    frozen: bool,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Sweeps.backward_into`."""
    wide, inverse_scale = scale.dtype, scale.reciprocal()
    of_shift, of_scale = (torch.zeros_like(scale, dtype=torch.float64) for _ in range(2))

    def undone(y_piece: torch.Tensor, grad_piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z, of_z = undo_activation(y_piece.to(wide), grad_piece.to(wide), activation, slope)
        return z.sub_(shift.view(shape)).mul_(inverse_scale.view(shape)), of_z

    for (y_piece, shape), (grad_piece, _) in zip(_pieces(y), _pieces(grad), strict=True):
        normalised, of_z = undone(y_piece, grad_piece)
        dims = [dim for dim in range(y_piece.dim()) if shape[dim] == 1]
        of_shift += of_z.sum(dims)
        of_scale += normalised.mul_(of_z).sum(dims)
    rows = y.numel() // y.shape[1]
    slide, tilt = (of_shift / rows).to(wide), (of_scale / rows).to(wide)
    steep = scale * inverse_deviation
    for (y_piece, shape), (grad_piece, _), (target, _) in zip(_pieces(y), _pieces(grad), _pieces(result), strict=True):
        normalised, of_z = undone(y_piece, grad_piece)
        if not frozen:
            of_z = of_z.sub_(slide.view(shape)).sub_(normalised.mul_(tilt.view(shape)))
        target.copy_(of_z.mul_(steep.view(shape)))
    return of_scale, of_shift


def _activate_(z: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    if activation == "identity":
        return z
    return nn.functional.elu_(z, slope) if activation == "elu" else nn.functional.leaky_relu_(z, slope)


def undo_activation(
    y: torch.Tensor, grad: torch.Tensor, activation: str, slope: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What was activated, and its gradient; both new."""
    if activation == "identity":
        return y.clone(), grad.clone()
    if activation == "leaky_relu":
        z = torch.ops.aten.leaky_relu(y, 1 / slope)
        return z, torch.ops.aten.leaky_relu_backward(grad, y, slope, True)
    # Rounded to -alpha, the result has no inverse: the least that has one stands for it.
    least = torch.finfo(y.dtype).eps / 2 - 1
    z = torch.where(y > 0, y, torch.log1p((y / slope).clamp_(min=least, max=0)))
    return z, torch.ops.aten.elu_backward(grad, slope, 1, 1, True, y)


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Views of it that cover it, each with the shape in which a vector of its channels is broadcast over it."""
    channels = tensor.shape[1]
    elems = tensor.numel()
    if tensor.device.type == "cpu":
        elems = min(_PIECE_ELEMS, max(_LEAST_ELEMS, elems // _LEAST_PIECES))
    rows = tensor.movedim(1, -1)
    if tensor.numel() == 0:
        return
    if rows.is_contiguous():
        rows = rows.view(-1, channels)
        for piece in rows.split(max(1, elems // channels)):
            yield piece, (1, channels)
    elif tensor.is_contiguous():
        images = tensor.view(len(tensor), channels, -1)
        for piece in images.split(max(1, elems // images[0].numel())):
            yield piece, (1, channels, 1)
    else:
        yield tensor, (1, channels, *[1] * (tensor.dim() - 2))
