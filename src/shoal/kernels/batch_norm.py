"""Batch norm in fewer bytes and the same bits: its result recomputed from its statistics, its gradient in place.

PyTorch's CPU kernel normalises as `x * scale + shift` with `scale = invstd * weight` and `shift = bias - mean * scale`,
each a fused multiply-add: `torch.addcmul` does the same arithmetic in one pass, in place where the input has no later
reader. Its backward kernel allocates the gradient twice. In channels_last it is called for the two sums alone, which
allocates nothing, and the rest is elementwise, in pieces and in place over the incoming gradient. In the contiguous
layout channels are independent, so it runs on a few channels at a time. `repeats_bits` and `backward_repeats_bits` test
on this machine that the bits are the same.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from shoal.kernels.memory_format import channels_last_format
from shoal.lowlevel.torch_internals import isolated

_PIECE_ELEMS = 1 << 18  # 1 MiB of float32: a piece stays in L2 through its passes
_CHANNELS_ELEMS = 1 << 19  # and twice that where a piece is copied out and back, but no less than 16 pieces
_MIN_PIECES = 16
WORTH_PIECES_BYTES = 4 << 20  # contiguous tensors below this are not worth pieces


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> torch.Tensor:
    """What `batch_norm` in training mode returned for `x`, (N, C, ...), given the statistics it saved, (C,).

    `x` is contiguous or channels_last.
    """
    scale, shift = _line(x, weight, bias, mean, invstd)
    layout = torch.contiguous_format if x.is_contiguous() else channels_last_format(x.dim())
    return torch.addcmul(shift, x, scale, out=torch.empty_like(x, memory_format=layout))


def normalise_(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> torch.Tensor:
    """`normalise` that writes over `x`."""
    scale, shift = _line(x, weight, bias, mean, invstd)
    return torch.addcmul(shift, x, scale, out=x)


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch norm's backward in training mode, channels_last or contiguous: gradients of input, weight and bias."""
    return backward_(grad.clone(memory_format=torch.preserve_format), x, weight, mean, invstd)


def backward_(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`backward` that writes the gradient of the input over `grad`."""
    if x.shape[2:].numel() == 1:  # PyTorch adds single pixels up in another order on a few channels than on all
        return _whole_backward(grad, x, weight, mean, invstd)
    if x.is_contiguous() and grad.is_contiguous():
        return _backward_by_channels(grad, x, weight, mean, invstd, min(_CHANNELS_ELEMS, x.numel() // _MIN_PIECES))
    layout = channels_last_format(x.dim())
    if not (grad.is_contiguous(memory_format=layout) and x.is_contiguous(memory_format=layout)):
        return _whole_backward(grad, x, weight, mean, invstd)
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    channels = x.shape[1]
    rows = x.numel() // channels
    projection, mean_grad = of_weight * invstd / rows, of_bias / rows
    grad_rows = grad.movedim(1, -1).view(rows, channels)
    x_rows = x.movedim(1, -1).view(rows, channels)
    step = max(1, _PIECE_ELEMS // channels)
    for start in range(0, rows, step):
        piece = grad_rows[start : start + step]
        centred = x_rows[start : start + step] - mean
        piece.sub_(mean_grad).addcmul_(centred, projection, value=-1).mul_(invstd).mul_(weight)
    return grad, of_weight, of_bias


def _backward_by_channels(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    piece_elems: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    channels = x.shape[1]
    step = max(1, piece_elems // (x.numel() // channels))
    if step >= channels:
        return _whole_backward(grad, x, weight, mean, invstd)
    of_weight, of_bias = torch.empty_like(weight), torch.empty_like(weight)
    for start in range(0, channels, step):
        some = slice(start, start + step)
        grad[:, some], of_weight[some], of_bias[some] = _whole_backward(
            grad[:, some].contiguous(), x[:, some].contiguous(), weight[some], mean[some], invstd[some]
        )
    return grad, of_weight, of_bias


def _whole_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, invstd, True, 0.0, [True, True, True]
    )
    return whole


@lru_cache(maxsize=1024)
def backward_repeats_bits(
    dtype: torch.dtype, device: torch.device, dims: int, channels: int, channels_last: bool
) -> bool:
    """Whether `backward` gives the bits of batch norm's backward here, found out on random data of odd size."""
    with isolated(device):
        layout = channels_last_format(dims) if channels_last else torch.contiguous_format
        shape = (3, channels, *(7, 5, 3)[: dims - 2])
        grad, x = (_draw(seed, shape, dtype, device).contiguous(memory_format=layout) for seed in (1, 2))
        weight = _draw(3, (channels,), dtype, device)
        _, mean, deviation = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, weight, True, 0.1, 1e-5)
        whole = _whole_backward(grad, x, weight, mean, deviation)
        if channels_last:
            pieces = backward(grad, x, weight, mean, deviation)
        else:
            elems_of_two_channels = 2 * grad.numel() // channels
            pieces = _backward_by_channels(grad.clone(), x, weight, mean, deviation, elems_of_two_channels)
        return pieces[0].stride() == whole[0].stride() and all(
            torch.equal(ours, theirs) for ours, theirs in zip(pieces, whole, strict=True)
        )


@lru_cache(maxsize=1024)
def repeats_bits(
    dtype: torch.dtype, device: torch.device, dims: int, channels: int, channels_last: bool, affine: bool
) -> bool:
    """Whether `normalise` gives the bits of batch norm here, found out on random data of odd size."""
    with isolated(device):
        x = _draw(1, (3, channels, *(7, 5, 3)[: dims - 2]), dtype, device)
        if channels_last:
            x = x.contiguous(memory_format=channels_last_format(dims))
        weight = _draw(2, (channels,), dtype, device) if affine else None
        bias = _draw(3, (channels,), dtype, device) if affine else None
        whole = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
        again = normalise(x, weight, bias, whole[1], whole[2])
        same = torch.equal(again, whole[0]) and again.stride() == whole[0].stride()
        return same and torch.equal(normalise_(x, weight, bias, whole[1], whole[2]), whole[0])


def _draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator(device="cpu").manual_seed(seed))
    return (drawn * 3 + 1).to(device=device, dtype=dtype)


def _line(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = invstd if weight is None else invstd * weight
    shift = torch.addcmul(torch.zeros_like(mean) if bias is None else bias, mean, scale, value=-1)
    per_channel = (1, -1, *[1] * (x.dim() - 2))
    return scale.view(per_channel), shift.view(per_channel)
