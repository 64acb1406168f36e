"""One bit a value and two means a block in plain torch: the definition that every kernel equals bit for bit.

A sum has an order, so that all give the same bits: in float64, in runs of 4096 values of the block; within a run 64
lanes each add every 64th value to 0.0, lanes are folded by halves, and runs are added in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from shoal.codecs.bit_packing import pack_bits, unpack_bits

RUN_ELEMS = 4096
LANES = 64
_PIECE_ELEMS = 1 << 16


def encode_blocks(x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
    """As `one_bit.encode_blocks`, on any device."""
    for first, rows in _whole_blocks(x, block_elems or max(x.numel(), 1)):
        negative = rows < 0
        for side, members in enumerate((~negative, negative)):
            count = members.sum(1)
            mean = _ordered_sums(rows, members) / count.clamp(min=1)
            means[first : first + len(rows), side] = mean.float().masked_fill(rows.isnan().any(1), torch.nan)
    pack_bits(x < 0, bits)


def decode_blocks(bits: torch.Tensor, means: torch.Tensor, block_elems: int | None, out: torch.Tensor) -> None:
    """As `one_bit.decode_blocks`, on any device."""
    block = block_elems or max(out.numel(), 1)
    negative = torch.empty(out.numel(), dtype=torch.bool, device=out.device)
    unpack_bits(bits, negative)
    for first in range(0, out.numel(), _PIECE_ELEMS):
        side = negative[first : first + _PIECE_ELEMS]
        of_block = means[torch.arange(first, first + len(side), device=out.device) // block]
        torch.where(side, of_block[:, 1], of_block[:, 0], out=out[first : first + len(side)])


def _whole_blocks(x: torch.Tensor, block: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The number of a block and, from there on, some blocks of one length as rows; the last, short one alone."""
    at_once = max(_PIECE_ELEMS // block, 1) * block
    whole = x.numel() // block * block
    for first in range(0, whole, at_once):
        yield first // block, x[first : min(first + at_once, whole)].view(-1, block)
    if whole < x.numel():
        yield whole // block, x[whole:].view(1, -1)


def _ordered_sums(rows: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """Of each row's members, (rows,) float64."""
    totals = rows.new_zeros(len(rows), dtype=torch.float64)
    for first in range(0, rows.shape[1], _PIECE_ELEMS):
        part = slice(first, first + _PIECE_ELEMS)
        values = rows[:, part].where(members[:, part], 0).double()
        # Zeros at the end of a lane change no sum.
        run = RUN_ELEMS if values.shape[1] > RUN_ELEMS else -(-values.shape[1] // LANES) * LANES
        runs = pad(values, (0, -values.shape[1] % run)).view(len(rows), -1, run // LANES, LANES)
        lanes = torch.zeros_like(runs[:, :, 0])
        for number in range(runs.shape[2]):
            lanes += runs[:, :, number]
        while lanes.shape[2] > 1:
            half = lanes.shape[2] // 2
            lanes = lanes[:, :, :half] + lanes[:, :, half:]
        for number in range(lanes.shape[1]):
            totals += lanes[:, number, 0]
    return totals
