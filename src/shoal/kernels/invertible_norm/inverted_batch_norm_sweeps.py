"""The primitives of a norm that saves only its result, after an activation with an inverse.

Native: `csrc/inverted_batch_norm.cpp`, float32 on the CPU, contiguous or channels_last. ELU and its inverse are off by
less than an ulp, also near zero (`csrc/invertible_activations.h`). Else those of `norm_sweeps`. Forward is one pass,
which may write over its input; backward is two over the result and the gradient, the second of which may write over
the gradient. Nothing else as large is allocated.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from shoal.kernels.norm.norm_operands import Activation, NormAffine, NormMoves, NormRead, NormSums
from shoal.kernels.norm.norm_sweeps import REFERENCE, NormSweeps
from shoal.kernels.norm.norm_sweeps_triton import TRITON
from shoal.lowlevel import native
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, level_number, register

_LEAKY_RELU, _ELU = range(2)  # in the order of ShoalInvertible in csrc/shoal_native.h


class InvertedVectors(NamedTuple):
    """Of a norm, (C,), float32, or float64 for a float64 tensor: x is multiplied by gamma * invstd."""

    gamma: torch.Tensor
    shift: torch.Tensor
    invstd: torch.Tensor


class _InvertedBatchNormCall(ctypes.Structure):
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
        *((name, ctypes.c_void_p) for name in ("mean", "mean_grad_xhat", "scale", "result")),
    )


class InvertedSweepsNative:
    """As the reference of `norm_sweeps`, of what is inverted."""

    def applies(self, source: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether it reads `source`, and reads or writes `y`, here."""
        if y.device.type != "cpu" or not y.dtype == source.dtype == torch.float32 or not y.numel():
            return False
        return native.library() is not None and (_is_channels_last(y) or y.is_contiguous())

    def apply(
        self,
        x: torch.Tensor,
        affine: NormAffine,
        residual: None,
        activation: Activation,
        out: torch.Tensor,
    ) -> None:
        mean, scale, shift = (values.contiguous() for values in affine)
        call = _call(x, out, activation)
        call.mean, call.shift, call.scale = mean.data_ptr(), shift.data_ptr(), scale.data_ptr()
        _run("shoal_inverted_batch_norm_forward", call)

    def reduce(self, grad: torch.Tensor, read: NormRead, grad_x: torch.Tensor | None = None) -> NormSums:
        y, (_, scale, shift) = read.x, read.affine
        call = _call(y, y, read.activation)
        sums = torch.empty(2 * call.threads + 2, y.shape[1], dtype=torch.float64)
        shift = shift.contiguous()
        call.grad, call.shift = grad.data_ptr(), shift.data_ptr()
        call.sum, call.centred, call.workspace = (sums[place:].data_ptr() for place in range(3))
        _run("shoal_inverted_batch_norm_sums", call)
        if grad_x is not None:
            self.apply_backward(grad, read, None, grad_x)
        return NormSums(sums[1] / scale, sums[0])

    def apply_backward(
        self,
        grad: torch.Tensor,
        read: NormRead,
        moves: NormMoves | None,
        grad_x: torch.Tensor,
    ) -> None:
        scale, shift = read.affine.scale.contiguous(), read.affine.shift.contiguous()
        call = _call(read.x, grad_x, read.activation)
        call.grad, call.shift, call.scale, call.frozen = grad.data_ptr(), shift.data_ptr(), scale.data_ptr(), True
        if moves is not None:  # taken off; the slope, of (x - mean) * scale
            slope, constant = (-moves.slope / scale).float(), (-moves.constant).float()
            call.frozen, call.mean_grad_xhat, call.mean = False, slope.data_ptr(), constant.data_ptr()
        _run("shoal_inverted_batch_norm_result", call)


def _call(y: torch.Tensor, result: torch.Tensor, activation: Activation) -> _InvertedBatchNormCall:
    images, channels = y.shape[:2]
    return _InvertedBatchNormCall(
        images=images,
        channels=channels,
        pixels=y.numel() // (images * channels),
        channels_last=_is_channels_last(y),
        threads=torch.get_num_threads(),
        level=level_number(),
        activation=_ELU if activation.name == "elu" else _LEAKY_RELU,
        slope=activation.slope if activation.name != "identity" else 1.0,
        y=y.data_ptr(),
        result=result.data_ptr(),
    )


def _run(name: str, call: _InvertedBatchNormCall) -> None:
    getattr(native.library(), name)(ctypes.byref(call))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.movedim(1, -1).is_contiguous()


NATIVE = InvertedSweepsNative()
_OP: DispatchedOp[NormSweeps | InvertedSweepsNative] = register(
    "inverted_batch_norm",
    REFERENCE,
    Implementation("triton", TRITON, TRITON.applies),
    Implementation("native", NATIVE, NATIVE.applies),
)


def sweeps(source: torch.Tensor, y: torch.Tensor) -> NormSweeps | InvertedSweepsNative:
    """What runs passes that read `source`, and read or write `y`, (N, C, ...) of one shape and one layout.

    >>> x = torch.ones(2, 3, 4, 5, dtype=torch.float64)
    >>> sweeps(x, x) is REFERENCE
    True
    """
    return choose(_OP, source, y)


def gradients_into(
    grad: torch.Tensor,
    result: torch.Tensor,
    y: torch.Tensor,
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
    read, kernel = NormRead(y, affine, activation, inverted=True), sweeps(grad, y)
    sums = kernel.reduce(grad, read, result if frozen else None)
    if not frozen:
        moves = affine.moves(sums, invstd.square(), y.numel() // y.shape[1], in_group)
        kernel.apply_backward(grad, read, moves, result)
    return NormSums(sums.of_scale * invstd, sums.of_shift)
