"""Which tensors the codecs' native and Triton kernels take, on how many threads and in which tiles they run."""

from __future__ import annotations

import ctypes

import torch

from shoal.errors import CodecError
from shoal.lowlevel.dispatch import level_number
from shoal.lowlevel.native import fields, library
from shoal.lowlevel.torch_state import on_device
from shoal.lowlevel.triton_launch import TritonKernels

TILE_ELEMS = 4096
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.bool)
_MIN_ELEMS = 1 << 16  # of a thread that is worth waking


def are_here(*tensors: torch.Tensor) -> bool:
    """Whether the library was built, and these tensors are dense and on the CPU."""
    if library() is None:
        return False
    for x in tensors:  # noqa: SIM110  # a generator costs more than what it asks
        if not x.is_cpu or x.layout is not torch.strided or not x.is_contiguous():
            return False
    return True


def threads_for(elems: int, min_elems: int) -> int:
    """As many as torch uses, with at least that many elements for each."""
    return max(1, min(torch.get_num_threads(), elems // min_elems))


class Bits(ctypes.Structure):
    """ShoalBits of csrc/shoal_native.h."""

    _fields_ = fields("int64 elements block_elements, int32 threads level, pointer values means bits flags")


def bits_call(elems: int, bits: torch.Tensor) -> Bits:
    """A call for that many elements, with the address of their bits, which were checked: the kernels believe it."""
    return Bits(
        elements=elems,
        block_elements=max(elems, 1),
        threads=threads_for(elems, _MIN_ELEMS),
        level=level_number(),
        bits=bits.data_ptr(),
    )


def triton_applies(*tensors: torch.Tensor) -> bool:
    """Whether the kernels read and write these tensors here: all on one such device, and each one dimension, dense."""
    device = tensors[0].device
    return KERNELS.run_on(device) and all(
        x.device == device and x.dim() == 1 and x.is_contiguous() and x.dtype in _DTYPES for x in tensors
    )


def _try_on(device: torch.device) -> None:
    with on_device(device):
        x, mask = torch.ones((2, 1), dtype=torch.uint8, device=device)
        triton_kernels().sign_mask[(1,)](x, mask, 1, 0xFF, 8)


KERNELS = TritonKernels("shoal.codecs.kernels_triton", "the torch reference", CodecError, _try_on)
triton_kernels = KERNELS.found


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
