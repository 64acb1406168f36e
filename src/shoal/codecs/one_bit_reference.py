"""One bit a value and two means a block in plain torch: the definition that every kernel equals bit for bit.

A sum has an order, so that all give the same bits: in float64, in runs of 4096 values of the block; within a run 64
lanes each add every 64th value to 0.0, lanes are folded by halves, and runs are added in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from shoal.codecs.bit_packing import bytes_of, pack_bits, unpack_bits
from shoal.codecs.pieces import PIECE_ELEMS, pieces

RUN_ELEMS = 4096
LANES = 64


def encode_blocks(x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
    """As `one_bit.encode_blocks`, on any device."""
    for first, rows in _whole_blocks(x, block_elems or max(x.numel(), 1)):
        nan = rows.new_zeros(len(rows), dtype=torch.bool)
        for part in _parts(rows):
            nan |= part.isnan().any(1)
        for side in (0, 1):
            sums, counts = _of_side(rows, side)
            mean = (sums / counts.clamp(min=1)).float()
            means[first : first + len(rows), side] = mean.masked_fill(nan, torch.nan)
    for elements, _, _ in pieces(x.numel(), None):
        pack_bits(x[elements] < 0, bits[bytes_of(elements)])


def decode_blocks(bits: torch.Tensor, means: torch.Tensor, block_elems: int | None, out: torch.Tensor) -> None:
    """As `one_bit.decode_blocks`, on any device."""
    for elements, blocks, columns in pieces(out.numel(), block_elems):
        negative = torch.empty(elements.stop - elements.start, dtype=torch.bool, device=out.device)
        unpack_bits(bits[bytes_of(elements)], negative)
        out[elements] = torch.where(negative.view(-1, columns), means[blocks, 1:], means[blocks, :1]).view(-1)


def _whole_blocks(x: torch.Tensor, block: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The number of a block and, from there on, some blocks of one length as rows; the last, short one alone."""
    at_once = max(PIECE_ELEMS // block, 1) * block
    whole = x.numel() // block * block
    for first in range(0, whole, at_once):
        yield first // block, x[first : min(first + at_once, whole)].view(-1, block)
    if whole < x.numel():
        yield whole // block, x[whole:].view(1, -1)


def _parts(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Their columns in whole runs, few elements at a time."""
    return (rows[:, first : first + PIECE_ELEMS] for first in range(0, rows.shape[1], PIECE_ELEMS))


def _of_side(rows: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of each row's values that are not negative (side 0) or that are (1), float64, and how many they are."""
    totals = rows.new_zeros(len(rows), dtype=torch.float64)
    counts = rows.new_zeros(len(rows), dtype=torch.int64)
    for part in _parts(rows):
        members = part < 0 if side else ~(part < 0)
        counts += members.sum(1)
        values = part.where(members, 0).double()
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
    return totals, counts
