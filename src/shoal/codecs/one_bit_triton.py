"""One bit a value and two means a block in Triton; as `shoal.codecs.one_bit`, bit for bit.

Sums have the reference's order: a program adds the lanes of a few runs, a second kernel adds a block's runs.
"""

from __future__ import annotations

import torch

from shoal.codecs.launch_triton import applies, block_tiles, found
from shoal.codecs.one_bit_reference import LANES, RUN_ELEMS
from shoal.lowlevel.triton_launch import on_device

__all__ = ["applies", "decode_blocks", "encode_blocks"]

_RUNS = 16  # of a program
_BLOCKS = 64
_AHEAD = 16


def encode_blocks(x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
    """As `one_bit.encode_blocks`; tensors for which `applies` is true."""
    elems = x.numel()
    if not elems:
        return
    block = min(block_elems or elems, elems)
    blocks, runs_a_block = -(-elems // block), -(-block // RUN_ELEMS)
    runs = blocks * runs_a_block
    sums = torch.empty((runs, 2), dtype=torch.float64, device=x.device)
    counts = torch.empty((runs, 2), dtype=torch.int32, device=x.device)
    with on_device(x.device):
        found().sum_sides[(-(-runs // _RUNS),)](
            x, bits, sums, counts, elems, block, runs_a_block, runs, min(block, RUN_ELEMS), RUN_ELEMS, _RUNS, LANES
        )
        ahead = min(runs_a_block, _AHEAD)
        found().mean_sides[(-(-blocks // _BLOCKS),)](sums, counts, means, runs_a_block, runs, blocks, _BLOCKS, ahead)


def decode_blocks(bits: torch.Tensor, means: torch.Tensor, block_elems: int | None, out: torch.Tensor) -> None:
    """As `one_bit.decode_blocks`; tensors for which `applies` is true."""
    elems = out.numel()
    programs, rows, columns, parts = block_tiles(elems, block_elems)
    if not programs:
        return
    block = min(block_elems or elems, elems)
    with on_device(out.device):
        found().decode_sides[(programs,)](bits, means, out, elems, -(-elems // block), block, parts, rows, columns)
