"""A norm and its activation as one custom op that saves only its result, see `inverted_batch_norm`; its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.kernels.norm.norm_operands import Activation, NormAffine, NormRead, NormSums, wide
from shoal.kernels.norm.norm_sweeps import apply_exactly, sweeps
from shoal.kernels.norm.statistics import measure
from shoal.lowlevel.direct_call import needs_dispatch, register_op

Vectors = tuple[Tensor, Tensor]


class InvertedOp:
    """`shoal::NAME`, `shoal::NAME_backward` and the same functions over their first operand; differentiable once.

    With statistics of samples, a sample's channel is a channel of its own to the sweeps: in a contiguous tensor those
    of all samples lie one after the other; in channels_last they are swept sample by sample.

    Attributes:
        op: the custom op of (x, weight, bias, ...), which returns y and two vectors that carry no gradient.
        backward_op: of (grad, y, weight, bias, invstd, ...), which returns the gradients of x, weight and bias.
    """

    def __init__(self, name: str, scale_of: Callable[[Tensor, float], Tensor], *, of_samples: bool) -> None:
        """
        Args:
            name: of the op.
            scale_of: of a weight and the norm's eps: the scale that is used for it.
            of_samples: whether each sample's groups of channels have statistics of their own; else channels have those
                of the batch, or are given them.
        """
        self._scale_of, self._of_samples = scale_of, of_samples
        vectors, results = "Tensor? weight, Tensor? bias", "(Tensor, Tensor, Tensor)"
        given, kept = (
            ("int groups", "") if of_samples else ("Tensor? mean, Tensor? variance", "bool frozen, float eps,")
        )
        activation = "str activation, float slope"
        self.op = register_op(
            f"{name}(Tensor x, {vectors}, {given}, float eps, {activation}) -> {results}",
            *(self._new, self._fake, self._setup, self._gradients),
        )
        self.backward_op = register_op(
            f"{name}_backward(Tensor grad, Tensor y, {vectors}, Tensor invstd, {kept} {activation}) -> {results}",
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

    def by_pytorch(self, layer: Any, x: Tensor, activation: str, slope: float) -> Tensor:
        """What a layer and its activation compute, by PyTorch's own ops, which save more."""
        scale = {} if layer.weight is None else {"weight": self._scale_of(layer.weight, layer.eps)}
        z: Tensor = torch.func.functional_call(layer, scale, (x,))
        if activation == "identity":
            return z
        return F.elu(z, slope) if activation == "elu" else F.leaky_relu(z, slope)

    def _forward(self, x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, *arguments: Any) -> Vectors:
        """Write the result into `y`, which may be `x`; returns the two vectors."""
        *given, eps, activation, slope = arguments
        mean, variance = self._statistics(x, *given)
        invstd = torch.rsqrt(variance + eps)
        gamma, shift, factor = self._vectors(x, weight, bias, invstd, eps)
        affine = NormAffine(_of_channels(mean, x.shape[1]), factor * gamma, shift)
        for (source, target), ours in self._swept(x, y):
            apply_exactly(source, affine.of(ours), None, Activation(activation, slope), target)
        return mean, invstd if self._of_samples else variance

    def _backward(self, grad: Tensor, result: Tensor, y: Tensor, *operands: Any) -> Vectors:
        """Write the gradient of x into `result`, which may be `grad`; returns those of weight and bias."""
        weight, bias, invstd, *kept, activation, slope = operands
        frozen, eps = kept or (False, 0.0)
        vectors, channels = self._vectors(y, weight, bias, invstd, eps), y.shape[1]
        in_group = channels // invstd.shape[1] if self._of_samples else 1
        found = []
        for (source, target, one), ours in self._swept(grad, result, y):
            own, made = InvertedVectors(*(vector[ours] for vector in vectors)), Activation(activation, slope)
            found.append(gradients_into(source, target, one, own, made, frozen=frozen, in_group=in_group))
        of_scale, of_shift = found[0]
        if self._of_samples:
            of_scale, of_shift = (torch.cat(parts).view(-1, channels).sum(0) for parts in zip(*found, strict=True))
        return (
            of_scale.to(invstd.dtype if weight is None else weight.dtype),
            of_shift.to(invstd.dtype if bias is None else bias.dtype),
        )

    def _statistics(self, x: Tensor, *given: Any) -> Vectors:
        """Mean and biased variance, (C,), or (N, groups)."""
        if self._of_samples:
            return _statistics_of_samples(x, *given)
        mean, variance = given
        if mean is None or variance is None:
            return measure(x)
        return mean.to(wide(x.dtype), copy=True), variance.to(wide(x.dtype), copy=True)

    def _vectors(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, invstd: Tensor, eps: float
    ) -> InvertedVectors:
        """Those of all channels that are swept."""
        samples, channels = x.shape[:2]
        gamma = invstd.new_ones(channels) if weight is None else self._scale_of(weight.to(invstd.dtype), eps)
        shift = invstd.new_zeros(channels) if bias is None else bias.to(invstd.dtype)
        if self._of_samples:
            gamma, shift = gamma.repeat(samples), shift.repeat(samples)
        return InvertedVectors(gamma, shift, _of_channels(invstd, channels))

    def _swept(self, *tensors: Tensor) -> Iterator[tuple[Any, slice]]:
        """Views of tensors of one layout that cover them, and which of all channels are theirs."""
        x = tensors[0]
        if self._of_samples and not x.is_contiguous():
            for sample, views in enumerate(zip(*(tensor.split(1) for tensor in tensors), strict=True)):
                yield views, slice(sample * x.shape[1], (sample + 1) * x.shape[1])
            return
        if self._of_samples:
            tensors = tuple(tensor.view(1, x.shape[0] * x.shape[1], -1) for tensor in tensors)
        yield tensors, slice(None)

    def _new(self, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        y = self._like(x)
        if y.stride() != x.stride():
            x = y.copy_(x)
        return y, *self._forward(x, y, *arguments)

    def _fake(self, x: Tensor, weight: Any, bias: Any, first: Any, *_: Any) -> tuple[Tensor, ...]:
        vector = x.new_empty((x.shape[0], first) if self._of_samples else x.shape[1], dtype=wide(x.dtype))
        return self._like(x), vector, torch.empty_like(vector)

    def _new_gradients(self, grad: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        result = torch.empty_like(y)
        if grad.stride() != y.stride():
            grad = result.copy_(grad)
        return result, *self._backward(grad, result, y, *arguments)

    def _gradients_fake(self, grad: Any, y: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        vector = operands[2].new_empty(y.shape[1])
        return torch.empty_like(y), *(torch.empty_like(vector if one is None else one) for one in operands[:2])

    def _like(self, x: Tensor) -> Tensor:
        swept = not self._of_samples or is_swept(x)
        return torch.empty_like(x, memory_format=torch.preserve_format if swept else torch.contiguous_format)

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, weight, bias, given, *_, eps, activation, slope = inputs
        y, mean, second = output
        invstd = second if self._of_samples else torch.rsqrt(second + eps)
        ctx.options = (*(() if self._of_samples else (given is not None, eps)), activation, slope)
        ctx.mark_non_differentiable(mean, second)
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


def is_swept(x: Tensor) -> bool:
    """Whether the channels of samples can be swept as they lie."""
    return x.is_contiguous() or x.movedim(1, -1).is_contiguous()


def _statistics_of_samples(x: Tensor, groups: int) -> Vectors:
    """Mean and biased variance of the groups of each sample, (N, groups)."""
    samples, channels = x.shape[:2]
    if x.is_contiguous():
        mean, variance = measure(x.view(1, samples * groups, -1))
        return mean.view(samples, groups), variance.view(samples, groups)
    found = [measure(sample) for sample in x.split(1)]
    mean, variance = (torch.stack(vectors) for vectors in zip(*found, strict=True))
    if groups == channels:
        return mean, variance
    mean, variance = (vector.view(samples, groups, -1) for vector in (mean, variance))
    middle = mean.mean(2, keepdim=True)
    return middle.squeeze(2), (variance + (mean - middle).square()).mean(2)


def _of_channels(statistics: Tensor, channels: int) -> Tensor:
    """(C,) as it is, (N, groups) as (N * C,)."""
    if statistics.dim() == 1:
        return statistics
    return statistics.repeat_interleave(channels // statistics.shape[1], 1).view(-1)


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
