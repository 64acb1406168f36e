"""A norm and its activation as one custom op that saves only its result, see `inverted_batch_norm`; its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.kernels.norm.norm_operands import Activation, NormAffine, NormRead, NormSums, wide
from shoal.kernels.norm.norm_sweeps import sweeps
from shoal.lowlevel.direct_call import needs_dispatch, register_op

Vectors = tuple[Tensor, Tensor]


class InvertedOp:
    """`shoal::NAME`, `shoal::NAME_backward` and the same functions over their first operand; differentiable once.

    Attributes:
        op: the custom op of (x, weight, bias, ...), which returns y and two vectors that carry no gradient.
        backward_op: of (grad, y, weight, bias, invstd, ...), which returns the gradients of x, weight and bias.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        options: str,
        *,
        forward: Callable[..., Vectors],
        backward: Callable[..., Vectors],
        saved: Callable[..., tuple[Tensor, tuple[Any, ...]]],
        vector_shape: Callable[..., Sequence[int]],
        empty_like: Callable[[Tensor], Tensor] = torch.empty_like,
    ) -> None:
        """
        Args:
            name: of the op.
            arguments: schema of what the op takes after weight and bias.
            options: schema of what the backward op takes after invstd.
            forward: of (x, y, weight, bias, *arguments): writes y, which may be x, and returns the two vectors.
            backward: of (grad, result, y, weight, bias, invstd, *options): writes the gradient of x into `result`,
                which may be `grad`, and returns those of weight and bias.
            saved: of (arguments, vectors): invstd and the options of the backward op.
            vector_shape: of (x, *arguments): the shape of both vectors.
            empty_like: allocates y for an x.
        """
        self._forward, self._backward, self._saved = forward, backward, saved
        self._empty_like, self._vector_shape = empty_like, vector_shape
        vectors, results = "Tensor? weight, Tensor? bias", "(Tensor, Tensor, Tensor)"
        self.op = register_op(
            f"{name}(Tensor x, {vectors}, {arguments}) -> {results}",
            *(self._new, self._fake, self._setup, self._gradients),
        )
        self.backward_op = register_op(
            f"{name}_backward(Tensor grad, Tensor y, {vectors}, Tensor invstd, {options}) -> {results}",
            *(self._new_gradients, self._gradients_fake),
        )
        self._function = _over_input(self)

    def forward_(self, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """The op, its result written over `x`."""
        return x, *self._forward(x, x, *arguments)

    def backward_(self, grad: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """The backward op, the gradient of x written over `grad`, which has the layout of `y`."""
        return grad, *self._backward(grad, grad, y, *arguments)

    def __call__(self, x: Tensor, overwrite: bool, *arguments: Any) -> tuple[Tensor, ...]:
        """Call the op, in eager mode without its dispatch.

        Args:
            overwrite: whether the result may be written over `x`, for callers who know that nothing else reads it;
                compilers decide that for themselves, and views and leaves are refused as PyTorch's in-place ops do.
        """
        if needs_dispatch((x,)):
            found: tuple[Tensor, ...] = self.op(x, *arguments)
            return found
        overwrite = overwrite and not x._is_view() and not (x.is_leaf and x.requires_grad)
        return self._function.apply(x, overwrite, *arguments)

    def _new(self, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        y = self._empty_like(x)
        if y.stride() != x.stride():
            x = y.copy_(x)
        return y, *self._forward(x, y, *arguments)

    def _fake(self, x: Tensor, weight: Any, bias: Any, *arguments: Any) -> tuple[Tensor, ...]:
        vector = x.new_empty(self._vector_shape(x, *arguments), dtype=wide(x.dtype))
        return self._empty_like(x), vector, torch.empty_like(vector)

    def _new_gradients(self, grad: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        result = torch.empty_like(y)
        if grad.stride() != y.stride():
            grad = result.copy_(grad)
        return result, *self._backward(grad, result, y, *arguments)

    def _gradients_fake(self, grad: Any, y: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        vector = operands[2].new_empty(y.shape[1])
        return torch.empty_like(y), *(torch.empty_like(vector if one is None else one) for one in operands[:2])

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, weight, bias, *arguments = inputs
        y, *vectors = output
        invstd, ctx.options = self._saved(arguments, vectors)
        ctx.mark_non_differentiable(*vectors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, weight, bias, invstd)
        ctx.inputs = len(inputs)

    def _gradients(self, ctx: Any, grad: Tensor | None, *unused: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * ctx.inputs
        y, weight, bias, invstd = ctx.saved_tensors
        of_x, of_weight, of_bias = self.backward_op(grad, y, weight, bias, invstd, *ctx.options)
        vectors = None if weight is None else of_weight, None if bias is None else of_bias
        return of_x, *vectors, *(None,) * (ctx.inputs - 3)


def _over_input(op: InvertedOp) -> type[torch.autograd.Function]:
    """The op without dispatch, and over its input: custom ops have no autograd there."""

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, overwrite: bool, *arguments: Any) -> tuple[Tensor, ...]:
            result = (op.forward_ if overwrite else op._new)(x, *arguments)
            if overwrite:
                ctx.mark_dirty(x)
            op._setup(ctx, (x, *arguments), result)
            return result

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            of_x, *others = op._gradients(ctx, *grads)
            return of_x, None, *others

    return Eager


def by_pytorch(
    layer: nn.Module, scale_of: Callable[[Tensor], Tensor], x: Tensor, activation: str, slope: float
) -> Tensor:
    """The same function by PyTorch's own ops, which save more; `scale_of` a weight is what is used for it."""
    scale = {} if layer.weight is None else {"weight": scale_of(layer.weight)}  # type: ignore[arg-type]
    z: Tensor = torch.func.functional_call(layer, scale, (x,))
    if activation == "identity":
        return z
    return F.elu(z, slope) if activation == "elu" else F.leaky_relu(z, slope)


class InvertedVectors(NamedTuple):
    """Of a norm, (C,), float32, or float64 for a float64 tensor: x is multiplied by gamma * invstd."""

    gamma: Tensor
    shift: Tensor
    invstd: Tensor


def gradients_into(
    grad: Tensor,
    result: Tensor,
    y: Tensor,
    vectors: InvertedVectors,
    activation: Activation,
    *,
    frozen: bool = False,
    in_group: int = 1,
) -> NormSums:
    """Write the gradient of what was normalised into `result`, which may be `grad`.

    Args:
        grad, result, y: (N, C, ...) of one dtype and layout; y is the result of the norm and the activation.
        vectors: of the norm.
        activation: with an inverse.
        frozen: whether the statistics were given.
        in_group: how many channels, one after the other, were normalised by the same statistics.

    Returns:
        Gradients of gamma and shift, (C,).
    """
    gamma, shift, invstd = vectors
    affine = NormAffine(torch.zeros_like(shift), gamma * invstd, shift)
    read, kernel = NormRead(y, affine, activation, inverted=True), sweeps(grad, y, result)
    sums = kernel.reduce(grad, read, result if frozen else None)
    if not frozen:
        moves = affine.moves(sums, invstd.square(), y.numel() // y.shape[1], in_group)
        kernel.apply_backward(grad, read, moves, result)
    return NormSums(sums.of_scale * invstd, sums.of_shift)
