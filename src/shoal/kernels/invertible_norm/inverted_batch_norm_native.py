"""The sweeps of `inverted_batch_norm` and its backward in `csrc/inverted_batch_norm.cpp`, for float32 on the CPU.

A kernel of `inverted_batch_norm_sweeps`, of every activation. Other dtypes and other layouts are left to PyTorch.
ELU and its inverse are off by less than an ulp, also near zero (`csrc/invertible_activations.h`).
"""

from __future__ import annotations

import ctypes

import torch

from shoal.lowlevel import native

BEST = -1  # level: what this processor runs
_LEAKY_RELU, _ELU = range(2)  # in the order of ShoalInvertible in csrc/shoal_native.h


class _Call(ctypes.Structure):
    """`ShoalInvertedBatchNorm` of csrc/shoal_native.h."""

    _fields_ = (
        ("images", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("pixels", ctypes.c_int64),
        ("channels_last", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("level", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("slope", ctypes.c_float),
        ("frozen", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("grad", "y", "shift", "sum", "centred", "workspace")),
        *((name, ctypes.c_void_p) for name in ("slide", "tilt", "steep", "result")),
    )


def applies(source: torch.Tensor, y: torch.Tensor, activation: str) -> bool:
    """As `Sweeps.applies`."""
    if y.device.type != "cpu" or not y.dtype == source.dtype == torch.float32 or not y.numel():
        return False
    return native.library() is not None and (_is_channels_last(y) or y.is_contiguous())


def forward_into(
    x: torch.Tensor,
    y: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    activation: str,
    slope: float,
    level: int = BEST,
) -> None:
    """As `Sweeps.forward_into`; `level` as for `backward_into`."""
    library = native.library()
    assert library is not None
    mean, scale, shift = mean.contiguous(), scale.contiguous(), shift.contiguous()
    call = _call(x, y, activation, slope, level)
    call.slide, call.shift, call.steep = mean.data_ptr(), shift.data_ptr(), scale.data_ptr()
    library.shoal_inverted_batch_norm_forward(ctypes.byref(call))


def backward_into(
    grad: torch.Tensor,
    result: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    inverse_deviation: torch.Tensor,
    frozen: bool,
    activation: str,
    slope: float,
    level: int = BEST,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Sweeps.backward_into`; `level`: 0 for portable code, 1 for AVX2 at most."""
    library = native.library()
    assert library is not None
    scale, shift = scale.contiguous(), shift.contiguous()
    channels = y.shape[1]
    call = _call(y, result, activation, slope, level)
    sums = torch.empty(2 * call.threads + 2, channels, dtype=torch.float64)
    call.grad, call.shift = grad.data_ptr(), shift.data_ptr()
    call.sum, call.centred, call.workspace = (sums[place:].data_ptr() for place in range(3))
    library.shoal_inverted_batch_norm_sums(ctypes.byref(call))
    of_shift = sums[0]
    of_scale = sums[1] / scale
    rows = y.numel() // channels
    slide, tilt = (of_shift / rows).float(), (of_scale / rows / scale).float()
    steep = scale * inverse_deviation
    call.frozen = frozen
    call.slide, call.tilt, call.steep = slide.data_ptr(), tilt.data_ptr(), steep.data_ptr()
    library.shoal_inverted_batch_norm_result(ctypes.byref(call))
    return of_scale, of_shift


def _call(y: torch.Tensor, result: torch.Tensor, activation: str, slope: float, level: int) -> _Call:
    images, channels = y.shape[:2]
    return _Call(
        images=images,
        channels=channels,
        pixels=y.numel() // (images * channels),
        channels_last=_is_channels_last(y),
        threads=torch.get_num_threads(),
        level=level,
        activation=_ELU if activation == "elu" else _LEAKY_RELU,
        slope=1.0 if activation == "identity" else slope,
        y=y.data_ptr(),
        result=result.data_ptr(),
    )


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.movedim(1, -1).is_contiguous()
