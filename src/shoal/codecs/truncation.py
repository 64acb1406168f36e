"""truncate1, truncate2, truncate3: the top bytes of each float32; round1 ... round3: the same, rounded first.

Bitpack and Bitunpack of ADT (Zhuang et al., A2DTWP, section III, algorithm 2: RoundTo = 1, 2, 3 bytes). The paper
truncates; `nearest` rounds first, to the same size. One byte keeps the sign and seven of eight exponent bits: powers of
four. Two bytes are bfloat16: truncation makes values 0.27 % smaller on average, rounding is unbiased. There are no
scales.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import inf

import torch

from shoal.codecs.checks import check_flat, check_length
from shoal.codecs.codec import Properties
from shoal.codecs.float_codec import FloatCodec
from shoal.codecs.launch import TILE_ELEMS, are_here, threads_for, tiles, triton_applies, triton_kernels
from shoal.codecs.payload import aligned
from shoal.errors import CodecError
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, level_number, register
from shoal.lowlevel.native import fields, run_native
from shoal.lowlevel.torch_state import on_device

WIDTHS_BYTES = (1, 2, 3)
_SMALLEST_NORMAL = 2.0**-126
# By bytes kept: of the value when cut, and when rounded.
_RELATIVE = {1: (0.75, 0.6), 2: (2.0**-7, 2.0**-8), 3: (2.0**-15, 2.0**-16)}
# Half a step past the greatest value. One byte's last step is from 2**125 to 2**127; its middle goes down, to the even
# code, and the next float up.
_OVERFLOW = {1: (2.0**127, 2.5 * 2.0**125 + 2.0**103), 2: (inf, 2.0**128 - 2.0**119), 3: (inf, 2.0**128 - 2.0**111)}
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_QUIET = 0x00400000
_NAN = 0x7FC00000
_PIECE_ELEMS = 1 << 16
_MIN_ELEMS = 1 << 16  # of a thread that is worth waking
_WHOLE = {1: torch.uint8, 2: torch.int16}


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
    choose(_OP, x, out).pack(x, width_bytes, nearest, out)


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
    choose(_OP, packed, out).unpack(packed, width_bytes, out)


@dataclass(frozen=True)
class TruncateCodec(FloatCodec):
    """The payload is `width_bytes` a value, the lowest kept byte first, in memory order."""

    name: str
    wire_id: int
    width_bytes: int
    nearest: bool

    @property
    def properties(self) -> Properties:
        relative = _RELATIVE[self.width_bytes][self.nearest]
        return Properties(
            bits_per_value=8 * self.width_bytes,
            nan="NaN",
            infinity="NaN" if self.width_bytes == 1 else "itself",
            overflow=_OVERFLOW[self.width_bytes][self.nearest],
            relative_error=relative,
            absolute_error=relative,
        )

    def payload_bytes(self, elems: int) -> int:
        return self.width_bytes * elems

    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        pack(values, self.width_bytes, self.nearest, payload)

    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        unpack(payload, self.width_bytes, values)

    def _error_bound(self, values: torch.Tensor) -> torch.Tensor:
        magnitude = values.abs().double()
        lowest = 2 * _SMALLEST_NORMAL if self.width_bytes == 1 else _SMALLEST_NORMAL
        bound = magnitude.clamp(min=lowest) * _RELATIVE[self.width_bytes][self.nearest]
        return bound.masked_fill(~(magnitude < self.properties.overflow), inf)


def _check(x: torch.Tensor, width_bytes: int, packed: torch.Tensor) -> None:
    if width_bytes not in WIDTHS_BYTES:
        raise CodecError(f"width_bytes={width_bytes}: expected 1, 2 or 3 of a float32's four bytes")
    check_flat("values", x, torch.float32)
    check_flat("packed bytes", packed, torch.uint8)
    check_length("packed bytes", packed, width_bytes * x.numel())


class _TruncationReference:
    """Plain torch: the definition that every implementation equals bit for bit."""

    def pack(self, x: torch.Tensor, width_bytes: int, nearest: bool, out: torch.Tensor) -> None:
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

    def unpack(self, packed: torch.Tensor, width_bytes: int, out: torch.Tensor) -> None:
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


class _TruncationCall(ctypes.Structure):
    """ShoalTruncation of csrc/shoal_native.h."""

    _fields_ = fields("int64 elements, int32 width nearest threads level, pointer values packed")


class _TruncationNative:
    """`csrc/codec_truncation.cpp`, on the CPU."""

    def pack(self, x: torch.Tensor, width_bytes: int, nearest: bool, out: torch.Tensor) -> None:
        run_native("shoal_truncation_pack", _native_call(x, width_bytes, out, nearest))

    def unpack(self, packed: torch.Tensor, width_bytes: int, out: torch.Tensor) -> None:
        run_native("shoal_truncation_unpack", _native_call(out, width_bytes, packed))


def _native_call(
    values: torch.Tensor, width_bytes: int, packed: torch.Tensor, nearest: bool = False
) -> _TruncationCall:
    """Of tensors that `_check` has seen: the kernels believe what they are told of an address."""
    return _TruncationCall(
        elements=values.numel(),
        width=width_bytes,
        nearest=nearest,
        threads=threads_for(values.numel(), _MIN_ELEMS),
        level=level_number(),
        values=values.data_ptr(),
        packed=packed.data_ptr(),
    )


class _TruncationTriton:
    """`kernels_triton`."""

    def pack(self, x: torch.Tensor, width_bytes: int, nearest: bool, out: torch.Tensor) -> None:
        with on_device(x.device):
            if width_bytes in _WHOLE and aligned(out, width_bytes):
                whole = out.view(_WHOLE[width_bytes])
                triton_kernels().pack_whole[tiles(x.numel())](
                    x, whole, x.numel(), 32 - 8 * width_bytes, nearest, TILE_ELEMS
                )
                return
            begun = 0
            if width_bytes == 3 and aligned(out, 4):
                begun = x.numel() // 4 * 4
                words = out[: 3 * begun].view(torch.int32)
                if begun:
                    triton_kernels().pack_words[tiles(words.numel())](x, words, words.numel(), nearest, TILE_ELEMS)
            if rest := x.numel() - begun:
                triton_kernels().pack_bytes[tiles(rest)](
                    x[begun:], out[width_bytes * begun :], rest, width_bytes, nearest, TILE_ELEMS
                )

    def unpack(self, packed: torch.Tensor, width_bytes: int, out: torch.Tensor) -> None:
        with on_device(out.device):
            if width_bytes in _WHOLE and aligned(packed, width_bytes):
                whole = packed.view(_WHOLE[width_bytes])
                triton_kernels().unpack_whole[tiles(out.numel())](whole, out, out.numel(), width_bytes, TILE_ELEMS)
                return
            begun = 0
            if width_bytes == 3 and aligned(packed, 4):
                begun = out.numel() // 4 * 4
                if begun:
                    triton_kernels().unpack_words[tiles(begun)](
                        packed[: 3 * begun].view(torch.int32), out, begun, TILE_ELEMS
                    )
            if rest := out.numel() - begun:
                triton_kernels().unpack_bytes[tiles(rest)](
                    packed[width_bytes * begun :], out[begun:], rest, width_bytes, TILE_ELEMS
                )


_OP: DispatchedOp[_TruncationReference | _TruncationNative | _TruncationTriton] = register(
    "truncation",
    _TruncationReference(),
    Implementation("triton", _TruncationTriton(), triton_applies),
    Implementation("native", _TruncationNative(), are_here),
)
