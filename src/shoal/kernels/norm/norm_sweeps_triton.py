"""The primitives of a norm by Triton's kernels, see `norm_triton_kernels`, and how their programs divide a tensor.

float32, float16 and bfloat16 on CUDA, computed in float32, contiguous or channels_last, also a slice of the channels;
with TRITON_INTERPRET=1 on the CPU, in Triton's interpreter: slow, for tests.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.kernels.norm.norm_operands import IDENTITY, Activation, NormAffine, NormMoves, NormRead, NormSums
from shoal.kernels.norm.norm_rows import is_channels_last, strides_of, vector
from shoal.lowlevel.cuda_calls import multiprocessors
from shoal.lowlevel.torch_state import on_device
from shoal.lowlevel.triton_launch import Launch, Launches, TritonKernels

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_KNOWN = 4096  # forms of tensors whose parts are remembered
_TILE_ELEMS = 2048


class NormSweepsTriton:
    """As the reference of `norm_sweeps`."""

    def __init__(self) -> None:
        self._launches = Launches()
        self._parts_of: dict[Hashable, int] = {}

    def applies(self, *tensors: Tensor) -> bool:
        """Whether it reads and writes such tensors, (N, C, ...), here; all of one shape but for their channels."""
        device = tensors[0].device
        if not TRITON_KERNELS.run_on(device) or any(x.device != device or x.dtype not in _DTYPES for x in tensors):
            return False
        return is_channels_last(*tensors) is not None

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        key = "statistics", x.device, _form(x)
        parts, channels = self._parts(key, x), x.shape[1]
        moments = x.new_empty((3, parts, channels), dtype=torch.float32)
        counts = x.new_empty(parts, dtype=torch.int32)
        # An op's results: none may be a view.
        mean, variance = (x.new_empty(channels, dtype=torch.float32) for _ in range(2))

        def measured() -> Launch:
            grid = _grid_of(x)
            (at,) = grid.strides
            rest = (*grid.extent, *grid.shares, *grid.tile)
            return Launch(TRITON_KERNELS.found().moments, grid.by_part, lambda x, *found: (x, at, *found, *rest))

        def merged() -> Launch:
            columns = min(_grid_of(x).tile[2], 16)
            rest = parts, channels, min(_power(parts), 64), columns
            return Launch(TRITON_KERNELS.found().merge, (-(-channels // columns),), lambda *found: (*found, *rest))

        with on_device(x.device):
            self._launches.run(key, (x, *moments, counts), measured)
            self._launches.run(("merge", key), (*moments, counts, mean, variance), merged)
        return mean, variance

    def apply(
        self,
        x: Tensor,
        affine: NormAffine,
        residual: Tensor | None,
        activation: Activation,
        out: Tensor,
        *,
        factor: Tensor | None = None,
        rounded: bool = False,
    ) -> None:
        """As the reference does, and as PyTorch's kernels do it one after another.

        Args:
            factor: (C,), what x - mean is multiplied by before the scale; None: nothing.
            rounded: whether the activation reads what `out` would have held without it.
        """

        def made() -> Launch:
            grid = _grid_of(x, residual, out)
            rest = (*grid.strides, *grid.extent, activation.slope, activation.name, rounded, *grid.tile)
            return Launch(TRITON_KERNELS.found().activate, grid.by_block, lambda *tensors: (*tensors, *rest))

        key = "apply", activation, factor is None, rounded, x.device, _form(x), _form(residual), _form(out)
        mean, scale, shift = map(vector, affine)
        own_factor = None if factor is None else vector(factor)
        with on_device(x.device):
            self._launches.run(key, (x, mean, own_factor, scale, shift, residual, out), made)

    def reduce(
        self, grad: Tensor, read: NormRead, grad_x: Tensor | None = None, masked: Tensor | None = None
    ) -> NormSums:
        key = "reduce", *_key(grad, read, grad_x, masked)
        parts = self._parts(key, read.x, grad, read.z, grad_x, masked)
        sums = grad.new_empty((2, parts, grad.shape[1]), dtype=torch.float32)
        self._run_backward(key, grad, read, (None, None), (grad_x, masked), (sums[0], sums[1]))
        if not read.inverted:
            return NormSums(*sums.sum(1))
        products, of_shift = sums.sum(1, dtype=torch.float64)
        return NormSums(products / read.affine.scale, of_shift)

    def apply_backward(self, grad: Tensor, read: NormRead, moves: NormMoves, grad_x: Tensor) -> None:
        key = "apply_backward", *_key(grad, read, grad_x, None)
        slope, constant = moves
        slope = slope / read.affine.scale if read.inverted else slope
        self._run_backward(key, grad, read, (vector(slope), vector(constant)), (grad_x, None), (None, None))

    def _run_backward(
        self,
        key: Hashable,
        grad: Tensor,
        read: NormRead,
        moves: tuple[Tensor | None, Tensor | None],
        written: tuple[Tensor | None, Tensor | None],
        sums: tuple[Tensor | None, Tensor | None],
    ) -> None:
        x, affine, activation, z, inverted = read

        def made() -> Launch:
            grid = _grid_of(x, grad, z, *written)
            rest = (*grid.strides, *grid.extent, *grid.shares, activation.slope, activation.name, inverted, *grid.tile)
            return Launch(TRITON_KERNELS.found().activate_backward, grid.by_part, lambda *given: (*given, *rest))

        with on_device(x.device):
            self._launches.run(key, (x, grad, z, *map(vector, affine), *moves, *written, *sums), made)

    def _parts(self, key: Hashable, x: Tensor, *others: Tensor | None) -> int:
        """Into how many parts a sweep divides the tensors; the key says what that depends on."""
        found = self._parts_of.get(key)
        if found is None:
            if len(self._parts_of) >= _MAX_KNOWN:
                self._parts_of.clear()
            found = self._parts_of[key] = _grid_of(x, *others).by_part[0]
        return found


def _form(x: Tensor | None) -> Hashable:
    """What a kernel's numbers and its compiled form depend on."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


def _key(grad: Tensor, read: NormRead, grad_x: Tensor | None, masked: Tensor | None) -> tuple[Hashable, ...]:
    forms = map(_form, (grad, read.x, read.z, grad_x, masked))
    return read.activation, read.inverted, grad.device, *forms


class _Grid(NamedTuple):
    """How the programs share a tensor: by blocks of pixels, by runs of blocks (parts), and by columns, channels.

    Attributes:
        by_block, by_part: programs, where each has a block, and where each has a part.
        extent: pixels of an image, channels, blocks of an image; all pixels are one image where they lie in one run.
        shares: blocks, and blocks of a part.
        tile: whether the tensor is channels_last; rows and columns of a block.
        strides: `ld` of each tensor as the kernels want it; 0 for None.
    """

    by_block: tuple[int, int]
    by_part: tuple[int, int]
    extent: tuple[int, int, int]
    shares: tuple[int, int]
    tile: tuple[bool, int, int]
    strides: list[int]


def _grid_of(x: Tensor, *others: Tensor | None) -> _Grid:
    channels_last, strides = strides_of(x, *others)
    channels, pixels, images = x.shape[1], prod(x.shape[2:]), x.shape[0]
    if channels_last:
        images, pixels = 1, images * pixels
        columns = min(_power(channels), 64)
        rows = _TILE_ELEMS // columns
    else:
        rows = min(_power(pixels), 128)
        columns = min(_power(channels), _TILE_ELEMS // rows)
    across, of_image = -(-channels // columns), -(-pixels // rows)
    blocks = images * of_image
    of_part = -(-blocks // max(1, _max_parts(x.device) // across))
    extent, shares = (pixels, channels, of_image), (blocks, of_part)
    by_part = -(-blocks // of_part), across
    return _Grid((blocks, across), by_part, extent, shares, (channels_last, rows, columns), strides)


def _power(number: int) -> int:
    """The power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


@cache
def _max_parts(device: torch.device) -> int:
    # Enough to fill the device a few times over; few on the CPU, so that each has several blocks there too.
    return 8 * multiprocessors(device) if device.type == "cuda" else 4


def _try_on(device: torch.device) -> None:
    one = torch.ones((1, 1), device=device)
    TRITON.apply(one, NormAffine(one[0], one[0], one[0]), None, IDENTITY, torch.empty_like(one))


TRITON_KERNELS = TritonKernels("shoal.kernels.norm.norm_triton_kernels", "PyTorch's own kernels", InputError, _try_on)
TRITON = NormSweepsTriton()
