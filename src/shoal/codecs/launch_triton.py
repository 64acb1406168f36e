"""Where the codecs' Triton kernels run, and in which tiles."""

from __future__ import annotations

import torch

from shoal.errors import CodecError
from shoal.lowlevel.triton_launch import TritonKernels, on_device

TILE_ELEMS = 4096
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.bool)


def applies(*tensors: torch.Tensor) -> bool:
    """Whether the kernels read and write these tensors here: all on one such device, and each one dimension, dense."""
    device = tensors[0].device
    return KERNELS.run_on(device) and all(
        x.device == device and x.dim() == 1 and x.is_contiguous() and x.dtype in _DTYPES for x in tensors
    )


def _try_on(device: torch.device) -> None:
    with on_device(device):
        x, mask = torch.ones((2, 1), dtype=torch.uint8, device=device)
        found().sign_mask[(1,)](x, mask, 1, 0xFF, 8)


KERNELS = TritonKernels("shoal.codecs.kernels_triton", "the torch reference", CodecError, _try_on)
found = KERNELS.found


def tiles(elems: int) -> tuple[int]:
    """The grid of `TILE_ELEMS` elements a program."""
    return (-(-elems // TILE_ELEMS),)


def block_tiles(elems: int, block_elems: int | None) -> tuple[int, int, int, int]:
    """How many programs, a tile's blocks and elements of each, and how many tiles share one block.

    >>> block_tiles(10_000, 64), block_tiles(10_000, 4096), block_tiles(10_000, None)
    ((3, 64, 64, 1), (3, 1, 4096, 1), (3, 1, 4096, 3))
    """
    block = min(block_elems or elems, elems)
    if not block:
        return 0, 1, 1, 1
    columns = min(1 << (block - 1).bit_length(), TILE_ELEMS)
    rows, parts = TILE_ELEMS // columns, -(-block // columns)
    blocks = -(-elems // block)
    return -(-blocks // rows) * parts, rows, columns, parts
