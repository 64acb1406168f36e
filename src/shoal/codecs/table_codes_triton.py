"""Table codes in Triton, bit for bit those of `table_codes`: a code is one look-up, not a search over the thresholds.

float32s that share their exponent and the first mantissa bits share a bucket, and a bucket is so narrow that at most
one threshold lies in it. Its entry, 32 bits, holds how many thresholds lie below the bucket and where that one lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from shoal.codecs.launch import block_tiles, triton_kernels
from shoal.codecs.tables import Table
from shoal.errors import CodecError
from shoal.lowlevel.torch_state import on_device

_MAX_BUCKETS = 1 << 16
_MIN_SHIFT = 8  # an entry has 7 bits for the count and 25 for a place among 2**shift


@dataclass(frozen=True)
class Buckets:
    """Which thresholds lie at or below a float32 that is >= 0, by its bits.

    Attributes:
        entries: int32, one for everything before the first bucket, the buckets, one for everything past the last.
        before: of the number of a bucket, bits >> shift, to its entry.
        shift: bits that the members of a bucket differ in.
    """

    entries: torch.Tensor
    before: int
    shift: int

    def count(self, x: torch.Tensor) -> torch.Tensor:
        """How many thresholds are <= each of x, float32 >= 0: what the kernel computes."""
        bits = x.view(torch.int32)
        entry = self.entries[((bits >> self.shift) - self.before).clamp(0, len(self.entries) - 1).long()]
        return (entry & 127) + ((bits & ((1 << self.shift) - 1)) >= (entry >> 7)).int()


def buckets_of(thresholds: torch.Tensor) -> Buckets:
    """The widest buckets that hold one of these thresholds at most.

    Args:
        thresholds: up to 127 float32 > 0, strictly ascending, on the CPU.

    Raises:
        CodecError: some lie so close together that there would be too many buckets.

    >>> found = buckets_of(torch.tensor([0.25, 0.5, 0.75]))
    >>> found.shift, len(found.entries), found.count(torch.tensor([0.0, 0.25, 0.7, 9.0])).tolist()
    (22, 6, [0, 1, 2, 3])
    """
    bits = thresholds.view(torch.int32).long()
    for shift in range(23, _MIN_SHIFT - 1, -1):
        number = bits >> shift
        if not bool((number.diff() == 0).any()):
            break
    else:
        raise CodecError(f"thresholds less than 2**{_MIN_SHIFT} float32s apart; give a table whose values lie wider")
    before, size = int(number[0]) - 1, int(number[-1] - number[0]) + 3
    if size > _MAX_BUCKETS:
        raise CodecError(
            f"{size} buckets for a table's thresholds, at most {_MAX_BUCKETS}; give a table of fewer decades"
        )
    below = torch.searchsorted(number, torch.arange(size) + before)
    places = torch.full((size,), 1 << shift)  # past the bucket's end: never reached
    places[number - before] = bits & ((1 << shift) - 1)
    return Buckets((places << 7 | below).int(), before, shift)


class Rounding(NamedTuple):
    """How values become codes: the last three arguments of `table_codes.encode_blocks`."""

    scale: float | None = None
    seed: int | None = None
    first_elem: int = 0


TO_NEAREST = Rounding()


class TableCodesTriton:
    """The functions of `table_codes` for tensors that `launch.triton_applies` takes."""

    def encode_blocks(
        self,
        x: torch.Tensor,
        table: Table,
        block_elems: int | None,
        scales: torch.Tensor,
        codes: torch.Tensor,
        rounding: Rounding = TO_NEAREST,
    ) -> None:
        scale, seed, first_elem = rounding
        grid, rows, columns, parts = block_tiles(x.numel(), block_elems)
        if not grid:
            return
        buckets = _placed(table, x.device, seed is not None)
        shape = (x.numel(), scales.numel(), min(block_elems or x.numel(), x.numel()), parts)
        with on_device(x.device):
            if parts > 1:
                scales.zero_()
                triton_kernels().largest[(grid,)](x, scales.view(torch.int32), shape[0], shape[2], parts, columns)
            triton_kernels().encode[(grid,)](
                x,
                codes,
                scales,
                buckets.entries,
                _magnitudes(table, x.device),
                1.0 if scale is None else scale,
                *shape,
                buckets.before,
                len(buckets.entries) - 1,
                0 if seed is None else seed & 0xFFFFFFFF,
                first_elem & 0xFFFFFFFF,
                buckets.shift,
                scale is not None,
                seed is not None,
                parts > 1,
                rows,
                columns,
                num_warps=8,
            )

    def decode_blocks(
        self, codes: torch.Tensor, scales: torch.Tensor, table: Table, block_elems: int | None, out: torch.Tensor
    ) -> None:
        grid, rows, columns, parts = block_tiles(out.numel(), block_elems)
        if not grid:
            return
        shape = (out.numel(), scales.numel(), min(block_elems or out.numel(), out.numel()), parts)
        with on_device(out.device):
            triton_kernels().decode[(grid,)](
                codes, scales, _magnitudes(table, out.device), out, *shape, rows, columns, num_warps=8
            )


@lru_cache(64)
def _placed(table: Table, device: torch.device, between: bool) -> Buckets:
    """The buckets of the thresholds, or of the magnitudes where one rounds between these, on the device."""
    found = buckets_of(table.magnitudes[1:] if between else table.thresholds)
    return Buckets(found.entries.to(device), found.before, found.shift)


@lru_cache(64)
def _magnitudes(table: Table, device: torch.device) -> torch.Tensor:
    return table.magnitudes.to(device)
