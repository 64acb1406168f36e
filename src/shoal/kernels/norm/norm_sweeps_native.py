"""The primitives of a norm by native kernels: float32 on the CPU, contiguous or channels_last, `csrc/norm_pass.cpp`.

A slice of the channels, too, is read and written. ELU and its inverse are off by less than an ulp, also near zero
(`csrc/norm_activations.h`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from shoal.kernels.norm.norm_operands import IDENTITY, Activation, NormAffine, NormMoves, NormRead, NormSums
from shoal.kernels.norm.norm_rows import is_channels_last, run_in_workspace, strides_of, vector
from shoal.lowlevel.dispatch import level_number
from shoal.lowlevel.native import fields, levels, run_native

_BYTES = "shoal_norm_pass_workspace_bytes"
_ACTIVATIONS = ("identity", "relu", "leaky_relu", "elu")  # in the order of ShoalActivation in csrc/shoal_native.h


class _NormPass(ctypes.Structure):
    """ShoalNormPass of csrc/shoal_native.h."""

    _fields_ = fields(
        "int64 images channels pixels, int32 channels_last activation inverted threads level, float alpha,"
        "tensor x residual out grad grad_x grad_residual, pointer mean scale shift slope constant,"
        "pointer sum_of_centred sum statistic_mean statistic_variance workspace"
    )


class NormSweepsNative:
    """As the reference of `norm_sweeps`."""

    def applies(self, *tensors: Tensor) -> bool:
        """Whether it reads and writes such tensors, (N, C, ...), here; all of one shape but for their channels."""
        if not levels() or any(x.dtype != torch.float32 or not x.is_cpu for x in tensors):
            return False
        return all(x.layout == torch.strided for x in tensors) and is_channels_last(*tensors) is not None

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sums are taken around a pivot in every block of pixels and added up in doubles."""
        mean, variance = torch.empty(x.shape[1]), torch.empty(x.shape[1])
        call = _call({"x": x}, {"statistic_mean": mean, "statistic_variance": variance})
        run_in_workspace("shoal_norm_statistics", call, _BYTES)
        return mean, variance

    def apply(
        self, x: Tensor, affine: NormAffine, residual: Tensor | None, activation: Activation, out: Tensor
    ) -> None:
        call = _call({"x": x, "residual": residual, "out": out}, _vectors(affine), activation)
        run_native("shoal_norm_apply", call)

    def reduce(
        self, grad: Tensor, read: NormRead, grad_x: Tensor | None = None, masked: Tensor | None = None
    ) -> NormSums:
        products, total = (torch.empty(grad.shape[1], dtype=torch.float64) for _ in range(2))
        written = {"grad_x": grad_x, "grad_residual": masked}
        call = _backward_call(grad, read, written, {"sum_of_centred": products, "sum": total})
        run_in_workspace("shoal_norm_reduce", call, _BYTES)
        return NormSums(products / read.affine.scale if read.inverted else products, total)

    def apply_backward(self, grad: Tensor, read: NormRead, moves: NormMoves, grad_x: Tensor) -> None:
        slope, constant = moves
        slope = slope / read.affine.scale if read.inverted else slope
        vectors = {"slope": vector(slope), "constant": vector(constant)}
        run_native("shoal_norm_apply_backward", _backward_call(grad, read, {"grad_x": grad_x}, vectors))


def _vectors(affine: NormAffine) -> dict[str, Tensor]:
    return dict(zip(affine._fields, map(vector, affine), strict=True))


def _backward_call(grad: Tensor, read: NormRead, written: dict[str, Any], vectors: dict[str, Any]) -> _NormPass:
    tensors = {"x": read.x, "grad": grad, "out": read.z, **written}
    call = _call(tensors, {**_vectors(read.affine), **vectors}, read.activation)
    call.inverted = read.inverted
    return call


def _call(
    tensors: dict[str, Tensor | None], vectors: dict[str, Tensor], activation: Activation = IDENTITY
) -> _NormPass:
    """A pass over tensors, the first of which is there, with their vectors, which live as long as it."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    x = next(iter(given.values()))
    channels_last, strides = strides_of(*given.values())
    images, channels = x.shape[:2]
    call = _NormPass(images, channels, x.numel() // (images * channels), channels_last)
    call.activation, call.alpha = _ACTIVATIONS.index(activation.name), activation.slope
    call.threads, call.level = torch.get_num_threads(), level_number()
    for (name, tensor), stride in zip(given.items(), strides, strict=True):
        setattr(call, name, tensor.data_ptr())
        setattr(call, f"ld_{name}", stride)
    for name, values in vectors.items():
        setattr(call, name, values.data_ptr())
    call.kept = vectors
    return call


NATIVE = NormSweepsNative()
