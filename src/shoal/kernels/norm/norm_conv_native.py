"""`norm_conv` in one native pass: normalise, apply ReLU, convolve and measure while the pixels are in the cache.

Batch norm split in two (Jung et al., MLSys'19): `csrc/norm_conv.cpp` normalises a strip of pixels into a small panel,
feeds register tiles from it and sums up what they write. The backward pass recomputes the panel from the saved input,
so no normalised tensor is ever in memory. 1 x 1 and 3 x 3, stride 1, one group, float32, channels_last.

A 3 x 3 uses Winograd's F(2x2, 3x3) (Lavin and Gray, CVPR'16): 16 products where a direct convolution takes 36, and
fewer roundings. SHOAL_KERNELS=no-winograd in the environment selects a direct convolution.

For weights that do not fit in L2, where `backward` would load its sums from memory with every strip, and for strides,
which that does not do, there is `weight_grad`: `csrc/norm_weight_grad.cpp` keeps a block of the weight's gradient in L2
while all pixels are read. Each sum is one thread's: the result does not depend on how many there are.

Known limits: every other convolution is the library's; x may have gaps between its pixels but not between its rows.
With Winograd's algorithm an infinity makes NaN of the results that read it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.kernels.norm.norm_operands import NormAffine, NormSums, OwnVariance
from shoal.kernels.norm.norm_rows import empty_rows, in_rows, native_row_stride, point, run_in_workspace, vector
from shoal.kernels.norm.statistics import MeasuredNorm
from shoal.lowlevel.dispatch import allowed, level_number
from shoal.lowlevel.native import fields, levels

_ONES = [1, 1]
_WIDE = 1 << 16  # channels in times channels out: a weight that is not much smaller than L2
_WIDE_BACKWARD = 1 << 14  # and with its gradient
_FEW_CHANNELS, _FEW_TILES = 16, 32
_MUCH_WORK = 1 << 24  # multiplications for one element of the kernel


class ConvWindow(NamedTuple):
    """How a convolution moves: each as `torch.nn.functional.conv2d` takes it, one number a dimension."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @property
    def options(self) -> tuple[Any, ...]:
        """What `aten.convolution` takes after the bias."""
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups


class NormConv(NamedTuple):
    """A convolution of relu(affine(x)).

    Attributes:
        affine: with vectors of (C,), in float32 or float64; None: nothing is normalised.
        relu: whether a ReLU comes before the convolution.
        weight, bias: of the convolution, (K, C, ...) and (K,) or None.
        window: of the convolution.
        own: the gradient of x is the whole one, through the statistics in `affine` too; never where this runs.
    """

    affine: NormAffine | None
    relu: bool
    weight: Tensor
    bias: Tensor | None
    window: ConvWindow
    own: OwnVariance | None = None


class _NormConvNativeCall(ctypes.Structure):
    """ShoalNormConv of csrc/shoal_native.h."""

    _fields_ = fields(
        "int64 images height width in_channels out_channels, int32 kernel relu threads level, tensor x,"
        "pointer mean scale shift weight, int64 weight_out weight_in weight_tap, pointer bias, tensor y,"
        "pointer mean_y variance_y, tensor grad_y, pointer grad_factor grad_mean_y grad_variance_y, tensor grad_x,"
        "int32 accumulate winograd, pointer grad_weight grad_scale grad_shift workspace"
    )


def applies(x: Tensor, weight: Tensor, bias: Tensor | None, window: ConvWindow) -> bool:
    """Whether `forward` and `backward` can do this case, here."""
    readable = bias is None or bias.dtype == torch.float32
    return readable and list(window.stride) == _ONES and is_same_convolution(x, weight, window)


def is_same_convolution(x: Tensor, weight: Tensor, window: ConvWindow) -> bool:
    """Whether it is what native kernels read: 1 x 1 or 3 x 3, "same" padding, one group, float32 in NHWC order."""
    kernel = tuple(weight.shape[2:])
    return (
        kernel in ((1, 1), (3, 3))
        and bool(levels())
        and weight.dtype == torch.float32
        and weight.is_cpu
        and weight.shape[1] == x.shape[1]
        and weight.shape[0] > 0
        and window.groups == 1
        and list(window.dilation) == _ONES
        and list(window.padding) == [kernel[0] // 2] * 2
        and native_row_stride(x) is not None
    )


def winograd_pays(x: Tensor, weight: Tensor) -> bool:
    """Whether Winograd's algorithm is faster than a direct convolution: not where its transforms are the work."""
    if weight.shape[2] != 3 or min(weight.shape[:2]) < _FEW_CHANNELS:
        return False
    images, _, height, width = x.shape
    tiles = images * ((height + 1) // 2) * ((width + 1) // 2)
    return tiles >= _FEW_TILES and allowed().winograd


def forward_pays(x: Tensor, weight: Tensor, bias: Tensor | None, window: ConvWindow) -> bool:
    """Whether `forward` is faster than the library's convolution and two passes, as measured by `bench.norm_conv`.

    A 1 x 1 is, and a 3 x 3 by Winograd's algorithm. Of the other 3 x 3 the library wins with AVX2 where there is much
    to do.
    """
    if weight.shape[2] == 1 or winograd_pays(x, weight):
        return True
    if weight.shape[0] * weight.shape[1] >= _WIDE:
        return False
    return levels()[-1] == "avx512" or x.numel() * weight.shape[0] < _MUCH_WORK


def backward_pays(x: Tensor, weight: Tensor, bias: Tensor | None, window: ConvWindow) -> bool:
    """The same of `backward`: not for a wide 3 x 3, of which only the weight's gradient is (`weight_grad`)."""
    if weight.shape[2] == 1 or winograd_pays(x, weight):
        return True
    return weight.shape[0] * weight.shape[1] < _WIDE_BACKWARD


def forward(
    x: Tensor, layer: NormConv, statistics: bool, *, out: Tensor | None = None, winograd: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces `y = conv2d(relu((x - mean) * scale + shift), weight, bias)` and `torch.var_mean(y)`.

    Args:
        x: (N, C, H, W), float32, as `applies` requires.
        layer: `applies` says which.
        statistics: whether mean and biased variance of y are wanted.
        out: where y is written, (N, K, H, W), channels_last, its pixels perhaps apart: a slice of a dense block.
        winograd: whether a 3 x 3 uses Winograd's algorithm; None: as `winograd_pays` says.

    Returns:
        y in channels_last, its mean and variance, (K,), float32; (0,) where not wanted.
    """
    images, _, height, width = x.shape
    channels, bias = layer.weight.shape[0], layer.bias
    y = empty_rows(images, channels, height, width) if out is None else out
    if native_row_stride(y) is None or y.shape != (images, channels, height, width):
        raise InputError(f"out is {tuple(y.shape)} of strides {y.stride()}; give a channels_last tensor for the result")
    found = [torch.empty(channels if statistics else 0) for _ in range(2)]
    call = _call(x, layer, winograd)
    point(call, bias=None if bias is None else vector(bias), y=y)
    if statistics:
        point(call, mean_y=found[0], variance_y=found[1])
    run_in_workspace("shoal_norm_conv_forward", call, "shoal_norm_conv_workspace_bytes", 0)
    return y, found[0], found[1]


def backward(
    grad: Tensor,
    measured: MeasuredNorm | None,
    x: Tensor,
    layer: NormConv,
    needs: Sequence[bool],
    *,
    factor: Tensor | None = None,
    grad_x: Tensor | None = None,
    winograd: bool | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, mean, scale, shift, weight and bias.

    Args:
        grad: of y, (N, K, H, W).
        measured: y and its mean, as `forward` returned them, and the gradients of its statistics: the whole gradient
            of y is grad * factor + of_mean / pixels + 2 * of_variance / pixels * (y - mean). None without statistics.
        needs: of x, of the three vectors, of weight, of bias: what is not needed is None.
        factor: (K,), what `grad` is multiplied with; None: nothing.
        grad_x: channels_last, its pixels perhaps apart: the gradient of x is added to it; None: a new tensor.
        The others as for `forward`.
    """
    images, channels, height, width = x.shape
    grad = in_rows(grad)
    into = empty_rows(images, channels, height, width) if grad_x is None else grad_x
    if native_row_stride(into) is None or into.shape != x.shape:
        raise InputError(
            f"grad_x is {tuple(into.shape)} of strides {into.stride()}; give a channels_last tensor like x"
        )
    affine, of_weight = layer.affine, torch.empty_like(layer.weight, memory_format=torch.channels_last)
    sums = NormSums(torch.empty(channels), torch.empty(channels))
    own_factor = None if factor is None else vector(factor)
    call = _call(x, layer, winograd)
    call.accumulate = grad_x is not None
    point(call, grad_y=grad, grad_factor=own_factor, grad_x=into)
    point(call, grad_weight=of_weight, grad_scale=sums.of_scale, grad_shift=sums.of_shift)
    of_mean = None
    if measured is not None:
        mean_y, of_mean, of_variance = map(vector, measured[1:])
        point(call, y=in_rows(measured.x), mean_y=mean_y, grad_mean_y=of_mean, grad_variance_y=of_variance)
    run_in_workspace("shoal_norm_conv_backward", call, "shoal_norm_conv_workspace_bytes", 1)
    found: tuple[Tensor | None, ...] = (None, None, None)
    if needs[1] and affine is not None:
        of_vectors = NormAffine(*map(vector, affine)).gradients(sums)
        found = tuple(of.to(to.dtype) for of, to in zip(of_vectors, affine, strict=True))
    of_bias = None
    if needs[3]:
        # The deviations of y from its mean add up to nothing.
        of_bias = grad.sum((0, 2, 3)) if own_factor is None else grad.sum((0, 2, 3)) * own_factor
        of_bias = of_bias if of_mean is None else of_bias + of_mean
    return into if needs[0] else None, *found, of_weight if needs[2] else None, of_bias


def _call(x: Tensor, layer: NormConv, winograd: bool | None) -> _NormConvNativeCall:
    """What forward and backward have in common."""
    weight = layer.weight
    kernel = weight.shape[2]
    if kernel == 3 and weight.stride(2) != 3 * weight.stride(3):
        raise InputError(f"a weight of strides {weight.stride()}; give one that is contiguous or channels_last")
    call = _NormConvNativeCall(
        winograd=kernel == 3 and (winograd_pays(x, weight) if winograd is None else winograd),
        weight_out=weight.stride(0),
        weight_in=weight.stride(1),
        weight_tap=weight.stride(3) if kernel == 3 else 0,
    )
    _describe(call, x, layer)
    point(call, weight=weight)
    return call


def _describe(call: Any, x: Tensor, layer: NormConv) -> None:
    """What all kernels are told of the convolution and its input."""
    call.images, call.in_channels, call.height, call.width = x.shape
    call.out_channels, _, call.kernel, _ = layer.weight.shape
    call.relu, call.threads, call.level = layer.relu, torch.get_num_threads(), level_number()
    channels = x.shape[1]
    affine = layer.affine or NormAffine(torch.zeros(channels), torch.ones(channels), torch.zeros(channels))
    mean, scale, shift = map(vector, affine)
    point(call, x=x, mean=mean, scale=scale, shift=shift)


class _NormWeightGradCall(ctypes.Structure):
    """ShoalNormWeightGrad of csrc/shoal_native.h."""

    _fields_ = fields(
        "int64 images height width out_height out_width in_channels out_channels,"
        "int32 kernel stride relu threads level unused, tensor x, pointer mean scale shift, tensor grad_y,"
        "pointer grad_weight workspace"
    )


def weight_grad_applies(x: Tensor, weight: Tensor, window: ConvWindow) -> bool:
    """Whether `weight_grad` can do this case, here.

    >>> weight_grad_applies(torch.ones(2, 3, 4, 5), torch.ones(8, 3, 1, 1), ConvWindow([1, 1], [0, 0], [1, 1], 1))
    False
    """
    return len(set(window.stride)) == 1 and is_same_convolution(x, weight, window)


def weight_grad_pays(x: Tensor, weight: Tensor, window: ConvWindow) -> bool:
    """Whether that is faster than the library's: it is for a 3 x 3, 1.3 to 1.9 times with AVX2, but not for a 1 x 1."""
    return weight.shape[2] == 3


def weight_grad(grad: Tensor, x: Tensor, layer: NormConv) -> Tensor:
    """Replaces the gradient of `weight` in `y = conv2d(relu((x - mean) * scale + shift), weight)`.

    Args:
        grad: of y, (N, K, H', W'), whole.
        x: (N, C, H, W), float32, as `applies` requires.
        layer: with a weight of (K, C, 1, 1) or (K, C, 3, 3), of which only the shape is read.

    Returns:
        Of the shape of `weight`, channels_last, float32.

    >>> rows = lambda x: x.contiguous(memory_format=torch.channels_last)
    >>> x, grad = rows(torch.full((1, 2, 3, 3), 4.0)), rows(torch.ones(1, 1, 3, 3))
    >>> layer = NormConv(None, True, torch.ones(1, 2, 1, 1), None, ConvWindow([1, 1], [0, 0], [1, 1], 1))
    >>> weight_grad(grad, x, layer).flatten()
    tensor([36., 36.])
    """
    grad = in_rows(grad)
    of_weight = torch.empty_like(layer.weight, memory_format=torch.channels_last)
    call = _NormWeightGradCall(stride=layer.window.stride[0], out_height=grad.shape[2], out_width=grad.shape[3])
    _describe(call, x, layer)
    point(call, grad_y=grad, grad_weight=of_weight)
    run_in_workspace("shoal_norm_weight_grad", call, "shoal_norm_weight_grad_workspace_bytes")
    return of_weight
