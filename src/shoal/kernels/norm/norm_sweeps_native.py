"""The primitives of a norm by native kernels: float32 on the CPU, channels_last; `native_row_stride` says which slices.

`csrc/norm_pass.cpp` knows ReLU only. Other activations are PyTorch's ops before and after it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from shoal.errors import InputError
from shoal.kernels.norm.norm_operands import IDENTITY, Activation, NormAffine, NormMoves, NormRead, NormSums
from shoal.kernels.norm.norm_rows import native_row_stride, run_in_workspace, vector
from shoal.lowlevel.dispatch import level_number
from shoal.lowlevel.native import levels, run_native

_BYTES = "shoal_norm_pass_workspace_bytes"
_FUSED = ("identity", "relu")


class _NormPass(ctypes.Structure):
    """ShoalNormPass of csrc/shoal_native.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "channels")),
        *((name, ctypes.c_int32) for name in ("relu", "threads", "level", "unused")),
        ("x", ctypes.c_void_p),
        ("ld_x", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("mean", "scale", "shift", "residual")),
        ("ld_residual", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("ld_out", ctypes.c_int64),
        ("grad", ctypes.c_void_p),
        ("ld_grad", ctypes.c_int64),
        ("grad_x", ctypes.c_void_p),
        ("ld_grad_x", ctypes.c_int64),
        ("grad_residual", ctypes.c_void_p),
        ("ld_grad_residual", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("sum_of_centred", "sum", "statistic_mean", "statistic_variance")),
        ("workspace", ctypes.c_void_p),
    )


class NormSweepsNative:
    """As the reference of `norm_sweeps`."""

    def applies(self, *tensors: torch.Tensor) -> bool:
        """Whether it reads and writes such tensors, (N, C, H, W), here; all of one shape but for their channels."""
        return bool(levels()) and all(native_row_stride(x) is not None for x in tensors)

    def statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums are taken around a pivot in every block of rows and added up in doubles."""
        mean, variance = torch.empty(x.shape[1]), torch.empty(x.shape[1])
        call = _call(x)
        call.statistic_mean, call.statistic_variance = mean.data_ptr(), variance.data_ptr()
        run_in_workspace("shoal_statistics", call, _BYTES)
        return mean, variance

    def apply(
        self,
        x: torch.Tensor,
        affine: NormAffine,
        residual: torch.Tensor | None,
        activation: Activation,
        out: torch.Tensor,
    ) -> None:
        vectors = list(map(vector, affine))
        call = _call(x, vectors, activation)
        call.residual, call.ld_residual = _rows(residual, x)
        call.out, call.ld_out = _rows(out, x)
        run_native("shoal_norm_act", call)
        if activation.name not in _FUSED:
            activation.apply_(out)

    def reduce(
        self,
        grad: torch.Tensor,
        read: NormRead,
        grad_x: torch.Tensor | None = None,
        masked: torch.Tensor | None = None,
    ) -> NormSums:
        if read.activation.name not in _FUSED:
            grad, read = self._before_activation(grad, read)
        x = read.x
        sums = NormSums(torch.empty(x.shape[1]), torch.empty(x.shape[1]))
        vectors = list(map(vector, read.affine))
        call = _call(x, vectors, read.activation)
        call.grad, call.ld_grad = _rows(grad, x)
        call.out, call.ld_out = _rows(read.z, x)
        call.grad_x, call.ld_grad_x = _rows(grad_x, x)
        call.grad_residual, call.ld_grad_residual = _rows(masked, x)
        call.sum_of_centred, call.sum = (values.data_ptr() for values in sums)
        run_in_workspace("shoal_norm_act_backward", call, _BYTES)
        return sums

    def apply_backward(self, grad: torch.Tensor, read: NormRead, moves: NormMoves, grad_x: torch.Tensor) -> None:
        self.reduce(grad, read, grad_x)
        mean, scale, _ = read.affine
        self.apply(read.x, NormAffine(mean, *(values * scale for values in moves)), grad_x, IDENTITY, grad_x)

    def _before_activation(self, grad: torch.Tensor, read: NormRead) -> tuple[torch.Tensor, NormRead]:
        z = torch.empty_like(read.x)
        self.apply(read.x, read.affine, None, IDENTITY, z)
        return read.activation.gradient(grad, z), read._replace(activation=IDENTITY)


def _row_stride(x: torch.Tensor) -> int:
    found = native_row_stride(x)
    if found is None:
        raise InputError(f"{x.dtype} of strides {x.stride()}; give a channels_last float32 tensor on the CPU")
    return found


def _rows(tensor: torch.Tensor | None, x: torch.Tensor) -> tuple[int | None, int]:
    """Address and row stride of a tensor of the shape of `x`; null for None."""
    if tensor is None:
        return None, 0
    if tensor.shape != x.shape:
        raise InputError(f"{tuple(tensor.shape)} with x of {tuple(x.shape)}; give tensors of one shape")
    return tensor.data_ptr(), _row_stride(tensor)


def _call(x: torch.Tensor, vectors: Sequence[torch.Tensor] = (), activation: Activation = IDENTITY) -> _NormPass:
    """What all have in common; it points into `x` and `vectors`, those of a `NormAffine`."""
    rows = x.numel() // x.shape[1] if x.numel() else 0
    relu = activation.name == "relu"
    call = _NormPass(rows=rows, channels=x.shape[1], relu=relu, x=x.data_ptr(), ld_x=_row_stride(x))
    call.threads, call.level = max(1, min(torch.get_num_threads(), rows)), level_number()
    if vectors:
        call.mean, call.scale, call.shift = (values.data_ptr() for values in vectors)
    return call


NATIVE = NormSweepsNative()
