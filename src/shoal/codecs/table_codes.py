"""Float32 into 8-bit codes of a table and a scale for each block, and back: the raw layer of the 8-bit data types.

Replaces, for one block and up to the rounding, `torch.bucketize(x.abs() / x.abs().max(), thresholds)` and
`magnitudes[code] * scale`. Dettmers 2016, section 3.2 (there a binary search in shared memory).
"""

from __future__ import annotations

from ctypes import c_float
from math import inf

import torch

from shoal.codecs.kernels import kernel
from shoal.codecs.raw import check_flat, check_length
from shoal.codecs.table import Table
from shoal.errors import CodecError


def blocks_of(elems: int, block_elems: int | None) -> int:
    """How many blocks, the last one perhaps short; None is one for the whole.

    >>> blocks_of(10_000, 4096), blocks_of(10_000, None), blocks_of(0, None)
    (3, 1, 0)
    """
    return -(-elems // (block_elems or max(elems, 1)))


def as_float32(number: float) -> float:
    """The nearest float32; infinite where it is too large.

    >>> as_float32(0.1)
    0.10000000149011612
    """
    return c_float(number).value


def encode_blocks(
    x: torch.Tensor,
    table: Table,
    block_elems: int | None,
    scales: torch.Tensor,
    codes: torch.Tensor,
    *,
    scale: float | None = None,
    seed: int | None = None,
    first_elem: int = 0,
) -> None:
    """Write the code of each value and the scale of each block.

    A block's scale is its greatest magnitude, or `scale`. A value's code is its sign, and how many thresholds are at
    most |x| / scale. In a block of zeros the codes are 0 or 128; in one that holds a NaN or an infinity they are too,
    and its scale is NaN.

    Args:
        x: (n,) float32, dense.
        table: what the codes stand for.
        block_elems: values that share a scale; None: all.
        scales: (blocks,) float32, written.
        codes: (n,) uint8, written.
        scale: of every block, > 0, rounded to float32; greater magnitudes get the last code.
        seed: rounds up or down at random instead of to the nearest, so that decoding gives the value in the mean; the
            same seed and element number give the same outcome.
        first_elem: the number of x[0] in the tensor it is a part of: what `seed` draws by.

    Raises:
        CodecError: a tensor has another dtype, length or layout.

    >>> from shoal.codecs.linear import LINEAR
    >>> scales, codes = torch.empty(1), torch.empty(3, dtype=torch.uint8)
    >>> encode_blocks(torch.tensor([0.0, -2.54, 1.0]), LINEAR, None, scales, codes)
    >>> codes.tolist(), round(scales.item(), 2)
    ([0, 255, 50], 2.54)
    """
    _check(x, scales, codes, block_elems)
    rounded = None if scale is None else as_float32(scale)
    if rounded is not None and not 0 < rounded < inf:
        raise CodecError(f"scale={scale}: expected a finite float32 > 0; leave it out for the greatest magnitude")
    run = kernel("table_codes", x, scales, codes)
    run.encode_blocks(x, table, block_elems, scales, codes, scale=rounded, seed=seed, first_elem=first_elem)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, table: Table, block_elems: int | None, out: torch.Tensor
) -> None:
    """Write each code's magnitude times its block's scale, with its sign; NaN where the scale is NaN.

    Args:
        codes: (n,) uint8.
        scales: (blocks,) float32.
        table, block_elems: those of `encode_blocks`.
        out: (n,) float32, dense, written.

    Raises:
        CodecError: a tensor has another dtype, length or layout.

    >>> from shoal.codecs.linear import LINEAR
    >>> out = torch.empty(2)
    >>> decode_blocks(torch.tensor([255, 50], dtype=torch.uint8), torch.tensor([2.54]), LINEAR, None, out)
    >>> out
    tensor([-2.5400,  1.0000])
    """
    _check(out, scales, codes, block_elems)
    kernel("table_codes", codes, scales, out).decode_blocks(codes, scales, table, block_elems, out)


def _check(x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, block_elems: int | None) -> None:
    if block_elems is not None and block_elems < 1:
        raise CodecError(f"block_elems={block_elems}: expected at least 1; None is one block for all")
    check_flat("values", x, torch.float32)
    check_flat("scales", scales, torch.float32)
    check_flat("codes", codes, torch.uint8)
    check_length("scales", scales, blocks_of(x.numel(), block_elems))
    check_length("codes", codes, x.numel())
