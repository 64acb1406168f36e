"""Passes over whole tensors for the inverted batch norm and its backward.

The reference is pointwise ops of PyTorch: any dtype, device and activation. On the CPU it works on pieces that fit in
L2, so that little but the result is allocated; on CUDA each pointwise op is a pass.

Native: `csrc/inverted_batch_norm.cpp`, float32 on the CPU, contiguous or channels_last. ELU and its inverse are off by
less than an ulp, also near zero (`csrc/invertible_activations.h`). Triton: the tensors of `norm_sweeps`, computed in
float32. Forward is one pass, which may write over its input; backward is two over the result and the gradient, the
second of which may write over the gradient. Nothing else as large is allocated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

from shoal.kernels.norm import norm_sweeps
from shoal.kernels.norm.norm_rows import vector
from shoal.kernels.norm.norm_sweeps import NormAffine
from shoal.kernels.norm.norm_tiles import grid_of
from shoal.lowlevel import native
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, level_number, register
from shoal.lowlevel.torch_state import on_device

_PIECE_ELEMS = 1 << 17  # 512 KiB of float32: the operands and temporaries of a piece stay in L2
_MIN_PIECES = 16  # so that temporaries are small compared with small tensors too
_MIN_ELEMS = 1 << 12
_LEAKY_RELU, _ELU = range(2)  # in the order of ShoalInvertible in csrc/shoal_native.h


class Activation(NamedTuple):
    """ "leaky_relu", "elu" or "identity", and LeakyReLU's negative slope or ELU's alpha, greater than 0."""

    name: str
    slope: float


class ScaledNorm(NamedTuple):
    """What the backward pass knows of a norm whose result alone was saved.

    Attributes:
        scale, shift, invstd: (C,), float32, or float64 for a float64 result.
        frozen: whether the statistics were given.
        in_group: how many channels, one after the other, were normalised by the same statistics.
    """

    scale: torch.Tensor
    shift: torch.Tensor
    invstd: torch.Tensor
    frozen: bool
    in_group: int = 1


class _InvertedBatchNormSweepsReference:
    """Pointwise ops of PyTorch, and what the other implementations do.

    What is written may be the very tensor that is read, and overlaps nothing else.
    """

    def forward_into(self, x: torch.Tensor, y: torch.Tensor, affine: NormAffine, activation: Activation) -> None:
        """Write the activation of (x - mean) * scale + shift into `y`, which may be `x`.

        The mean is taken off first: far from zero it would take digits of the product with it.

        Args:
            x, y: (N, C, ...) of one dtype and layout.
            affine: vectors of float32, or float64 for a float64 `x`.
        """
        for (source, shape), (target, _) in zip(_pieces(x), _pieces(y), strict=True):
            mean, scale, shift = (values.view(shape) for values in affine)
            if x.dtype == scale.dtype:
                torch.sub(source, mean, out=target)
                torch.addcmul(shift, target, scale, out=target)
                _activate_(target, activation)
            else:
                z = source.to(scale.dtype).sub_(mean)
                torch.addcmul(shift, z, scale, out=z)
                target.copy_(_activate_(z, activation))

    def backward_into(
        self, grad: torch.Tensor, result: torch.Tensor, y: torch.Tensor, norm: ScaledNorm, activation: Activation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the gradient of x into `result`, which may be `grad`.

        Args:
            grad, result, y: (N, C, ...) of one dtype and layout.

        Returns:
            Gradients of scale and shift, (C,) float64.
        """
        scale, shift = norm.scale, norm.shift
        wide, inverse_scale = scale.dtype, scale.reciprocal()
        of_shift, of_scale = (torch.zeros_like(scale, dtype=torch.float64) for _ in range(2))

        def undone(y_piece: torch.Tensor, grad_piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            z, of_z = undo_activation(y_piece.to(wide), grad_piece.to(wide), activation)
            return z.sub_(shift.view(shape)).mul_(inverse_scale.view(shape)), of_z

        for (y_piece, shape), (grad_piece, _) in zip(_pieces(y), _pieces(grad), strict=True):
            normalised, of_z = undone(y_piece, grad_piece)
            dims = [dim for dim in range(y_piece.dim()) if shape[dim] == 1]
            of_shift += of_z.sum(dims)
            of_scale += normalised.mul_(of_z).sum(dims)
        means = _group_means(of_scale, of_shift, norm, y.numel() // y.shape[1])
        mean_grad_xhat, mean_grad = (mean.to(wide) for mean in means)
        gamma_invstd = scale * norm.invstd
        for (y_piece, shape), (grad_piece, _), (target, _) in zip(
            _pieces(y), _pieces(grad), _pieces(result), strict=True
        ):
            normalised, of_z = undone(y_piece, grad_piece)
            if not norm.frozen:
                of_z = of_z.sub_(mean_grad.view(shape)).sub_(normalised.mul_(mean_grad_xhat.view(shape)))
            target.copy_(of_z.mul_(gamma_invstd.view(shape)))
        return of_scale, of_shift


def _activate_(z: torch.Tensor, activation: Activation) -> torch.Tensor:
    name, slope = activation
    if name == "identity":
        return z
    return nn.functional.elu_(z, slope) if name == "elu" else nn.functional.leaky_relu_(z, slope)


def undo_activation(y: torch.Tensor, grad: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """What was activated, and its gradient; both new."""
    name, slope = activation
    if name == "identity":
        return y.clone(), grad.clone()
    if name == "leaky_relu":
        z = torch.ops.aten.leaky_relu(y, 1 / slope)
        return z, torch.ops.aten.leaky_relu_backward(grad, y, slope, True)
    # Rounded to -alpha, the result has no inverse: the smallest that has one stands for it.
    lowest = torch.finfo(y.dtype).eps / 2 - 1
    z = torch.where(y > 0, y, torch.log1p((y / slope).clamp_(min=lowest, max=0)))
    return z, torch.ops.aten.elu_backward(grad, slope, 1, 1, True, y)


def _group_means(
    of_scale: torch.Tensor, of_shift: torch.Tensor, norm: ScaledNorm, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What of xhat, and of 1, is taken off the gradient of every element, over its channel's scale; (C,) each.

    Channels that share their statistics share what is taken off, but for the scale.
    """
    if norm.in_group == 1:
        return of_scale / rows, of_shift / rows
    weighted = torch.stack((of_scale, of_shift)) * norm.scale
    means = weighted.view(2, -1, norm.in_group).mean(2) / rows
    of_xhat, of_one = means.repeat_interleave(norm.in_group, 1) / norm.scale
    return of_xhat, of_one


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Views of it that cover it, each with the shape in which a vector of its channels is broadcast over it."""
    channels = tensor.shape[1]
    elems = tensor.numel()
    if tensor.device.type == "cpu":
        elems = min(_PIECE_ELEMS, max(_MIN_ELEMS, elems // _MIN_PIECES))
    rows = tensor.movedim(1, -1)
    if tensor.numel() == 0:
        return
    if rows.is_contiguous():
        rows = rows.view(-1, channels)
        for piece in rows.split(max(1, elems // channels)):
            yield piece, (1, channels)
    elif tensor.is_contiguous():
        images = tensor.view(len(tensor), channels, -1)
        for some in images.split(max(1, elems // images[0].numel())):
            for piece in some.split(max(1, elems // some[:, :, 0].numel()), 2):
                yield piece, (1, channels, 1)
    else:
        yield tensor, (1, channels, *[1] * (tensor.dim() - 2))


class _InvertedBatchNormSweepsCall(ctypes.Structure):
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


class _InvertedBatchNormSweepsNative:
    """`csrc/inverted_batch_norm.cpp`; `level`: "portable", "avx2" or "avx512"; None: as SHOAL_KERNELS says."""

    def applies(self, source: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether it reads `source`, and reads or writes `y`, here."""
        if y.device.type != "cpu" or not y.dtype == source.dtype == torch.float32 or not y.numel():
            return False
        return native.library() is not None and (_is_channels_last(y) or y.is_contiguous())

    def forward_into(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        affine: NormAffine,
        activation: Activation,
        *,
        level: str | None = None,
    ) -> None:
        library = native.library()
        assert library is not None
        mean, scale, shift = (values.contiguous() for values in affine)
        call = _call(x, y, activation, level)
        call.mean, call.shift, call.scale = mean.data_ptr(), shift.data_ptr(), scale.data_ptr()
        library.shoal_inverted_batch_norm_forward(ctypes.byref(call))

    def backward_into(
        self,
        grad: torch.Tensor,
        result: torch.Tensor,
        y: torch.Tensor,
        norm: ScaledNorm,
        activation: Activation,
        *,
        level: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        library = native.library()
        assert library is not None
        scale, shift = norm.scale.contiguous(), norm.shift.contiguous()
        channels = y.shape[1]
        call = _call(y, result, activation, level)
        sums = torch.empty(2 * call.threads + 2, channels, dtype=torch.float64)
        call.grad, call.shift = grad.data_ptr(), shift.data_ptr()
        call.sum, call.centred, call.workspace = (sums[place:].data_ptr() for place in range(3))
        library.shoal_inverted_batch_norm_sums(ctypes.byref(call))
        of_shift = sums[0]
        of_scale = sums[1] / scale
        mean_xhat, mean = _group_means(of_scale, of_shift, norm, y.numel() // channels)
        mean_grad, mean_grad_xhat = mean.float(), (mean_xhat / scale).float()  # over gamma: of gamma * xhat
        gamma_invstd = scale * norm.invstd
        call.frozen = norm.frozen
        call.mean, call.scale = mean_grad.data_ptr(), gamma_invstd.data_ptr()
        call.mean_grad_xhat = mean_grad_xhat.data_ptr()
        library.shoal_inverted_batch_norm_result(ctypes.byref(call))
        return of_scale, of_shift


def _call(
    y: torch.Tensor, result: torch.Tensor, activation: Activation, level: str | None
) -> _InvertedBatchNormSweepsCall:
    images, channels = y.shape[:2]
    return _InvertedBatchNormSweepsCall(
        images=images,
        channels=channels,
        pixels=y.numel() // (images * channels),
        channels_last=_is_channels_last(y),
        threads=torch.get_num_threads(),
        level=level_number(level),
        activation=_ELU if activation.name == "elu" else _LEAKY_RELU,
        slope=1.0 if activation.name == "identity" else activation.slope,
        y=y.data_ptr(),
        result=result.data_ptr(),
    )


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.movedim(1, -1).is_contiguous()


class _InvertedBatchNormSweepsTriton:
    """`inverted_batch_norm_triton_kernels`."""

    def applies(self, source: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether it reads `source`, and reads or writes `y`, here."""
        return norm_sweeps.TRITON.applies(source, y)

    def forward_into(self, x: torch.Tensor, y: torch.Tensor, affine: NormAffine, activation: Activation) -> None:
        grid, (of_x, of_y) = grid_of(x, y)
        name, slope = activation
        with on_device(x.device):
            _triton_kernels().forward[grid.by_block](
                x, of_x, *map(vector, affine), y, of_y, slope, *grid.extent, name, *grid.tile
            )

    def backward_into(
        self, grad: torch.Tensor, result: torch.Tensor, y: torch.Tensor, norm: ScaledNorm, activation: Activation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grid, (of_y, of_grad, of_result) = grid_of(y, grad, result)
        parts = y.new_empty((2, grid.parts, grid.channels), dtype=torch.float32)
        scale, shift, invstd = map(vector, (norm.scale, norm.shift, norm.invstd))
        name, slope = activation
        with on_device(y.device):
            _triton_kernels().sums[grid.by_part](
                grad, of_grad, y, of_y, shift, *parts, slope, *grid.extent, *grid.shares, name, *grid.tile
            )
            centred, of_shift = parts.sum(1, dtype=torch.float64)
            of_scale = centred / scale
            means = _group_means(of_scale, of_shift, norm._replace(scale=scale), 1)
            _triton_kernels().result[grid.by_block](
                grad,
                of_grad,
                y,
                of_y,
                result,
                of_result,
                scale,
                shift,
                invstd,
                *means,
                float(y.numel() // grid.channels),
                slope,
                *grid.extent,
                norm.frozen,
                name,
                *grid.tile,
            )
        return of_scale, of_shift


@cache
def _triton_kernels() -> ModuleType:
    return import_module("shoal.kernels.invertible_norm.inverted_batch_norm_triton_kernels")


_InvertedSweeps = _InvertedBatchNormSweepsReference | _InvertedBatchNormSweepsNative | _InvertedBatchNormSweepsTriton
REFERENCE, NATIVE, TRITON = (
    _InvertedBatchNormSweepsReference(),
    _InvertedBatchNormSweepsNative(),
    _InvertedBatchNormSweepsTriton(),
)
_OP: DispatchedOp[_InvertedSweeps] = register(
    "inverted_batch_norm",
    REFERENCE,
    Implementation("triton", TRITON, TRITON.applies),
    Implementation("native", NATIVE, NATIVE.applies),
)


def sweeps(source: torch.Tensor, y: torch.Tensor) -> _InvertedSweeps:
    """What runs passes that read `source`, and read or write `y`, (N, C, ...) of one shape and one layout.

    >>> x = torch.ones(2, 3, 4, 5, dtype=torch.float64)
    >>> sweeps(x, x) is REFERENCE
    True
    """
    return choose(_OP, source, y)
