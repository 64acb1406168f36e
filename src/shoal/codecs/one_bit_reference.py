"""One bit a value and two means a block in plain torch: the definition that every kernel equals bit for bit.

A sum has an order, so that all give the same bits: in float64, in runs of 4096 values; within a run 64 lanes each add
every 64th value to 0.0, lanes are folded by halves, and runs are added in order.
"""

from __future__ import annotations

import torch

from shoal.codecs.bit_packing import pack_bits, unpack_bits

RUN_ELEMS = 4096
LANES = 64


def encode_blocks(x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
    """As `one_bit.encode_blocks`, on any device."""
    block = block_elems or max(x.numel(), 1)
    for number, first in enumerate(range(0, x.numel(), block)):
        part = x[first : first + block]
        negative = part < 0
        for side, members in enumerate((~negative, negative)):
            count = int(members.sum())
            mean = _ordered_sum(part.where(members, 0)) / count if count else torch.zeros(())
            means[number, side] = torch.nan if bool(part.isnan().any()) else mean.float()
    pack_bits(x < 0, bits)


def decode_blocks(bits: torch.Tensor, means: torch.Tensor, block_elems: int | None, out: torch.Tensor) -> None:
    """As `one_bit.decode_blocks`, on any device."""
    block = block_elems or max(out.numel(), 1)
    negative = torch.empty(out.numel(), dtype=torch.bool, device=out.device)
    unpack_bits(bits, negative)
    for number, first in enumerate(range(0, out.numel(), block)):
        side = negative[first : first + block]
        torch.where(side, means[number, 1], means[number, 0], out=out[first : first + block])


def _ordered_sum(values: torch.Tensor) -> torch.Tensor:
    missing = -values.numel() % RUN_ELEMS
    runs = torch.nn.functional.pad(values.double(), (0, missing)).view(-1, RUN_ELEMS // LANES, LANES)
    lanes = torch.zeros_like(runs[:, 0])
    for row in range(runs.shape[1]):
        lanes += runs[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    total = lanes.new_zeros(())
    for run in lanes[:, 0]:
        total = total + run
    return total
