"""Batch norm over slices of a batch: the passes over one slice, and what joins the vectors of all.

`shoal::joined_statistics` makes the statistics of the whole from `shoal::statistics` of its slices, and
`shoal::sliced_norm` normalises one of them, with the activation after it. Backward `shoal::joined_norm_gradients`
makes the vectors of the whole from `shoal::sliced_norm_sums` of the slices, and `shoal::sliced_norm_gradient` is the
gradient of one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shoal.kernels.memory_format import memory_format_of
from shoal.kernels.norm.norm_act import activated, activated_backward, moved_gradient_, normalised
from shoal.kernels.norm.norm_sweeps import NormAffine, NormMoves, sweeps
from shoal.lowlevel.direct_call import register_op


def _joined_statistics(
    means: list[torch.Tensor], variances: list[torch.Tensor], counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    shares = means[0].new_full((len(counts), 1), counts[0])  # filled there: a copy from the host would wait for it
    for place, count in enumerate(counts):
        if count != counts[0]:
            shares[place].fill_(count)
    shares.div_(sum(counts))
    every = torch.stack(means)
    mean = (every * shares).sum(0)
    return mean, ((every - mean).square_().add_(torch.stack(variances)) * shares).sum(0)


def _joined_statistics_fake(means: list[torch.Tensor], *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(means[0]), torch.empty_like(means[0])


def _joined_norm_gradients(
    of_scale: list[torch.Tensor],
    of_shift: list[torch.Tensor],
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    products, total = torch.stack(of_scale).sum(0), torch.stack(of_shift).sum(0)
    inverse = torch.rsqrt(variance + eps)
    share = inverse / -count if weight is None else inverse * weight / -count
    of_weight = products * inverse
    like = total if weight is None else weight
    return share * inverse * of_weight, share * total, of_weight.to(like.dtype), total.to(like.dtype)


def _joined_norm_gradients_fake(
    of_scale: Any, of_shift: Any, variance: torch.Tensor, weight: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    like = variance if weight is None else weight
    slope, constant = torch.empty_like(variance), torch.empty_like(variance)
    return slope, constant, torch.empty_like(like), torch.empty_like(like)


def sliced_norm(
    x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, activation: str
) -> torch.Tensor:
    """(x - mean) * scale + shift, (n, C, ...), with vectors of (C,), and an activation: see `ACTIVATIONS`.

    >>> one = torch.ones(1)
    >>> sliced_norm(torch.tensor([[[1.0, 5.0]]]), 3 * one, 2 * one, one, "relu")
    tensor([[[0., 5.]]])
    """
    written = torch.empty_like(x, memory_format=memory_format_of(x)).copy_(x)
    return sliced_norm_(written, mean, scale, shift, activation)


def sliced_norm_(
    x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, activation: str
) -> torch.Tensor:
    """`sliced_norm` that writes over `x`; the same bits."""
    (seen,) = _pictures(x)
    kernel, relu, affine = sweeps(seen), activation == "relu", NormAffine(mean, scale, shift)
    if kernel is None:
        x.copy_(activated(x, affine, relu, x.dtype))
    else:
        kernel.norm_act(seen, affine, None, relu, seen)
    return x if activation in _IN_THE_SWEEP else _activate_(x, activation)


ACTIVATIONS = ("relu", "elu", "leaky_relu")
"""What may stand after a norm, "" for nothing; after the last two, and a space, their number: "elu 1.0"."""
_IN_THE_SWEEP = ("", "relu")


def _activate_(x: torch.Tensor, activation: str) -> torch.Tensor:
    name, number = activation.split()
    return (F.elu_ if name == "elu" else F.leaky_relu_)(x, float(number))


def _let_through(
    grad: torch.Tensor, x: torch.Tensor, affine: NormAffine, activation: str, *, overwrite: bool
) -> torch.Tensor:
    """`grad` as an activation that is not in the sweep lets it through; what that was of is computed again."""
    line = normalised(x, affine)
    name, number = activation.split()
    into = grad if overwrite else line if line.dtype == grad.dtype else torch.empty_like(grad)
    if name == "elu":
        torch.ops.aten.elu_backward.grad_input(grad, float(number), 1, 1, False, line, grad_input=into)
    else:
        torch.ops.aten.leaky_relu_backward.grad_input(grad, line, float(number), False, grad_input=into)
    return into


def _pictures(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Volumes in channels_last as pictures, which there are kernels for, all depths below each other; views."""
    if all(x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d) for x in tensors):
        n, channels, depth, height, width = tensors[0].shape
        strides = (depth * height * width * channels, 1, width * channels, channels)
        return tuple(x.as_strided((n, channels, depth * height, width), strides) for x in tensors)
    return tensors


def _sums(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of grad * (x - mean) and of grad, as an activation after the norm lets it through: (C,)."""
    affine = NormAffine(mean, scale, shift)
    if activation not in _IN_THE_SWEEP:
        grad = _let_through(grad, x, affine, activation, overwrite=False)
    relu = activation == "relu"
    seen, of_seen = _pictures(x, grad)
    _, vectors = activated_backward(of_seen, seen, affine, relu, [False, True])
    assert vectors is not None
    return vectors.scale, vectors.shift


def _sums_fake(grad: Any, x: Any, mean: Any, scale: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(scale), torch.empty_like(scale)


def _norm_fake(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=memory_format_of(x))


def sliced_norm_gradient(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`sliced_norm_gradient_` that leaves `grad` as it is.

    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> x = torch.tensor([[[3.0, -1.0]]])
    >>> sliced_norm_gradient(torch.ones(1, 1, 2), x, zero, 2 * one, zero, one, 10 * one, "relu")
    tensor([[[15.,  9.]]])
    """
    written = torch.empty_like(x, dtype=grad.dtype, memory_format=memory_format_of(x)).copy_(grad)
    return sliced_norm_gradient_(written, x, *rest)


def sliced_norm_gradient_(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    slope: torch.Tensor,
    constant: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The gradient of one slice of what batch norm normalised, all slices together; written over `grad`.

    Args:
        grad: of what `sliced_norm` returned, in the layout of `x`.
        x: the slice, (n, C, ...).
        mean, scale, shift: (C,).
        slope, constant: (C,), by how much the gradient moves for each step from the mean, and in any case.
        activation: as of `sliced_norm`.
    """
    affine, moves = NormAffine(mean, scale, shift), NormMoves(slope, constant)
    if activation not in _IN_THE_SWEEP:
        _let_through(grad, x, affine, activation, overwrite=True)
    relu = activation == "relu"
    seen, of_seen = _pictures(x, grad)
    kernel = sweeps(of_seen, seen)
    if kernel is not None:
        kernel.moved_gradient(of_seen, None, seen, affine, relu, moves, of_seen)
        return grad
    if relu:
        over = normalised(x, affine)
        torch.ops.aten.threshold_backward.grad_input(grad, over, 0, grad_input=grad)
        del over
    return moved_gradient_(grad, x, affine, moves)


def _gradient_fake(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, dtype=grad.dtype, memory_format=memory_format_of(x))


_VECTORS = "Tensor mean, Tensor scale, Tensor shift"
register_op(
    "joined_statistics(Tensor[] means, Tensor[] variances, SymInt[] counts) -> (Tensor, Tensor)",
    *(_joined_statistics, _joined_statistics_fake),
)
register_op(
    "joined_norm_gradients(Tensor[] of_scale, Tensor[] of_shift, Tensor variance, Tensor? weight, float eps,"
    " SymInt count) -> (Tensor, Tensor, Tensor, Tensor)",
    *(_joined_norm_gradients, _joined_norm_gradients_fake),
)
register_op(f"sliced_norm(Tensor x, {_VECTORS}, str activation) -> Tensor", sliced_norm, _norm_fake)
register_op(
    f"sliced_norm_sums(Tensor grad, Tensor x, {_VECTORS}, str activation) -> (Tensor, Tensor)", _sums, _sums_fake
)
register_op(
    f"sliced_norm_gradient(Tensor grad, Tensor x, {_VECTORS}, Tensor slope, Tensor constant, str activation) -> Tensor",
    *(sliced_norm_gradient, _gradient_fake),
)
