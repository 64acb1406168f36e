"""The gradient of a convolution's weight in one native pass that normalises what the convolution read.

`csrc/norm_weight_grad.cpp` keeps a block of the weight's gradient in L2 while all pixels are read. For weights that do
not fit in L2, where `norm_conv_native.backward` would load its sums from memory with every strip, and for strides,
which that does not do. 1 x 1 and 3 x 3, one group, float32, channels_last. Each sum is one thread's: the result does
not depend on how many there are.

Known limits: the gradient of the input is not computed.
"""

from __future__ import annotations

import ctypes

import torch

from shoal.kernels.norm.norm_conv_native import ConvWindow, NormConv, is_same_convolution, vectors_of
from shoal.kernels.norm.norm_rows import in_rows, native_row_stride, run_in_workspace
from shoal.lowlevel.dispatch import level_number


class _NormWeightGradCall(ctypes.Structure):
    """ShoalNormWeightGrad of csrc/shoal_native.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("images", "height", "width", "out_height", "out_width")),
        *((name, ctypes.c_int64) for name in ("in_channels", "out_channels")),
        *((name, ctypes.c_int32) for name in ("kernel", "stride", "relu", "threads", "level", "unused")),
        ("x", ctypes.c_void_p),
        ("ld_x", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("mean", "scale", "shift", "grad_y")),
        ("ld_grad_y", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("grad_weight", "workspace")),
    )


def applies(x: torch.Tensor, weight: torch.Tensor, window: ConvWindow) -> bool:
    """Whether `weight_grad` can do this case, here.

    >>> applies(torch.ones(2, 3, 4, 5), torch.ones(8, 3, 1, 1), ConvWindow([1, 1], [0, 0], [1, 1], 1))
    False
    """
    return len(set(window.stride)) == 1 and is_same_convolution(x, weight, window)


def pays(x: torch.Tensor, weight: torch.Tensor, window: ConvWindow) -> bool:
    """Whether that is faster than the library's: it is for a 3 x 3, 1.3 to 1.9 times with AVX2, but not for a 1 x 1."""
    return weight.shape[2] == 3


def weight_grad(grad: torch.Tensor, x: torch.Tensor, layer: NormConv, *, level: str | None = None) -> torch.Tensor:
    """Replaces the gradient of `weight` in `y = conv2d(relu((x - mean) * scale + shift), weight)`.

    Args:
        grad: of y, (N, K, H', W'), whole.
        x: (N, C, H, W), float32, as `applies` requires.
        layer: with a weight of (K, C, 1, 1) or (K, C, 3, 3), of which only the shape is read.
        level: "portable", "avx2" or "avx512"; None: as SHOAL_KERNELS says.

    Returns:
        Of the shape of `weight`, channels_last, float32.

    >>> rows = lambda x: x.contiguous(memory_format=torch.channels_last)
    >>> x, grad = rows(torch.full((1, 2, 3, 3), 4.0)), rows(torch.ones(1, 1, 3, 3))
    >>> layer = NormConv(None, True, torch.ones(1, 2, 1, 1), None, ConvWindow([1, 1], [0, 0], [1, 1], 1))
    >>> weight_grad(grad, x, layer).flatten()
    tensor([36., 36.])
    """
    images, channels, height, width = x.shape
    grad = in_rows(grad)
    vectors, weight = vectors_of(x, layer.affine), layer.weight
    of_weight = torch.empty_like(weight, memory_format=torch.channels_last)
    call = _NormWeightGradCall(
        images=images,
        height=height,
        width=width,
        out_height=grad.shape[2],
        out_width=grad.shape[3],
        in_channels=channels,
        out_channels=weight.shape[0],
        kernel=weight.shape[2],
        stride=layer.window.stride[0],
        relu=layer.relu,
        threads=torch.get_num_threads(),
        level=level_number(level),
        x=x.data_ptr(),
        ld_x=native_row_stride(x),
        grad_y=grad.data_ptr(),
        ld_grad_y=native_row_stride(grad),
        grad_weight=of_weight.data_ptr(),
    )
    call.mean, call.scale, call.shift = (values.data_ptr() for values in vectors)
    run_in_workspace("shoal_norm_weight_grad", call, "shoal_norm_weight_grad_workspace_bytes")
    return of_weight
