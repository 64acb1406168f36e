"""How Triton's programs divide a tensor, by its strides.

No magic: all it does is arithmetic over shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from shoal.errors import InputError
from shoal.kernels.memory_format import row_stride, run_stride
from shoal.lowlevel.cuda_calls import multiprocessors

_TILE_ELEMS = 2048
_MAX_SPAN_ELEMS = 2**31  # elements that a tile's addresses may span


@dataclass(frozen=True)
class Grid:
    """How the programs share a tensor: by blocks of `rows` pixels, by runs of blocks (parts), and by `columns`."""

    channels_last: bool
    images: int  # 1 where all pixels lie in one run
    pixels: int  # of an image
    channels: int
    rows: int
    columns: int
    max_parts: int

    @property
    def blocks_an_image(self) -> int:
        return -(-self.pixels // self.rows)

    @property
    def blocks(self) -> int:
        return self.images * self.blocks_an_image

    @property
    def blocks_a_part(self) -> int:
        return -(-self.blocks // max(1, self.max_parts // -(-self.channels // self.columns)))

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

    @property
    def tile(self) -> tuple[bool, int, int]:
        return self.channels_last, self.rows, self.columns


def grid_of(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[Grid, list[int]]:
    """The grid, and `ld` of each tensor as the kernels want it; 0 for None."""
    given = [other for other in others if other is not None]
    if any(other.shape != x.shape for other in given):
        raise InputError(f"{[tuple(other.shape) for other in given]} with x of {tuple(x.shape)}; give one shape")
    channels_last = is_channels_last(x, *given)
    if channels_last is None:
        raise InputError(f"strides {[t.stride() for t in (x, *given)]}; give tensors all channels_last or contiguous")
    channels, pixels, images = x.shape[1], prod(x.shape[2:]), x.shape[0]
    if channels_last:
        images, pixels = 1, images * pixels
        columns = min(power(channels), 64)
        rows = _TILE_ELEMS // columns
    else:
        rows = min(power(pixels), 128)
        columns = min(power(channels), _TILE_ELEMS // rows)
    grid = Grid(channels_last, images, pixels, channels, rows, columns, _max_parts(x.device))
    return grid, [0 if t is None else leading_stride(t, channels_last) or 0 for t in (x, *others)]


def is_channels_last(*tensors: torch.Tensor) -> bool | None:
    """Which of the two layouts all have; None for neither."""
    if tensors[0].dim() < 2 or not tensors[0].numel():
        return None
    return next((way for way in (True, False) if all(leading_stride(x, way) for x in tensors)), None)


def leading_stride(x: torch.Tensor, channels_last: bool) -> int | None:
    """Elements from pixel to pixel in channels_last, from image to image else; None where that is not the layout.

    >>> leading_stride(torch.ones(2, 3, 4, 5), False), leading_stride(torch.ones(2, 3, 4, 5)[:, :2], False)
    (60, 60)
    >>> leading_stride(torch.ones(2, 3, 4, 5), True)
    """
    if channels_last:
        found = row_stride(x)
        return found if found is not None and found < _MAX_SPAN_ELEMS // _TILE_ELEMS else None
    images, channels, *sides = x.shape
    over_images, over_channels, *over_sides = x.stride()
    pixels = prod(sides)
    if run_stride(sides, over_sides) not in (0, 1) or (channels > 1 and over_channels != pixels):
        return None
    found = over_images if images > 1 else channels * pixels
    return found if channels * pixels <= found and channels * pixels < _MAX_SPAN_ELEMS else None


def power(number: int) -> int:
    """The power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


@cache
def _max_parts(device: torch.device) -> int:
    # Enough to fill the device a few times over; few on the CPU, so that each has several blocks there too.
    return 8 * multiprocessors(device) if device.type == "cuda" else 4
