"""Passes over whole tensors for batch norm: statistics, normalise (+ residual, + ReLU), its gradient.

For a batch norm whose input is not the output of a convolution, or whose output has other readers than one convolution.
Each pass reads and writes every element once. Where no implementation applies the callers use PyTorch's own kernels.

Native: float32 on the CPU, channels_last; `native_row_stride` says which slices. Triton: float32, float16 and bfloat16
on CUDA, computed in float32, contiguous or channels_last, also a slice of the channels; with TRITON_INTERPRET=1 on the
CPU, in Triton's interpreter: slow, for tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from shoal.errors import InputError
from shoal.kernels.norm.norm_rows import native_row_stride, run_in_workspace, vector
from shoal.kernels.norm.norm_tiles import grid_of, is_channels_last, power
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, level_number, register
from shoal.lowlevel.native import levels, run_native
from shoal.lowlevel.torch_state import on_device
from shoal.lowlevel.triton_launch import Launch, Launches, TritonKernels

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of Triton's kernels
_BYTES = "shoal_norm_pass_workspace_bytes"
_MAX_KNOWN = 4096  # forms of tensors whose parts are remembered


class NormAffine(NamedTuple):
    """(x - mean) * scale + shift for each channel of x, (N, C, ...); the vectors are (C,)."""

    mean: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor

    def of(self, channels: slice) -> NormAffine:
        """The vectors of some channels."""
        return NormAffine(*(values[channels] for values in self))

    def gradients(self, of_scale: torch.Tensor, of_shift: torch.Tensor) -> NormAffine:
        """Gradients of all vectors, given those of scale and shift."""
        return NormAffine(-self.scale * of_shift, of_scale, of_shift)

    def moves(self, sums: NormAffine, own: OwnVariance, count: int) -> NormMoves:
        """What the gradient of x is moved by since mean and variance are those of x itself.

        Args:
            sums: gradients of the vectors.
            own: the variance that the scale was made from.
            count: elements of a channel of x.
        """
        share = self.scale / -count
        return NormMoves(share * sums.scale / (own.variance + own.eps), share * sums.shift)


class OwnVariance(NamedTuple):
    """Says that mean and scale of an `NormAffine` were made from the statistics of what it normalises.

    Attributes:
        variance: biased, (C,).
        eps: of the batch norm, which was added to it.
    """

    variance: torch.Tensor
    eps: float


class NormMoves(NamedTuple):
    """What is added to a gradient, (C,): `slope` for each step of x from its mean, and `constant` in any case."""

    slope: torch.Tensor
    constant: torch.Tensor


def affine_of(mean: torch.Tensor | None, scale: torch.Tensor | None, shift: torch.Tensor | None) -> NormAffine | None:
    """The optional vectors of an op as one; None if they are: nothing is normalised."""
    return None if mean is None or scale is None or shift is None else NormAffine(mean, scale, shift)


class _NormSweepsPass(ctypes.Structure):
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


class _NormSweepsNative:
    """`csrc/norm_pass.cpp`; `level`: "portable", "avx2" or "avx512"; None: as SHOAL_KERNELS says.

    Every tensor is read or written once; one that is written may be one that is read.
    """

    def applies(self, *tensors: torch.Tensor) -> bool:
        """Whether it reads and writes such tensors, (N, C, H, W), here; all of one shape but for their channels."""
        return bool(levels()) and all(native_row_stride(x) is not None for x in tensors)

    def statistics(self, x: torch.Tensor, *, level: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Replaces `torch.var_mean(x, (0, 2, 3), correction=0)`: mean and variance, (C,), in float32.

        Sums are taken around a pivot in every block of rows and added up in doubles.
        """
        mean, variance = torch.empty(x.shape[1]), torch.empty(x.shape[1])
        call = _call(x, level)
        call.statistic_mean, call.statistic_variance = mean.data_ptr(), variance.data_ptr()
        run_in_workspace("shoal_statistics", call, _BYTES)
        return mean, variance

    def norm_act(
        self,
        x: torch.Tensor,
        affine: NormAffine,
        residual: torch.Tensor | None,
        relu: bool,
        out: torch.Tensor,
        *,
        level: str | None = None,
    ) -> None:
        """Write relu(affine(x) + residual) into `out`, in its dtype.

        Args:
            x: (N, C, ...).
            affine: used in float32.
            residual: of the shape of x, or None.
            relu: whether a ReLU follows.
            out: of the shape of x.
        """
        vectors = list(map(vector, affine))
        call = _call(x, level, vectors, relu)
        call.residual, call.ld_residual = _rows(residual, x)
        call.out, call.ld_out = _rows(out, x)
        run_native("shoal_norm_act", call)

    def norm_act_backward(
        self,
        grad: torch.Tensor,
        z: torch.Tensor | None,
        x: torch.Tensor,
        affine: NormAffine,
        relu: bool,
        grad_x: torch.Tensor | None,
        masked: torch.Tensor | None,
        *,
        level: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of scale and shift, (C,) float32; those of x and the residual are written.

        Args:
            grad: of the result.
            z: the result, read where `relu` is set; None: recomputed from x, nothing was added.
            x, affine, relu: as for `norm_act`.
            grad_x: where the gradient of x is written; None: it is not wanted.
            masked: where `grad` is written as the ReLU lets it through; None: it is not wanted.
        """
        of_scale, of_shift = torch.empty(x.shape[1]), torch.empty(x.shape[1])
        vectors = list(map(vector, affine))
        call = _call(x, level, vectors, relu)
        call.grad, call.ld_grad = _rows(grad, x)
        call.out, call.ld_out = _rows(z, x)
        call.grad_x, call.ld_grad_x = _rows(grad_x, x)
        call.grad_residual, call.ld_grad_residual = _rows(masked, x)
        call.sum_of_centred, call.sum = of_scale.data_ptr(), of_shift.data_ptr()
        run_in_workspace("shoal_norm_act_backward", call, _BYTES)
        return of_scale, of_shift

    def moved_gradient(
        self,
        grad: torch.Tensor,
        z: torch.Tensor | None,
        x: torch.Tensor,
        affine: NormAffine,
        relu: bool,
        moves: NormMoves,
        grad_x: torch.Tensor,
    ) -> None:
        """Write `grad * scale + (x - mean) * slope + constant`, where `relu` lets `grad` through, into `grad_x`.

        Args:
            moves: used in float32.
            The others as for `norm_act_backward`; `grad_x` may be `grad`.
        """
        self.norm_act_backward(grad, z, x, affine, relu, grad_x, None)
        self.norm_act(x, NormAffine(affine.mean, *moves), grad_x, False, grad_x)


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


def _call(
    x: torch.Tensor, level: str | None, vectors: Sequence[torch.Tensor] = (), relu: bool = False
) -> _NormSweepsPass:
    """What all have in common; it points into `x` and `vectors`, those of an `NormAffine`."""
    rows = x.numel() // x.shape[1] if x.numel() else 0
    call = _NormSweepsPass(rows=rows, channels=x.shape[1], relu=relu, x=x.data_ptr(), ld_x=_row_stride(x))
    call.threads, call.level = max(1, min(torch.get_num_threads(), rows)), level_number(level)
    if vectors:
        call.mean, call.scale, call.shift = (values.data_ptr() for values in vectors)
    return call


def _form(x: torch.Tensor | None) -> Hashable:
    """What a kernel's numbers and its compiled form depend on."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


class _NormSweepsTriton:
    """`norm_triton_kernels`: what `_NormSweepsNative` does."""

    def __init__(self) -> None:
        self._launches = Launches()
        self._parts_of: dict[Hashable, int] = {}

    def applies(self, *tensors: torch.Tensor) -> bool:
        """Whether it reads and writes such tensors, (N, C, ...), here; all of one shape but for their channels."""
        device = tensors[0].device
        if not TRITON_KERNELS.run_on(device) or any(x.device != device or x.dtype not in _DTYPES for x in tensors):
            return False
        return is_channels_last(*tensors) is not None

    def statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = "statistics", x.device, _form(x)
        parts, channels = self._parts(key, x), x.shape[1]
        moments = x.new_empty((3, parts, channels), dtype=torch.float32)
        counts = x.new_empty(parts, dtype=torch.int32)
        # An op's results: none may be a view.
        mean, variance = (x.new_empty(channels, dtype=torch.float32) for _ in range(2))

        def measured() -> Launch:
            grid, (at,) = grid_of(x)
            rest = (*grid.extent, *grid.shares, *grid.tile)
            return Launch(TRITON_KERNELS.found().moments, grid.by_part, lambda x, *found: (x, at, *found, *rest))

        def merged() -> Launch:
            columns = min(grid_of(x)[0].columns, 16)
            rest = parts, channels, min(power(parts), 64), columns
            return Launch(TRITON_KERNELS.found().merge, (-(-channels // columns),), lambda *found: (*found, *rest))

        with on_device(x.device):
            self._launches.run(key, (x, *moments, counts), measured)
            self._launches.run(("merge", key), (*moments, counts, mean, variance), merged)
        return mean, variance

    def norm_act(
        self, x: torch.Tensor, affine: NormAffine, residual: torch.Tensor | None, relu: bool, out: torch.Tensor
    ) -> None:
        def made() -> Launch:
            grid, strides = grid_of(x, residual, out)
            rest = (*strides, *grid.extent, relu, *grid.tile)
            return Launch(TRITON_KERNELS.found().activate, grid.by_block, lambda *tensors: (*tensors, *rest))

        key = "norm_act", relu, x.device, _form(x), _form(residual), _form(out)
        with on_device(x.device):
            self._launches.run(key, (x, *map(vector, affine), residual, out), made)

    def norm_act_backward(
        self,
        grad: torch.Tensor,
        z: torch.Tensor | None,
        x: torch.Tensor,
        affine: NormAffine,
        relu: bool,
        grad_x: torch.Tensor | None,
        masked: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = "norm_act_backward", relu, x.device, *map(_form, (grad, z, x, grad_x, masked))
        parts = self._parts(key, x, grad, z, grad_x, masked)
        sums = x.new_empty((2, parts, x.shape[1]), dtype=torch.float32)
        self._run_backward(key, (x, grad, z), affine, (None, None), (grad_x, masked), sums, relu)
        of_scale, of_shift = sums.sum(1)
        return of_scale, of_shift

    def moved_gradient(
        self,
        grad: torch.Tensor,
        z: torch.Tensor | None,
        x: torch.Tensor,
        affine: NormAffine,
        relu: bool,
        moves: NormMoves,
        grad_x: torch.Tensor,
    ) -> None:
        key = "moved_gradient", relu, x.device, *map(_form, (grad, z, x, grad_x))
        moved = vector(moves.slope), vector(moves.constant)
        self._run_backward(key, (x, grad, z), affine, moved, (grad_x, None), (None, None), relu)

    def _run_backward(
        self,
        key: Hashable,
        read: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        affine: NormAffine,
        moves: tuple[torch.Tensor | None, torch.Tensor | None],
        written: tuple[torch.Tensor | None, torch.Tensor | None],
        sums: Iterable[torch.Tensor | None],
        relu: bool,
    ) -> None:
        def made() -> Launch:
            grid, strides = grid_of(*read, *written)
            rest = (*strides, *grid.extent, *grid.shares, relu, *grid.tile)
            return Launch(TRITON_KERNELS.found().activate_backward, grid.by_part, lambda *given: (*given, *rest))

        with on_device(read[0].device):
            self._launches.run(key, (*read, *map(vector, affine), *moves, *written, *sums), made)

    def _parts(self, key: Hashable, x: torch.Tensor, *others: torch.Tensor | None) -> int:
        """Into how many parts a sweep divides the tensors; the key says what that depends on."""
        found = self._parts_of.get(key)
        if found is None:
            if len(self._parts_of) >= _MAX_KNOWN:
                self._parts_of.clear()
            found = self._parts_of[key] = grid_of(x, *others)[0].parts
        return found


def _try_on(device: torch.device) -> None:
    one = torch.ones((1, 1), device=device)
    TRITON.norm_act(one, NormAffine(one[0], one[0], one[0]), None, True, torch.empty_like(one))


TRITON_KERNELS = TritonKernels("shoal.kernels.norm.norm_triton_kernels", "PyTorch's own kernels", InputError, _try_on)
NATIVE, TRITON = _NormSweepsNative(), _NormSweepsTriton()
_OP: DispatchedOp[_NormSweepsNative | _NormSweepsTriton | None] = register(
    "norm_sweeps",
    None,
    Implementation("triton", TRITON, TRITON.applies),
    Implementation("native", NATIVE, NATIVE.applies),
)


def sweeps(*tensors: torch.Tensor) -> _NormSweepsNative | _NormSweepsTriton | None:
    """What runs passes over `tensors`; None: PyTorch's own kernels do.

    >>> sweeps(torch.ones(2, 3, 4, 5, dtype=torch.float64))
    """
    return choose(_OP, *tensors)
