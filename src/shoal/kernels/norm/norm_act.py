"""`shoal::norm_act`: normalise, add a residual, apply ReLU; for a batch norm with other readers than one convolution.

Saved for the backward pass: what was normalised and vectors. The normalised tensor is not; the result is only where a
residual was added before the ReLU, since nothing else then says which elements are zero.

The gradients of mean and variance, if those are of what is normalised itself, are one more term of its own gradient. In
float32 whatever measured it adds that term. In bfloat16 and float16 the term is part of what is made here, `own`: added
later to numbers that are rounded already it is lost wherever it is less than half a step of theirs, always to the same
side, and the gradient of a weight, a sum over all pixels, is off by more the more pixels there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shoal.kernels.memory_format import dense_in_format, in_format, memory_format_of
from shoal.kernels.norm.norm_operands import IDENTITY, RELU, NormAffine, NormRead, NormSums, OwnVariance
from shoal.kernels.norm.norm_sweeps import sweeps
from shoal.lowlevel.direct_call import in_places, register_op


def norm_act(
    xs: Sequence[Tensor],
    mean: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None = None,
    relu: bool = True,
    variance: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Replaces `relu((torch.cat(xs, 1) - mean) * scale + shift + residual)`.

    Args:
        xs: tensors of (N, C_i, ...) that are normalised as one of C = sum of C_i channels.
        mean, scale, shift: (C,), in float32 or float64.
        residual: of the shape of the result, or None.
        relu: whether a ReLU follows.
        variance: biased, of `xs` themselves, whose mean `mean` is; the gradient of `xs` is then the whole one, and
            `mean`, `scale` and `variance` must lead back to `xs` by no other way. None: vectors are only numbers.
        eps: what was added to the variance.

    Returns:
        (N, C, ...), differentiable once.

    >>> ones = torch.ones(1)
    >>> norm_act([torch.tensor([[[1.0, 5.0]]])], 3 * ones, 2 * ones, ones)
    tensor([[[0., 5.]]])
    """
    result: Tensor = _norm_act(list(xs), mean, scale, shift, residual, relu, variance, eps)
    return result


def own_variance(variance: Tensor | None = None, eps: float = 0.0) -> OwnVariance | None:
    """The optional arguments of an op as one; a call may leave them out."""
    return None if variance is None else OwnVariance(variance, eps)


def joined(xs: Sequence[Tensor]) -> Tensor:
    """`xs` side by side; the tensor itself if there is only one."""
    return xs[0] if len(xs) == 1 else torch.cat(list(xs), 1)


def activated(x: Tensor, affine: NormAffine | None, relu: bool, dtype: torch.dtype) -> Tensor:
    """relu((x - mean) * scale + shift) in `dtype`, without autograd; relu(x) if `affine` is None.

    The result is laid out as PyTorch's batch norm lays its own out, whatever computes it; `x` itself stays as it is.

    >>> one = torch.ones(1)
    >>> activated(torch.tensor([[[1.0, 5.0]]]), NormAffine(3 * one, 2 * one, one), True, torch.float32)
    tensor([[[0., 5.]]])
    """
    if affine is None:
        return dense_in_format(x.relu().to(dtype), memory_format_of(x)) if relu else x.to(dtype)
    out = torch.empty_like(x, dtype=dtype, memory_format=memory_format_of(x))
    sweeps(x, out).apply(x, affine, None, RELU if relu else IDENTITY, out)
    return out


def activated_backward(
    grad: Tensor, x: Tensor, affine: NormAffine, relu: bool, needs: Sequence[bool], own: OwnVariance | None = None
) -> tuple[Tensor | None, NormAffine | None]:
    """From the gradient of `activated`: that of x, and those of mean, scale and shift.

    Args:
        grad: of what `activated` returned, which is not needed: it is recomputed from x.
        needs: whether the gradient of x is wanted, and those of the vectors.
        own: the gradient of x is the whole one, through its statistics too.
    """
    of_x, of_vectors, _ = _gradients(grad, [x], affine, None, relu, [*needs, False], own=own)
    return of_x[0] if of_x else None, of_vectors


def parted(grad: Tensor, xs: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of `joined(xs)` as one tensor for each, none of which looks at another's memory."""
    if len(xs) == 1:
        return [dense_in_format(grad.to(xs[0].dtype), memory_format_of(xs[0]))]
    parts = grad.split([x.shape[1] for x in xs], 1)
    return [room.copy_(part) for room, part in zip(parted_fake(xs), parts, strict=True)]


def parted_fake(xs: Sequence[Tensor]) -> list[Tensor]:
    """What `parted` returns, in shapes."""
    return [torch.empty_like(x, memory_format=memory_format_of(x)) for x in xs]


def _forward(
    xs: list[Tensor], mean: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, relu: bool, *_: Any
) -> Tensor:
    affine, layout = NormAffine(mean, scale, shift), memory_format_of(xs[0])
    given = [in_format(x, layout) for x in xs]
    added = None if residual is None else in_format(residual, layout)
    out = _empty(xs, residual)
    kernel = sweeps(out, *given, added)
    for x, run in zip(given, _runs(xs), strict=True):
        part = None if added is None else added[:, run]
        kernel.apply(x, affine.of(run), part, RELU if relu else IDENTITY, out[:, run])
    return out


def _runs(xs: Sequence[Tensor]) -> list[slice]:
    """Where the channels of each lie side by side."""
    ends = list(accumulate(x.shape[1] for x in xs))
    return [slice(end - x.shape[1], end) for x, end in zip(xs, ends, strict=True)]


def _empty(xs: Sequence[Tensor], residual: Tensor | None) -> Tensor:
    shape = [xs[0].shape[0], sum(x.shape[1] for x in xs), *xs[0].shape[2:]]
    kinds = [x.dtype for x in (*xs, residual) if x is not None]
    kind, device = reduce(torch.promote_types, kinds), xs[0].device
    return torch.empty(shape, dtype=kind, device=device, memory_format=memory_format_of(xs[0]))


def _forward_fake(xs: list[Tensor], mean: Any, scale: Any, shift: Any, residual: Tensor | None, *_: Any) -> Tensor:
    return _empty(xs, residual)


def _backward(
    grad: Tensor,
    xs: list[Tensor],
    mean: Tensor,
    scale: Tensor,
    shift: Tensor,
    z: Tensor | None,
    relu: bool,
    needs: Sequence[bool],
    *own: Any,
    overwrite: bool = False,
) -> list[Tensor]:
    """`needs`: of xs, of the vectors, of the residual after a ReLU, which comes first."""
    affine, whole = NormAffine(mean, scale, shift), own_variance(*own)
    of_xs, of_vectors, masked = _gradients(grad, xs, affine, z, relu, needs, overwrite=overwrite, own=whole)
    return [*([] if masked is None else [masked]), *of_xs, *(of_vectors or ())]


def backward_(*arguments: Any) -> list[Tensor]:
    """`norm_act_backward`, whose first result is written over `grad`; both have the same shape, strides and dtype."""
    return _backward(*arguments, overwrite=True)


def _gradients(
    grad: Tensor,
    xs: Sequence[Tensor],
    affine: NormAffine,
    z: Tensor | None,
    relu: bool,
    needs: Sequence[bool],
    *,
    overwrite: bool = False,
    own: OwnVariance | None = None,
) -> tuple[list[Tensor], NormAffine | None, Tensor | None]:
    """As for `_backward`: of xs (none where not needed), of the vectors, and what the ReLU lets through.

    `overwrite`: the last of these, or else the gradient of a single x, is written over `grad`.
    """
    layout = memory_format_of(xs[0])
    coming, given = in_format(grad, layout), [in_format(x, layout) for x in xs]
    kernel = sweeps(coming, *given, z)
    masked = (grad if overwrite else torch.empty_like(coming, memory_format=layout)) if needs[2] else None
    of_xs: list[Tensor | None] = [None] * len(xs)
    if needs[0]:
        over_grad = overwrite and masked is None
        of_xs = [grad] if over_grad else [torch.empty_like(x, memory_format=layout) for x in given]
    sums = []
    for x, of_x, run in zip(given, of_xs, _runs(xs), strict=True):
        of_z = coming[:, run]
        through, result = (None if whole is None else whole[:, run] for whole in (masked, z))
        read = NormRead(x, affine.of(run), RELU if relu else IDENTITY, result)
        sums.append(kernel.reduce(of_z, read, of_x if own is None else None, through))
        if own is not None and of_x is not None:
            inverse_variance = 1 / (own.variance[run] + own.eps)
            moves = read.affine.moves(sums[-1], inverse_variance, x.numel() // x.shape[1])
            kernel.apply_backward(of_z, read, moves, of_x)
    of_all = sums[0] if len(xs) == 1 else [torch.cat(parts) for parts in zip(*sums, strict=True)]
    whole = NormSums(*(one.to(affine.scale.dtype, copy=True) for one in of_all))  # no result of an op may be a view
    return (
        [dense_in_format(of_x, memory_format_of(x)) for of_x, x in zip(of_xs, xs, strict=True) if of_x is not None],
        affine.gradients(whole) if needs[1] else None,
        masked,
    )


def _backward_fake(grad: Tensor, xs: list[Tensor], *rest: Any) -> list[Tensor]:
    vectors, needs = rest[:3], rest[5]
    found = [torch.empty_like(grad, memory_format=memory_format_of(xs[0]))] if needs[2] else []
    found += parted_fake(xs) if needs[0] else []
    return found + [torch.empty_like(vector) for vector in vectors] if needs[1] else found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xs, mean, scale, shift, residual, relu, *own = inputs
    ctx.relu, ctx.n, ctx.residual_kind = relu, len(xs), None if residual is None else residual.dtype
    z = output if relu and residual is not None else None
    variance, ctx.eps = own_variance(*own) or (None, 0.0)
    ctx.save_for_backward(*xs, mean, scale, shift, z, variance)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *xs, mean, scale, shift, z, variance = ctx.saved_tensors
    of_xs, *of_vectors, of_residual = ctx.needs_input_grad[:5]
    needs = [any(of_xs), any(of_vectors), bool(of_residual and ctx.relu)]
    found: list[Tensor] = []
    if any(needs):
        found = _norm_act_backward(grad, xs, mean, scale, shift, z, ctx.relu, needs, variance, ctx.eps)
    masked, *grads = in_places(found, [needs[2], *[needs[0]] * ctx.n, *[needs[1]] * 3])
    residual = (masked if ctx.relu else grad).to(ctx.residual_kind) if of_residual else None
    # As many as the call had.
    return grads[: ctx.n], *grads[ctx.n :], residual, *[None] * (len(ctx.needs_input_grad) - 5)


_norm_act = register_op(
    "norm_act(Tensor[] xs, Tensor mean, Tensor scale, Tensor shift, Tensor? residual, bool relu,"
    " Tensor? variance=None, float eps=0.0) -> Tensor",
    *(_forward, _forward_fake, _setup, _differentiate),
)
_norm_act_backward = register_op(
    "norm_act_backward(Tensor grad, Tensor[] xs, Tensor mean, Tensor scale, Tensor shift, Tensor? z, bool relu,"
    " bool[] needs, Tensor? variance=None, float eps=0.0) -> Tensor[]",
    *(_backward, _backward_fake),
)
