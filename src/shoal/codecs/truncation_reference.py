"""The top bytes of float32 in plain torch: the definition that every kernel equals bit for bit."""

from __future__ import annotations

import torch

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_QUIET = 0x00400000
_NAN = 0x7FC00000
_PIECE_ELEMS = 1 << 16


def pack(x: torch.Tensor, width_bytes: int, nearest: bool, out: torch.Tensor) -> None:
    """As `truncation.pack`, on any device."""
    dropped_bytes = 4 - width_bytes
    for first in range(0, x.numel(), _PIECE_ELEMS):
        bits = x[first : first + _PIECE_ELEMS].view(torch.int32)
        magnitude = bits & _MAGNITUDE
        kept_magnitude = magnitude
        if nearest:
            # Half a step below infinity the sum stays within int32.
            rounded = magnitude + _increment(magnitude, 8 * dropped_bytes)
            kept_magnitude = torch.where(magnitude < _INFINITY, rounded, magnitude)
        # A NaN whose mantissa bits are all dropped would become an infinity.
        kept_magnitude = torch.where(magnitude > _INFINITY, magnitude | _QUIET, kept_magnitude)
        kept = (kept_magnitude | (bits & ~_MAGNITUDE)).view(torch.uint8).view(-1, 4)[:, dropped_bytes:]
        out[first * width_bytes : (first + len(bits)) * width_bytes].view(-1, width_bytes).copy_(kept)


def unpack(packed: torch.Tensor, width_bytes: int, out: torch.Tensor) -> None:
    """As `truncation.unpack`, on any device."""
    bits = out.view(torch.int32).zero_()
    bits.view(torch.uint8).view(-1, 4)[:, 4 - width_bytes :].copy_(packed.view(-1, width_bytes))
    if width_bytes == 1:
        for first in range(0, out.numel(), _PIECE_ELEMS):
            part = bits[first : first + _PIECE_ELEMS]
            part.copy_(torch.where((part & _MAGNITUDE) == 0x7F000000, part | _NAN, part))


def _increment(magnitude: torch.Tensor, dropped_bits: int) -> torch.Tensor:
    """What to add before the dropped bits are cut off, so that the nearest value is kept, of two the even code."""
    code = magnitude >> dropped_bits
    below_half = (1 << (dropped_bits - 1)) - 1
    if dropped_bits < 24:
        return (code & 1) + below_half
    # A code is a power of four: the middle of 1 and 4 is 2.5, a quarter further in bits than half; that of 0 and
    # 2**-125 is 2**-126.
    return (code & 1) + below_half - (code > 0).int() * 0x200000
