"""`shoal::dense_block`: layers that each read all channels before them and append theirs, in one buffer.

DenseNet's block (Jung et al., MLSys'19, section 3, inter-composite-layer fusion). Each layer writes its channels where
the next one reads, so nothing is concatenated; the statistics of a channel are computed once, by the convolution that
writes it. Backward, the layers add to one gradient buffer, and the gradients of the statistics to two vectors: one
affine map for all readers of a channel, applied when its producer reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shoal.kernels.batch_norm_vectors import batch_norm_scale, batch_norm_scale_backward
from shoal.kernels.memory_format import dense_in_format, memory_format_of, suggested_memory_format
from shoal.kernels.norm.norm_conv import convolve, convolve_backward
from shoal.kernels.norm.norm_conv_native import ConvWindow, NormConv
from shoal.kernels.norm.norm_operands import NormAffine, wide
from shoal.kernels.norm.statistics import MeasuredNorm, measure, whole_gradient
from shoal.lowlevel.direct_call import register_op

Moments = tuple[Tensor, Tensor]  # mean, variance


@dataclass(frozen=True)
class DenseLayer:
    """A batch norm, perhaps a ReLU, and a convolution of stride 1 that leaves height and width as they are.

    Attributes:
        gamma, beta: of the batch norm, (C,).
        weight: of the convolution, (K, C, ...), its sides odd.
        eps: of the batch norm.
        relu: whether a ReLU comes between them.
    """

    gamma: Tensor
    beta: Tensor
    weight: Tensor
    eps: float
    relu: bool


def dense_block(
    x: Tensor, mean: Tensor | None, variance: Tensor | None, layers: Sequence[Sequence[DenseLayer]]
) -> tuple[Tensor, Moments, list[list[Moments]]]:
    """Replaces `for layer in layers: x = torch.cat([x, layer(x)], 1)` where a layer is batch norms and convolutions.

    Args:
        x: (N, C, ...), of the dtype of the weights.
        mean, variance: of its channels, (C,), in float32 or float64; None: they are measured here, and x need not be
            saved for that as well.
        layers: as many steps each; all but the last read what the one before made, the last gives the new channels.

    Returns:
        All channels; their mean and biased variance; those of what is made between the steps of each layer. The first
        three are differentiable once.

    >>> x, one = torch.tensor([[[1.0, 3.0]]]), torch.ones(1)
    >>> step = DenseLayer(one, one, torch.ones(1, 1, 1), 0.0, True)
    >>> features, (mean, _), _ = dense_block(x, 2 * one, one, [[step]])
    >>> features, mean
    (tensor([[[1., 3.],
             [0., 2.]]]), tensor([2., 1.]))
    """
    steps = [step for layer in layers for step in layer]
    parameters = [tensor for step in steps for tensor in (step.gamma, step.beta, step.weight)]
    each = [step.eps for step in steps], [step.relu for step in steps]
    found = torch.ops.shoal.dense_block(x, mean, variance, parameters, *each, len(layers[0]))
    features, means, variances, *inner = found
    between = len(layers[0]) - 1
    pairs = [(inner[at + 1], inner[at + 2]) for at in range(0, len(inner), 3)]
    return features, (means, variances), [pairs[at * between : (at + 1) * between] for at in range(len(layers))]


def _layers(
    parameters: Sequence[Tensor], eps: Sequence[float], relu: Sequence[bool], steps: int
) -> list[list[DenseLayer]]:
    flat = list(map(DenseLayer, parameters[::3], parameters[1::3], parameters[2::3], eps, relu))
    return [flat[at : at + steps] for at in range(0, len(flat), steps)]


def _window(weight: Tensor) -> ConvWindow:
    sides = weight.shape[2:]
    return ConvWindow([1] * len(sides), [side // 2 for side in sides], [1] * len(sides), 1)


def _empty(like: Tensor, channels: int) -> Tensor:
    """Room for `channels` on the pixels of `like`, in its layout."""
    shape = (like.shape[0], channels, *like.shape[2:])
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format_of(like))


def _of(measured: Sequence[Tensor], channels: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Some channels of a tensor, and of its mean and variance."""
    x, mean, variance = measured
    return x[:, channels], mean[channels], variance[channels]


def _forward(x: Tensor, mean: Tensor | None, variance: Tensor | None, *described: Any) -> list[Tensor]:
    """`described`: what `_layers` reads."""
    layers, have = _layers(*described), x.shape[1]
    channels = have + sum(layer[-1].weight.shape[0] for layer in layers)
    if mean is None or variance is None:
        mean, variance = measure(x)
    whole = [_empty(x, channels), mean.new_empty(channels), variance.new_empty(channels)]
    for room, given in zip(_of(whole, slice(have)), (x, mean, variance), strict=True):
        room.copy_(given)
    _, means, variances = whole
    inner: list[Tensor] = []
    for layer in layers:
        read = _of(whole, slice(have))
        for step in layer[:-1]:
            read = _step(*read, step)
            inner += read
        made = slice(have, have + layer[-1].weight.shape[0])
        _, means[made], variances[made] = _step(*read, layer[-1], whole[0][:, made])
        have = made.stop
    return [*whole, *inner]


def _step(
    x: Tensor, mean: Tensor, variance: Tensor, step: DenseLayer, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean_y, variance_y = convolve(x, _layer(step, mean, variance), True, out)
    return dense_in_format(y, memory_format_of(x)) if out is None else y, mean_y, variance_y


def _layer(step: DenseLayer, mean: Tensor, variance: Tensor) -> NormConv:
    """A step given the statistics of what it reads, its batch norm in the dtype of `variance`."""
    affine = NormAffine(mean, batch_norm_scale(variance, step.gamma, step.eps), step.beta.to(variance.dtype))
    return NormConv(affine, step.relu, step.weight, None, _window(step.weight))


def _forward_fake(x: Tensor, mean: Tensor | None, variance: Any, *described: Any) -> list[Tensor]:
    layers = _layers(*described)
    widths = [step.weight.shape[0] for layer in layers for step in layer[:-1]]
    kind = wide(x.dtype) if mean is None else mean.dtype
    found: list[Tensor] = []
    for channels in (x.shape[1] + sum(layer[-1].weight.shape[0] for layer in layers), *widths):
        found += [_empty(x, channels), *(x.new_empty(channels, dtype=kind) for _ in range(2))]
    return found


def _backward(grad: Tensor | None, of_means: Tensor | None, of_variances: Tensor | None, *saved: Any) -> list[Tensor]:
    """Gradients of x, of mean and variance unless they were `measured` here, and of the parameters in their order."""
    *whole, inner, parameters, eps, relu, steps, measured = saved
    layers, have = _layers(parameters, eps, relu, steps), whole[0].shape[1]
    sums = [_empty(whole[0], have), *map(torch.empty_like, whole[1:])]
    for total, given in zip(sums, (grad, of_means, of_variances), strict=True):
        total.zero_() if given is None else total.copy_(given)
    between: list[Any] = [inner[at : at + 3] for at in range(0, len(inner), 3)]
    grads: list[Tensor] = []
    for number in reversed(range(len(layers))):
        layer = layers[number]
        made = slice(have - layer[-1].weight.shape[0], have)
        have = made.start
        read = [_of(whole, slice(have)), *between[number * (steps - 1) : (number + 1) * (steps - 1)]]
        y, mean_y, _ = _of(whole, made)
        of_y, of_mean, of_variance = _of(sums, made)
        for place in reversed(range(steps)):
            (x, mean, variance), step = read[place], layer[place]
            known, into = MeasuredNorm(y, mean_y, of_mean, of_variance), None if place else sums[0][:, :have]
            found: Any = convolve_backward(
                of_y, known, x, _layer(step, mean, variance), (True, True, True, False), into
            )
            of_y, of_mean, of_scale, of_beta, of_weight, _ = found
            of_variance, of_gamma = batch_norm_scale_backward(of_scale, variance, step.gamma, step.eps, [True, True])
            grads[:0] = of_gamma, of_beta, of_weight
            y, mean_y = x, mean
        for total, of_read in zip(_of(sums, slice(have))[1:], (of_mean, of_variance), strict=True):
            total += of_read
    of_x, of_mean, of_variance = _of(sums, slice(have))
    if measured:
        x, mean, _ = _of(whole, slice(have))
        of_x = whole_gradient(of_x, MeasuredNorm(x, mean, of_mean, of_variance))
    return [
        _empty(whole[0], have).copy_(of_x),
        *(() if measured else (of_mean.clone(), of_variance.clone())),
        *(
            dense_in_format(of.to(to.dtype), suggested_memory_format(to))
            for of, to in zip(grads, parameters, strict=True)
        ),
    ]


def _backward_fake(*operands: Any) -> list[Tensor]:
    features, means, variances, _, *described, measured = operands[3:]
    layers, parameters = _layers(*described), described[0]
    have = features.shape[1] - sum(layer[-1].weight.shape[0] for layer in layers)
    grads = [torch.empty_like(tensor, memory_format=suggested_memory_format(tensor)) for tensor in parameters]
    vectors = [] if measured else [means.new_empty(have), variances.new_empty(have)]
    return [_empty(features, have), *vectors, *grads]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, mean, _, parameters, ctx.eps, ctx.relu, ctx.steps = inputs
    ctx.measured = mean is None
    ctx.written = len(output)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *parameters)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    grad, of_means, of_variances, *_ = grads
    saved = list(ctx.saved_tensors)
    (features, means, variances, *inner), parameters = saved[: ctx.written], saved[ctx.written :]
    described = parameters, ctx.eps, ctx.relu, ctx.steps, ctx.measured
    of_x, *others = torch.ops.shoal.dense_block_backward(
        grad, of_means, of_variances, features, means, variances, inner, *described
    )
    of_mean, of_variance = (None, None) if ctx.measured else (others.pop(0), others.pop(0))
    return of_x, of_mean, of_variance, others, None, None, None


register_op(
    "dense_block(Tensor x, Tensor? mean, Tensor? variance, Tensor[] parameters, float[] eps, bool[] relu, int steps)"
    " -> Tensor[]",
    *(_forward, _forward_fake, _setup, _differentiate),
)
register_op(
    "dense_block_backward(Tensor? grad, Tensor? of_means, Tensor? of_variances, Tensor features, Tensor means,"
    " Tensor variances, Tensor[] inner, Tensor[] parameters, float[] eps, bool[] relu, int steps, bool measured)"
    " -> Tensor[]",
    *(_backward, _backward_fake),
)


def _one_way(pixels: int, parameters: Sequence[Any]) -> int:
    """FLOPs of all convolutions; the flop counter gives shapes."""
    return sum(2 * pixels * parameters[at].numel() for at in range(2, len(parameters), 3))


@register_flop_formula(torch.ops.shoal.dense_block, get_raw=True)
def _flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return _one_way(args[0].numel() // args[0].shape[1], args[3])


@register_flop_formula(torch.ops.shoal.dense_block_backward, get_raw=True)
def _backward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 2 * _one_way(args[3].numel() // args[3].shape[1], args[7])
