"""A norm and the activation after it, computed again in one sweep, with the bits that the two had by themselves.

What a norm made is seldom saved: the activation after it writes over it. Where the activation's result is recomputed,
the norm's would be made only for it, which reads and writes a large tensor once more. Here each piece of the input is
normalised and activated while it lies in L2, on CUDA in a register by one Triton kernel. On channels_last tensors, and
where that kernel is missing or has other bits, the activation writes over the whole normalised tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shoal.errors import InputError
from shoal.kernels import batch_norm, group_norm
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register
from shoal.lowlevel.torch_internals import isolated
from shoal.lowlevel.torch_state import on_device
from shoal.lowlevel.triton_launch import TritonKernels

_PIECE_ELEMS = 1 << 17  # half a MiB of float32, read and written: both stay in L2
_BLOCK = 1024
_KINDS = (torch.float32, torch.bfloat16, torch.float16)


class Norm(NamedTuple):
    """What a norm of (N, C, ...) reads: weight and bias, (C,) or None, and the statistics that it saved.

    Those of a batch norm are (C,), those of a group norm (N, groups).
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    mean: torch.Tensor
    invstd: torch.Tensor

    @property
    def is_of_groups(self) -> bool:
        return self.mean.dim() == 2


def activated(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """What leaky ReLU returned for the norm of `x`, given the statistics that the norm saved.

    Args:
        x: (N, C, ...), contiguous or channels_last.
        rest: what a `Norm` consists of; the slope below zero, 0 for a ReLU; the shape of the result, which is the
            normalised tensor seen in that shape.
    """
    *norm, slope, shape = rest
    return choose(_OP, x)(x, Norm(*norm), slope).view(shape)


def _by_pytorch(x: torch.Tensor, norm: Norm, slope: float) -> torch.Tensor:
    if not (x.is_cpu and x.is_contiguous() and x.dim() > 2 and x.numel() > _PIECE_ELEMS):
        kernels: Any = group_norm if norm.is_of_groups else batch_norm
        return _activate_(kernels.normalise(x, *norm), slope)
    scale, shift = _rows_of_lines(x, norm)
    n_rows, pixels = x.shape[0] * x.shape[1], x.shape[2:].numel()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    from_rows, to_rows = x.view(n_rows, pixels), y.view(n_rows, pixels)
    rows, columns = max(1, _PIECE_ELEMS // pixels), min(pixels, _PIECE_ELEMS)
    for row in range(0, n_rows, rows):
        some = slice(row, row + rows)
        for column in range(0, pixels, columns):
            piece = to_rows[some, column : column + columns]
            torch.addcmul(shift[some], from_rows[some, column : column + columns], scale[some], out=piece)
            _activate_(piece, slope)
    return y


def _rows_of_lines(x: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift of each sample and channel, each (N * C, 1)."""
    lines: Any = group_norm.lines if norm.is_of_groups else batch_norm.line
    scale, shift = lines(x, *norm)
    of_each = (x.shape[0], x.shape[1], *[1] * (x.dim() - 2))
    return scale.expand(of_each).reshape(-1, 1), shift.expand(of_each).reshape(-1, 1)


class _ActivatedNormTriton:
    """`activated_norm_triton_kernels`."""

    def applies(self, x: torch.Tensor) -> bool:
        """Whether it reads such a tensor here."""
        return x.dtype in _KINDS and x.is_contiguous() and x.dim() > 2 and TRITON_KERNELS.run_on(x.device)

    def __call__(self, x: torch.Tensor, norm: Norm, slope: float) -> torch.Tensor:
        channels, y = x.shape[1], torch.empty_like(x)
        rows, pixels = x.shape[0] * channels, x.shape[2:].numel()
        weight, bias, middle, factor = norm
        if norm.is_of_groups:  # (x - 0) * 1 has the bits of x: PyTorch's kernel multiplies by one scale for each
            factor, bias = (line.reshape(-1) for line in _rows_of_lines(x, norm))
            middle, weight, channels = torch.zeros_like(factor), None, rows
        grid = rows, -(-pixels // _BLOCK)
        if x.numel():
            with on_device(x.device):
                TRITON_KERNELS.found().normalise_and_activate[grid](
                    x, middle, factor, weight, bias, y, channels, pixels, slope, slope == 0, _BLOCK
                )
        return y


def _activate_(y: torch.Tensor, slope: float) -> torch.Tensor:
    return torch.ops.aten.leaky_relu_(y, slope) if slope else y.relu_()


@lru_cache(maxsize=1024)
def repeats_bits(
    dtype: torch.dtype, device: torch.device, dims: int, of_groups: bool, slope: float, weight_dtype: torch.dtype | None
) -> bool:
    """Whether `activated` of contiguous tensors gives the bits of `normalise` and then the activation here.

    Found out on random data of odd size, in several pieces.

    Args:
        of_groups: whether it is a group norm's, not a batch norm's.
        weight_dtype: of weight and bias; None: there are none.
    """
    norm: Any = group_norm if of_groups else batch_norm
    with isolated(device):
        draw = torch.Generator().manual_seed(4)

        def drawn(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
            return (torch.randn(shape, generator=draw) * 3 + 1).to(device=device, dtype=kind)

        x = drawn((2, 4, *(_PIECE_ELEMS // 2 + 3, 3, 1)[: dims - 2]), dtype)
        wide = dtype if of_groups or device.type == "cpu" else torch.float32  # of the statistics
        mean, invstd = (drawn((2, 2) if of_groups else (4,), wide) for _ in range(2))
        weight, bias = (None if weight_dtype is None else drawn((4,), weight_dtype) for _ in range(2))
        vectors = (weight, bias, mean, invstd.abs_())
        expected = _activate_(norm.normalise(x, *vectors), slope)
        return torch.equal(activated(x, *vectors, slope, list(x.shape)), expected)


def _try_on(device: torch.device) -> None:
    one = torch.ones((1, 1, 1), device=device)
    TRITON(one, Norm(None, None, one[0, 0], one[0, 0]), 0.0)


TRITON_KERNELS = TritonKernels(
    "shoal.kernels.activated_norm_triton_kernels", "two sweeps by PyTorch's own kernels", InputError, _try_on
)
TRITON = _ActivatedNormTriton()
_OP: DispatchedOp[Callable[..., torch.Tensor]] = register(
    "activated_norm", _by_pytorch, Implementation("triton", TRITON, TRITON.applies)
)
