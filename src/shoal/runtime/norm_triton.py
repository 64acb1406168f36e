"""Batch norm's sweeps on CUDA, in Triton; a kernel of `shoal.runtime.norm_sweeps`.

float32, float16 and bfloat16, measured and summed up in float32, of any shape whose pixels lie in one run: contiguous
or channels_last, also a slice of the channels. Without Triton, or with SHOAL_TRITON=0, PyTorch's own kernels do the
work. With TRITON_INTERPRET=1 tensors on the CPU are swept too, by Triton's interpreter: slow, for tests.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from types import ModuleType

import torch

from shoal.errors import InputError

VARIABLE = "SHOAL_TRITON"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TILE_ELEMS = 2048
_MOST = 2**31  # elements that a tile's addresses may span


def kernels() -> ModuleType | None:
    """`shoal.runtime.norm_triton_kernels`, or None where SHOAL_TRITON=0 or Triton is not installed."""
    return None if os.environ.get(VARIABLE) == "0" else _kernels()


def applies(*tensors: torch.Tensor) -> bool:
    """Whether the sweeps read and write such tensors, (N, C, ...), here."""
    device = tensors[0].device
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return False
    if any(x.device != device or x.dtype not in _DTYPES for x in tensors):
        return False
    return _is_channels_last(*tensors) is not None and kernels() is not None and _run_on(device)


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Sweeps.statistics`; a tensor for which `applies` is true."""
    grid, (at,) = _laid_out(x)
    moments = x.new_empty((3, grid.parts, grid.channels), dtype=torch.float32)
    counts = x.new_empty(grid.parts, dtype=torch.int32)
    mean, variance = x.new_empty((2, grid.channels), dtype=torch.float32)
    found, columns = _found(), min(grid.columns, 16)
    with _on(x.device):
        found.moments[grid.by_part](
            x, at, *moments, counts, *grid.extent, *grid.shares, grid.channels_last, grid.rows, grid.columns
        )
        found.merge[(-(-grid.channels // columns),)](
            *moments, counts, mean, variance, grid.parts, grid.channels, min(_power(grid.parts), 64), columns
        )
    return mean, variance


def norm_act(
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    residual: torch.Tensor | None,
    rectify: bool,
    out: torch.Tensor,
) -> None:
    """As `Sweeps.norm_act`; tensors for which `applies` is true together."""
    grid, at = _laid_out(x, residual, out)
    with _on(x.device):
        _found().activate[grid.by_block](
            x,
            at[0],
            *_vectors(mean, scale, shift),
            residual,
            at[1],
            out,
            at[2],
            *grid.extent,
            rectify,
            grid.channels_last,
            grid.rows,
            grid.columns,
        )


def norm_act_backward(
    grad: torch.Tensor,
    z: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    rectify: bool,
    grad_x: torch.Tensor | None,
    masked: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Sweeps.norm_act_backward`; tensors for which `applies` is true together."""
    grid, at = _laid_out(x, grad, z, grad_x, masked)
    sums = x.new_empty((2, grid.parts, grid.channels), dtype=torch.float32)
    with _on(x.device):
        _found().activate_backward[grid.by_part](
            grad,
            at[1],
            z,
            at[2],
            x,
            at[0],
            *_vectors(mean, scale, shift),
            grad_x,
            at[3],
            masked,
            at[4],
            *sums,
            *grid.extent,
            *grid.shares,
            rectify,
            grid.channels_last,
            grid.rows,
            grid.columns,
        )
    of_scale, of_shift = sums.sum(1)
    return of_scale, of_shift


@dataclass(frozen=True)
class _Grid:
    """How the programs share a tensor: by blocks of `rows` pixels, by runs of blocks (parts), and by `columns`."""

    channels_last: bool
    images: int  # 1 where all pixels lie in one run
    pixels: int  # of an image
    channels: int
    rows: int
    columns: int
    most_parts: int

    @property
    def blocks_an_image(self) -> int:
        return -(-self.pixels // self.rows)

    @property
    def blocks(self) -> int:
        return self.images * self.blocks_an_image

    @property
    def blocks_a_part(self) -> int:
        return -(-self.blocks // max(1, self.most_parts // -(-self.channels // self.columns)))

    @property
    def parts(self) -> int:
        return -(-self.blocks // self.blocks_a_part)

    @property
    def by_block(self) -> tuple[int, int]:
        return self.blocks, -(-self.channels // self.columns)

    @property
    def by_part(self) -> tuple[int, int]:
        return self.parts, -(-self.channels // self.columns)

    @property
    def extent(self) -> tuple[int, int, int]:
        return self.pixels, self.channels, self.blocks_an_image

    @property
    def shares(self) -> tuple[int, int]:
        return self.blocks, self.blocks_a_part


def _laid_out(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[_Grid, list[int]]:
    """The grid, and `ld` of each tensor as the kernels want it; 0 for None."""
    given = [other for other in others if other is not None]
    if any(other.shape != x.shape for other in given):
        raise InputError(f"{[tuple(other.shape) for other in given]} beside x of {tuple(x.shape)}; give one shape")
    channels_last = _is_channels_last(x, *given)
    if channels_last is None:
        raise InputError(f"strides {[t.stride() for t in (x, *given)]}; give tensors all channels_last or contiguous")
    channels, pixels, images = x.shape[1], prod(x.shape[2:]), x.shape[0]
    if channels_last:
        images, pixels = 1, images * pixels
        columns = min(_power(channels), 64)
        rows = _TILE_ELEMS // columns
    else:
        rows = min(_power(pixels), 128)
        columns = min(_power(channels), _TILE_ELEMS // rows)
    grid = _Grid(channels_last, images, pixels, channels, rows, columns, _most_parts(x.device))
    return grid, [0 if t is None else _pitch(t, channels_last) or 0 for t in (x, *others)]


def _is_channels_last(*tensors: torch.Tensor) -> bool | None:
    """Which of the two layouts all have; None for neither."""
    if tensors[0].dim() < 2 or not tensors[0].numel():
        return None
    return next((way for way in (True, False) if all(_pitch(x, way) for x in tensors)), None)


def _pitch(x: torch.Tensor, channels_last: bool) -> int | None:
    """Elements from pixel to pixel in channels_last, from image to image else; None where that is not the layout.

    >>> _pitch(torch.ones(2, 3, 4, 5), False), _pitch(torch.ones(2, 3, 4, 5)[:, :2], False)
    (60, 60)
    >>> _pitch(torch.ones(2, 3, 4, 5), True)
    """
    images, channels, *sides = x.shape
    over_images, over_channels, *over_sides = x.stride()
    if channels_last:
        if channels > 1 and over_channels != 1:
            return None
        step = _step([images, *sides], [over_images, *over_sides])
        found = channels if step == 0 else step
        return found if found is not None and channels <= found < _MOST // _TILE_ELEMS else None
    pixels = prod(sides)
    if _step(sides, over_sides) not in (0, 1) or (channels > 1 and over_channels != pixels):
        return None
    found = over_images if images > 1 else channels * pixels
    return found if channels * pixels <= found and channels * pixels < _MOST else None


def _step(sizes: list[int], strides: list[int]) -> int | None:
    """Elements from one to the next where dimensions lie in one run, the last fastest; 0 for a single one."""
    step, span = 0, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if span and stride != span:
            return None
        step, span = step or stride, stride * size
        if not stride:
            return None
    return step


def _power(number: int) -> int:
    """The power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


def _vectors(*vectors: torch.Tensor) -> list[torch.Tensor]:
    return [vector.detach().float().contiguous() for vector in vectors]


@cache
def _kernels() -> ModuleType | None:
    try:
        return import_module("shoal.runtime.norm_triton_kernels")
    except ImportError:
        return None


def _found() -> ModuleType:
    found = kernels()
    if found is None:
        raise InputError(f"{VARIABLE}=0, or Triton is not installed; install triton, or use PyTorch's own kernels")
    return found


@cache
def _most_parts(device: torch.device) -> int:
    # Enough to fill the device a few times over; few on the CPU, so that each has several blocks there too.
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _run_on(device: torch.device) -> bool:
    """Whether a kernel runs there: Triton wants a device that it knows and a C compiler."""
    if device.type != "cuda":
        return bool(_found().INTERPRETED)
    one = torch.ones((1, 1), device=device)
    try:
        norm_act(one, one[0], one[0], one[0], None, True, torch.empty_like(one))
    except Exception as error:  # whatever the compiler raises: PyTorch's own kernels remain
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"Triton does not run on {device} ({reason}); {VARIABLE}=0 spares the attempt", stacklevel=2)
        return False
    return True
