"""The primitives of every norm over whole tensors: statistics, apply, reduce, apply_backward.

Batch norm by itself, fused with its neighbours, inverted and over slices of a batch are compositions of these. Each
pass reads and writes every element once.

The reference is pointwise ops of PyTorch, any dtype, device and layout; on the CPU on tiles that stay in L2, so that
little but the result is allocated. Triton's kernels are in `norm_sweeps_triton`, native ones in `norm_sweeps_native`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels.memory_format import memory_format_of
from shoal.kernels.norm.norm_operands import (
    IDENTITY,
    Activation,
    NormAffine,
    NormMoves,
    NormRead,
    NormSums,
    by_channel,
    wide,
)
from shoal.kernels.norm.norm_sweeps_native import NATIVE, NormSweepsNative
from shoal.kernels.norm.norm_sweeps_triton import TRITON, NormSweepsTriton
from shoal.kernels.pieces import tiles
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register

_aten = torch.ops.aten


class _NormSweepsReference:
    """PyTorch's ops, and what the other implementations do.

    What is written may be the very tensor that is read, and overlaps nothing else.
    """

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of the channels, (C,), as `torch.var_mean` over all but them, in the wide dtype.

        Deviations are summed around a number near the mean, which stays exact where the mean is a thousand deviations
        from 0; E[x^2] - E[x]^2 in float32 does not.
        """
        if x.dtype == wide(x.dtype) and memory_format_of(x) != torch.contiguous_format:
            # PyTorch's own for batch norm: two sweeps, nothing allocated; in other layouts it is slow.
            mean, variance = _aten.batch_norm_update_stats(x, None, None, 0.0)
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

    @torch.no_grad()
    def apply(
        self, x: Tensor, affine: NormAffine, residual: Tensor | None, activation: Activation, out: Tensor
    ) -> None:
        """Write activation(affine(x) + residual) into `out`, in its dtype.

        Args:
            x: (N, C, ...).
            affine: its vectors are used in the wide dtype.
            residual: of the shape of x, or None.
            activation: any.
            out: of the shape of x; may be x or the residual.
        """
        if residual is out or x.dtype != out.dtype or affine.scale.dtype != wide(x.dtype):
            return _apply_to_tiles(x, affine, residual, activation, out)
        # PyTorch's own in eval mode is one sweep; its variance is one here.
        mean, scale, shift = affine
        nothing = [torch.empty_like(mean) for _ in range(2)]
        settings = (x, scale, shift, mean, torch.ones_like(mean), False, 0.0, 0.0)
        _aten.native_batch_norm.out(*settings, out=out, save_mean=nothing[0], save_invstd=nothing[1])
        activation.apply_(out if residual is None else out.add_(residual))

    @torch.no_grad()
    def reduce(
        self, grad: Tensor, read: NormRead, grad_x: Tensor | None = None, masked: Tensor | None = None
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
        if read.x.is_contiguous() and not read.inverted and read.x.numel():
            return self._reduce_planes(grad, read, grad_x, masked)
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

    def _reduce_planes(self, grad: Tensor, read: NormRead, grad_x: Tensor | None, masked: Tensor | None) -> NormSums:
        """As a whole, where PyTorch's loops over the pixels of a channel are fast and those over tiles are not."""
        x, affine, activation, z, _ = read
        if activation.name != "identity":
            if z is None:
                self.apply(x, affine, None, IDENTITY, z := torch.empty_like(x))
            grad = activation.gradient(grad, z.to(grad.dtype))
        kind, ones = torch.promote_types(grad.dtype, x.dtype), torch.ones_like(affine.mean)
        # PyTorch's own sums of grad * (x - mean) and grad in one sweep, with nothing allocated.
        _, *sums = _aten.native_batch_norm_backward(
            grad.to(kind), x.to(kind), ones, None, None, affine.mean, ones, True, 0.0, [False, True, True]
        )
        if masked is not None:
            masked.copy_(grad)
        if grad_x is not None:
            scale = by_channel(affine.scale, grad)
            into = grad_x if grad_x.dtype == torch.result_type(grad, scale) else None
            grad_x.copy_(torch.mul(grad, scale, out=into))
        return NormSums(*sums)

    @torch.no_grad()
    def apply_backward(self, grad: Tensor, read: NormRead, moves: NormMoves, grad_x: Tensor) -> None:
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


@torch.no_grad()
def _apply_to_tiles(
    x: Tensor, affine: NormAffine, residual: Tensor | None, activation: Activation, out: Tensor
) -> None:
    mean, scale, shift = (by_channel(vector, x) for vector in affine)
    writes = residual is None and x.dtype == out.dtype == scale.dtype
    for some, more, into in tiles(x, residual, out):
        z = torch.sub(some, mean, out=into) if writes else some - mean  # promotes
        z.mul_(scale).add_(shift)
        z = activation.apply_(z if more is None else z.add_(more))
        if not writes:
            into.copy_(z)


def _centred(grad: Tensor, x: Tensor, z: Tensor | None, read: NormRead) -> tuple[Tensor, Tensor]:
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
    z = (centred * scale).add_(shift) if z is None else z.to(grad.dtype)
    return centred, activation.gradient(grad, z)


REFERENCE = _NormSweepsReference()
NormSweeps = _NormSweepsReference | NormSweepsNative | NormSweepsTriton
_OP: DispatchedOp[NormSweeps] = register(
    "norm_sweeps",
    REFERENCE,
    Implementation("triton", TRITON, TRITON.applies),
    Implementation("native", NATIVE, NATIVE.applies),
)


def sweeps(*tensors: Tensor | None) -> NormSweeps:
    """What runs passes over `tensors`, (N, C, ...), of one shape but for their channels; None is none.

    >>> sweeps(torch.ones(2, 3, 4, 5, dtype=torch.float64)) is REFERENCE
    True
    """
    return choose(_OP, *(tensor for tensor in tensors if tensor is not None))


def apply_exactly(x: Tensor, affine: NormAffine, residual: Tensor | None, activation: Activation, out: Tensor) -> None:
    """`apply` with all the digits of the formula, which the reference's one sweep does not have.

    The mean is taken off first: far from zero it takes digits of its product with the scale.
    """
    kernel = sweeps(x, out, residual)
    (_apply_to_tiles if kernel is REFERENCE else kernel.apply)(x, affine, residual, activation, out)
