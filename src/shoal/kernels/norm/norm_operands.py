"""What the primitives of a norm are given: vectors of the channels, an activation, and what the backward pass reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten


class Activation(NamedTuple):
    """What comes after a norm.

    Attributes:
        name: "identity", "relu", "leaky_relu" or "elu".
        slope: leaky ReLU's negative slope or ELU's alpha, greater than 0; the others have none.
    """

    name: str
    slope: float = 1.0

    def apply_(self, z: Tensor) -> Tensor:
        """What it makes of `z`, written over it."""
        if self.name == "relu":
            return z.relu_()
        if self.name == "leaky_relu":
            return F.leaky_relu_(z, self.slope)
        return F.elu_(z, self.slope) if self.name == "elu" else z

    def gradient(self, grad: Tensor, z: Tensor, *, from_result: bool = False) -> Tensor:
        """The gradient of what was activated, from that of the result.

        Args:
            grad: of the result.
            z: what was activated, of the dtype of `grad`; a ReLU may be given its result.
            from_result: whether `z` is the result.
        """
        if self.name == "relu":
            return _aten.threshold_backward(grad, z, 0)
        if self.name == "leaky_relu":
            return _aten.leaky_relu_backward(grad, z, self.slope, from_result)
        return _aten.elu_backward(grad, self.slope, 1, 1, from_result, z) if self.name == "elu" else grad

    def undone(self, y: Tensor) -> Tensor:
        """What was activated, from the result of an activation that has an inverse; a new tensor."""
        if self.name == "leaky_relu":
            return _aten.leaky_relu(y, 1 / self.slope)
        if self.name == "identity":
            return y.clone()
        # Rounded to -alpha, the result has no inverse: the smallest that has one stands for it.
        lowest = torch.finfo(y.dtype).eps / 2 - 1
        return torch.where(y > 0, y, torch.log1p((y / self.slope).clamp_(min=lowest, max=0)))


IDENTITY, RELU = Activation("identity"), Activation("relu")


class NormSums(NamedTuple):
    """Of da * (x - mean) and of da over all but the channels, (C,), where da is the gradient before the activation.

    They are the gradients of the scale and the shift of a `NormAffine`.
    """

    of_scale: Tensor
    of_shift: Tensor


class NormMoves(NamedTuple):
    """Is added to a gradient before it is scaled, (C,): `slope` for each step of x from the mean, and `constant`."""

    slope: Tensor
    constant: Tensor


class NormAffine(NamedTuple):
    """(x - mean) * scale + shift for each channel of x, (N, C, ...); the vectors are (C,)."""

    mean: Tensor
    scale: Tensor
    shift: Tensor

    def of(self, channels: slice) -> NormAffine:
        """The vectors of some channels."""
        return NormAffine(*(values[channels] for values in self))

    def gradients(self, sums: NormSums) -> NormAffine:
        """Gradients of all vectors."""
        return NormAffine(-self.scale * sums.of_shift, *sums)

    def moves(self, sums: NormSums, inverse_variance: Tensor, count: int, in_group: int = 1) -> NormMoves:
        """What the gradient of x is moved by since mean and variance are those of x itself.

        Args:
            sums: of the gradient.
            inverse_variance: 1 / (variance + eps), which the scale was made from, (C,).
            count: elements of a channel of x.
            in_group: how many channels, one after the other, have one mean and variance.
        """
        if in_group > 1:  # they share what they are moved by, but for their scales
            weighted = torch.stack(sums) * self.scale
            means = weighted.view(2, -1, in_group).mean(2).repeat_interleave(in_group, 1)
            sums = NormSums(*(means / self.scale))
        return NormMoves(sums.of_scale * inverse_variance / -count, sums.of_shift / -count)


class OwnVariance(NamedTuple):
    """Says that mean and scale of a `NormAffine` were made from the statistics of what it normalises.

    Attributes:
        variance: biased, (C,).
        eps: of the batch norm, which was added to it.
    """

    variance: Tensor
    eps: float


class NormRead(NamedTuple):
    """What the backward pass of a norm reads in addition to the gradient.

    Attributes:
        x: what was normalised, (N, C, ...); the result of the activation if `inverted`.
        affine: what it was normalised by; x - mean is computed from the result if `inverted`, so the mean is not read.
        activation: of the norm's result; one with an inverse if `inverted`.
        z: the result of a ReLU of more than the normalised x; None: it is computed from x.
        inverted: whether only the result was saved.
    """

    x: Tensor
    affine: NormAffine
    activation: Activation
    z: Tensor | None = None
    inverted: bool = False


def affine_of(mean: Tensor | None, scale: Tensor | None, shift: Tensor | None) -> NormAffine | None:
    """The optional vectors of an op as one; None if they are: nothing is normalised."""
    return None if mean is None or scale is None or shift is None else NormAffine(mean, scale, shift)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which channels are measured: float32 for a narrower one."""
    return torch.promote_types(dtype, torch.float32)


def by_channel(vector: Tensor, x: Tensor) -> Tensor:
    """(C,) as a view that broadcasts over `x`, (N, C, ...)."""
    return vector.view([1, -1, *[1] * (x.dim() - 2)])
