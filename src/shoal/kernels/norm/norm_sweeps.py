"""The primitives of every norm over whole tensors: statistics, apply, reduce, apply_backward.

Batch norm by itself, fused with its neighbours, inverted and over slices of a batch are compositions of these. Each
pass reads and writes every element once.

The reference is pointwise ops of PyTorch, any dtype, device and layout; on the CPU on tiles that stay in L2, so that
little but the result is allocated. Triton's kernels are in `norm_sweeps_triton`, native ones in `norm_sweeps_native`.
"""

from __future__ import annotations

import torch

from shoal.kernels.memory_format import memory_format_of
from shoal.kernels.norm.norm_operands import Activation, NormAffine, NormMoves, NormRead, NormSums, by_channel, wide
from shoal.kernels.norm.norm_sweeps_native import NATIVE, NormSweepsNative
from shoal.kernels.norm.norm_sweeps_triton import TRITON, NormSweepsTriton
from shoal.kernels.pieces import tiles
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register


class _NormSweepsReference:
    """PyTorch's ops, and what the other implementations do.

    What is written may be the very tensor that is read, and overlaps nothing else.
    """

    def statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and biased variance of the channels, (C,), as `torch.var_mean` over all but them, in the wide dtype.

        Deviations are summed around a number near the mean, which stays exact where the mean is a thousand deviations
        from 0; E[x^2] - E[x]^2 in float32 does not.
        """
        if x.dtype == wide(x.dtype) and memory_format_of(x) != torch.contiguous_format:
            # PyTorch's own for batch norm: two sweeps, nothing allocated; in other layouts it is slow.
            mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
            return mean, variance
        dims, count = [0, *range(2, x.dim())], x.numel() // x.shape[1]
        total, rest, squares = x.new_zeros((3, x.shape[1]), dtype=torch.float64)
        for (some,) in tiles(x):
            total += some.sum(dims, dtype=wide(x.dtype))
        near = (total / count).to(wide(x.dtype))
        for (some,) in tiles(x):
            centred = some - by_channel(near, x)  # promotes
            rest += centred.sum(dims)
            squares += centred.square_().sum(dims)
        rest /= count  # what rounding kept from the first sum
        return (near + rest).to(near.dtype), (squares / count - rest.square()).to(near.dtype)

    def apply(
        self,
        x: torch.Tensor,
        affine: NormAffine,
        residual: torch.Tensor | None,
        activation: Activation,
        out: torch.Tensor,
    ) -> None:
        """Write activation(affine(x) + residual) into `out`, in its dtype.

        The mean is taken off first: far from zero it would take digits of the product with it.

        Args:
            x: (N, C, ...).
            affine: its vectors are used in the wide dtype.
            residual: of the shape of x, or None.
            activation: any.
            out: of the shape of x; may be x or the residual.
        """
        mean, scale, shift = (by_channel(vector, x) for vector in affine)
        for some, more, into in tiles(x, residual, out):
            z = some - mean  # promotes
            torch.addcmul(shift, z, scale, out=z)
            z = z if more is None else z.add_(more)
            into.copy_(activation.apply_(z))

    def reduce(
        self,
        grad: torch.Tensor,
        read: NormRead,
        grad_x: torch.Tensor | None = None,
        masked: torch.Tensor | None = None,
    ) -> NormSums:
        """The sums of the backward pass. In the same sweep, what does not depend on them is written.

        Args:
            grad: of the result, of the shape of x.
            read: what was saved.
            grad_x: where the product of the gradient before the activation and the scale is written: the gradient of
                x if the vectors are numbers; None: it is not wanted. May be `grad`.
            masked: where the gradient before the activation is written: that of the residual; as `grad_x`.

        Returns:
            (C,), in float32 or float64.
        """
        dims, scale = [0, *range(2, grad.dim())], by_channel(read.affine.scale, grad)
        # An op's results: none may be a view.
        products, total = (grad.new_zeros(grad.shape[1], dtype=torch.float64) for _ in range(2))
        for tile in tiles(grad, read.x, read.z, grad_x, masked):
            centred, da = _centred(tile[0], tile[1], tile[2], read)
            total += da.sum(dims)
            products += centred.mul_(da).sum(dims)
            if tile[4] is not None:
                tile[4].copy_(da)
            if tile[3] is not None:  # last: `da` may be `grad` itself
                tile[3].copy_(torch.mul(da, scale, out=centred))
        return NormSums(products, total)

    def apply_backward(self, grad: torch.Tensor, read: NormRead, moves: NormMoves, grad_x: torch.Tensor) -> None:
        """Write the gradient of x through the vectors too: `(da + (x - mean) * slope + constant) * scale`.

        Args:
            grad, read: as for `reduce`, whose sums the moves were made from.
            moves: used in the wide dtype.
            grad_x: what is written; may be `grad`.
        """
        scale = by_channel(read.affine.scale, grad)
        slope, constant = (by_channel(vector.to(scale.dtype), grad) for vector in moves)
        for some, x, z, into in tiles(grad, read.x, read.z, grad_x):
            centred, da = _centred(some, x, z, read)
            into.copy_(centred.mul_(slope).add_(constant).add_(da).mul_(scale))


def _centred(
    grad: torch.Tensor, x: torch.Tensor, z: torch.Tensor | None, read: NormRead
) -> tuple[torch.Tensor, torch.Tensor]:
    """x - mean, a new tensor, and the gradient before the activation, of tiles of what is read."""
    mean, scale, shift = (by_channel(vector, x) for vector in read.affine)
    activation = read.activation
    if read.inverted:
        y, grad = x.to(scale.dtype), grad.to(scale.dtype)
        return activation.undone(y).sub_(shift).div_(scale), activation.gradient(grad, y, from_result=True)
    centred = x - mean  # promotes
    grad = grad.to(centred.dtype)
    if activation.name == "identity":
        return centred, grad
    return centred, activation.gradient(grad, torch.addcmul(shift, centred, scale) if z is None else z.to(grad.dtype))


REFERENCE = _NormSweepsReference()
NormSweeps = _NormSweepsReference | NormSweepsNative | NormSweepsTriton
_OP: DispatchedOp[NormSweeps] = register(
    "norm_sweeps",
    REFERENCE,
    Implementation("triton", TRITON, TRITON.applies),
    Implementation("native", NATIVE, NATIVE.applies),
)


def sweeps(*tensors: torch.Tensor | None) -> NormSweeps:
    """What runs passes over `tensors`, (N, C, ...), of one shape but for their channels; None is none.

    >>> sweeps(torch.ones(2, 3, 4, 5, dtype=torch.float64)) is REFERENCE
    True
    """
    return choose(_OP, *(tensor for tensor in tensors if tensor is not None))
