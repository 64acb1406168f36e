"""The top one, two or three bytes of every float32, and back: Bitpack and Bitunpack of ADT.

Zhuang et al., A2DTWP, section III (algorithm 2, RoundTo = 1, 2, 3). Two bytes are a bfloat16, cut instead of rounded.
The paper cuts; `nearest` rounds first, for the same bytes.
"""

from __future__ import annotations

import torch

from shoal.codecs.kernels import kernel
from shoal.codecs.raw import check_flat, check_length
from shoal.errors import CodecError

WIDTHS_BYTES = (1, 2, 3)


def pack(x: torch.Tensor, width_bytes: int, nearest: bool, out: torch.Tensor) -> None:
    """Write the most significant bytes of each value, its lowest kept byte first.

    Args:
        x: (n,) float32, dense.
        width_bytes: 1, 2 or 3 to keep.
        nearest: round to the nearest value that can be kept, of two to the one of even code; else cut, towards zero.
        out: (width_bytes * n,) uint8, dense, written.

    A NaN stays one. Two and three bytes keep infinities; one byte has no code for them, and magnitudes of 2**127 and
    more, infinite or not, become NaN. What rounds past the greatest value becomes infinite (NaN in one byte).

    Raises:
        CodecError: another width, or a tensor of another dtype, length or layout.

    >>> out = torch.empty(4, dtype=torch.uint8)
    >>> pack(torch.tensor([1.0, -0.1]), 2, False, out)
    >>> out.numpy().tobytes().hex(" ")
    '80 3f cc bd'
    """
    _check(x, width_bytes, out)
    kernel("truncation", x, out).pack(x, width_bytes, nearest, out)


def unpack(packed: torch.Tensor, width_bytes: int, out: torch.Tensor) -> None:
    """Write the values whose top bytes these are; their other bytes are zero.

    Args:
        packed: (width_bytes * n,) uint8, dense.
        width_bytes: 1, 2 or 3.
        out: (n,) float32, dense, written.

    Raises:
        CodecError: another width, or a tensor of another dtype, length or layout.

    >>> out = torch.empty(2)
    >>> unpack(torch.tensor([0x80, 0x3f, 0xcc, 0xbd], dtype=torch.uint8), 2, out)
    >>> out
    tensor([ 1.0000, -0.0996])
    """
    _check(out, width_bytes, packed)
    kernel("truncation", packed, out).unpack(packed, width_bytes, out)


def _check(x: torch.Tensor, width_bytes: int, packed: torch.Tensor) -> None:
    if width_bytes not in WIDTHS_BYTES:
        raise CodecError(f"width_bytes={width_bytes}: expected 1, 2 or 3 of a float32's four bytes")
    check_flat("values", x, torch.float32)
    check_flat("packed bytes", packed, torch.uint8)
    check_length("packed bytes", packed, width_bytes * x.numel())
