"""Batch norm over slices of a batch: the passes over one slice, and what joins the vectors of all.

`shoal::joined_statistics` makes the statistics of the whole from `shoal::statistics` of its slices, and
`shoal::sliced_norm` normalises one of them, with the activation after it. Backward `shoal::joined_norm_gradients`
makes the vectors of the whole from `shoal::sliced_norm_sums` of the slices, and `shoal::sliced_norm_gradient` is the
gradient of one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.kernels.memory_format import memory_format_of
from shoal.kernels.norm.norm_operands import IDENTITY, Activation, NormAffine, NormMoves, NormRead
from shoal.kernels.norm.norm_sweeps import sweeps
from shoal.lowlevel.direct_call import register_op


def _joined_statistics(means: list[Tensor], variances: list[Tensor], counts: list[int]) -> tuple[Tensor, Tensor]:
    shares = means[0].new_full((len(counts), 1), counts[0])  # filled there: a copy from the host would wait for it
    for place, count in enumerate(counts):
        if count != counts[0]:
            shares[place].fill_(count)
    shares.div_(sum(counts))
    every = torch.stack(means)
    mean = (every * shares).sum(0)
    return mean, ((every - mean).square_().add_(torch.stack(variances)) * shares).sum(0)


def _joined_statistics_fake(means: list[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(means[0]), torch.empty_like(means[0])


def _joined_norm_gradients(
    of_scale: list[Tensor], of_shift: list[Tensor], variance: Tensor, weight: Tensor | None, eps: float, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    products, total = torch.stack(of_scale).sum(0), torch.stack(of_shift).sum(0)
    inverse = torch.rsqrt(variance + eps)
    of_weight = products * inverse
    like = total if weight is None else weight
    return inverse * of_weight / -count, total / -count, of_weight.to(like.dtype), total.to(like.dtype)


def sliced_norm(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: str) -> Tensor:
    """(x - mean) * scale + shift, (n, C, ...), with vectors of (C,), and an activation: see `ACTIVATIONS`.

    >>> one = torch.ones(1)
    >>> sliced_norm(torch.tensor([[[1.0, 5.0]]]), 3 * one, 2 * one, one, "relu")
    tensor([[[0., 5.]]])
    """
    return sliced_norm_(x, mean, scale, shift, activation, out=_norm_fake(x))


def sliced_norm_(
    x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: str, out: Tensor | None = None
) -> Tensor:
    """`sliced_norm` that writes over `x`, or into `out`; the same bits."""
    into = x if out is None else out
    sweeps(x, into).apply(x, NormAffine(mean, scale, shift), None, _activation_of(activation), into)
    return into


ACTIVATIONS = ("relu", "elu", "leaky_relu")
"""What may stand after a norm, "" for nothing; after the last two, and a space, their number: "elu 1.0"."""


def _activation_of(text: str) -> Activation:
    name, *numbers = text.split() or IDENTITY
    return Activation(name, *map(float, numbers))


def _sums(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Of grad * (x - mean) and of grad, as an activation after the norm lets it through: (C,)."""
    *vectors, activation = rest
    affine = NormAffine(*vectors)
    of_scale, of_shift = sweeps(grad, x).reduce(grad, NormRead(x, affine, _activation_of(activation)))
    kind = affine.scale.dtype
    return of_scale.to(kind, copy=True), of_shift.to(kind, copy=True)  # they may be views


def _sums_fake(grad: Any, x: Any, mean: Any, scale: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scale), torch.empty_like(scale)


def _norm_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=memory_format_of(x))


def sliced_norm_gradient(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """`sliced_norm_gradient_` that leaves `grad` as it is.

    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> x = torch.tensor([[[3.0, -1.0]]])
    >>> sliced_norm_gradient(torch.ones(1, 1, 2), x, zero, 2 * one, zero, one, 10 * one, "relu")
    tensor([[[28., 18.]]])
    """
    return sliced_norm_gradient_(grad, x, *rest, out=_gradient_fake(grad, x))


def sliced_norm_gradient_(grad: Tensor, x: Tensor, *rest: Any, out: Tensor | None = None) -> Tensor:
    """The gradient of one slice of what batch norm normalised, all slices together; written over `grad`.

    Args:
        grad: of what `sliced_norm` returned, in the layout of `x`.
        x: the slice, (n, C, ...).
        rest: mean, scale and shift, (C,); slope and constant, (C,), by how much the gradient moves before it is scaled:
            see `NormMoves`; and the activation, as of `sliced_norm`.
        out: where it is written instead.
    """
    *affine, slope, constant, activation = rest
    read, into = NormRead(x, NormAffine(*affine), _activation_of(activation)), grad if out is None else out
    sweeps(grad, x, into).apply_backward(grad, read, NormMoves(slope, constant), into)
    return into


def _gradient_fake(grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=grad.dtype, memory_format=memory_format_of(x))


_VECTORS = "Tensor mean, Tensor scale, Tensor shift"
register_op(
    "joined_statistics(Tensor[] means, Tensor[] variances, SymInt[] counts) -> (Tensor, Tensor)",
    *(_joined_statistics, _joined_statistics_fake),
)
register_op(
    "joined_norm_gradients(Tensor[] of_scale, Tensor[] of_shift, Tensor variance, Tensor? weight, float eps,"
    " SymInt count) -> (Tensor, Tensor, Tensor, Tensor)",
    *(_joined_norm_gradients, _joined_norm_gradients),  # in shapes, too
)
register_op(f"sliced_norm(Tensor x, {_VECTORS}, str activation) -> Tensor", sliced_norm, _norm_fake)
register_op(
    f"sliced_norm_sums(Tensor grad, Tensor x, {_VECTORS}, str activation) -> (Tensor, Tensor)", _sums, _sums_fake
)
register_op(
    f"sliced_norm_gradient(Tensor grad, Tensor x, {_VECTORS}, Tensor slope, Tensor constant, str activation) -> Tensor",
    *(sliced_norm_gradient, _gradient_fake),
)
