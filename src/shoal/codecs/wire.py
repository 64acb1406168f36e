"""The header of an encoded tensor in a file or a message; `docs/codecs.md` specifies it byte by byte.

It knows no codec: a codec is a number and some bytes of options here.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from math import prod
from zlib import crc32

import torch

from shoal.errors import CodecError

MAGIC = b"SHCD"
VERSION = 1
MAX_DIMS = 64
# magic, version, codec, dtype, dimensions, bytes of options, CRC-32, bytes of payload
_FIXED = struct.Struct("<4sHHBBHIQ")
_CRC_PLACE = 12
_CRC_END = 16
_LARGEST_SIZE = 2**63 - 1
_DTYPES = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 4: torch.bool, 5: torch.int64}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class PayloadHeader:
    """What is said about a payload.

    Attributes:
        codec: the codec's number.
        dtype: what it decodes to.
        shape: of the tensor.
        order: its dimensions by decreasing stride.
        options: of the codec.
    """

    codec: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    options: bytes


def to_bytes(header: PayloadHeader, payload: bytes) -> bytes:
    """Header and payload as one byte string.

    Raises:
        CodecError: this machine is big-endian.
    """
    _check_byte_order()
    dims = len(header.shape)
    fixed = _FIXED.pack(
        MAGIC, VERSION, header.codec, _NUMBERS[header.dtype], dims, len(header.options), 0, len(payload)
    )
    rest = struct.pack(f"<{dims}Q{dims}B", *header.shape, *header.order) + header.options
    crc = struct.pack("<I", crc32(payload, crc32(fixed[:_CRC_PLACE] + fixed[_CRC_END:] + rest)))
    return b"".join((fixed[:_CRC_PLACE], crc, fixed[_CRC_END:], rest, payload))


def from_bytes(data: bytes | bytearray | memoryview) -> tuple[PayloadHeader, memoryview]:
    """The header of a byte string and a view of its payload.

    Raises:
        CodecError: it is shorter or longer than it says, was changed, is of another version, or says what cannot be.
    """
    _check_byte_order()
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise CodecError(f"got a {type(data).__name__}, expected bytes that Encoded.to_bytes wrote; read the file")
    view = memoryview(data).cast("B")
    if len(view) < _FIXED.size:
        raise CodecError(f"got {len(view)} bytes, expected a header of at least {_FIXED.size}; read the whole file")
    magic, version, codec, dtype, dims, option_bytes, crc, payload_bytes = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise CodecError(f"got bytes that begin with {magic!r}, expected {MAGIC!r}; this is no encoded tensor")
    if version != VERSION:
        raise CodecError(
            f"got version {version} of the format, expected {VERSION}; read it with the Shoal that wrote it"
        )
    options_at = _FIXED.size + 9 * dims
    payload_at = options_at + option_bytes
    if len(view) != payload_at + payload_bytes:
        raise CodecError(
            f"got {len(view)} bytes, expected {payload_at + payload_bytes} by the header; the file was cut or added to"
        )
    found = crc32(view[_CRC_END:], crc32(view[:_CRC_PLACE]))
    if found != crc:
        raise CodecError(f"got CRC-32 {found:08x}, expected {crc:08x}; the bytes were damaged: fetch them again")
    if dtype not in _DTYPES:
        raise CodecError(f"got dtype {dtype}, expected one of {', '.join(map(str, _DTYPES))}; encode it again")
    if dims > MAX_DIMS:
        raise CodecError(f"got {dims} dimensions, expected at most {MAX_DIMS}; encode it again")
    sizes = struct.unpack_from(f"<{dims}Q", view, _FIXED.size)
    order = struct.unpack_from(f"<{dims}B", view, _FIXED.size + 8 * dims)
    # Strides are products of sizes, with 1 for 0: neither they nor bytes may overflow.
    if prod(max(size, 1) for size in sizes) * 8 > _LARGEST_SIZE:
        raise CodecError(f"got shape {sizes}, expected fewer than 2**60 elements; encode it again")
    if sorted(order) != list(range(dims)):
        raise CodecError(f"got dimension order {order}, expected each of {dims} dimensions once; encode it again")
    return PayloadHeader(codec, _DTYPES[dtype], sizes, order, bytes(view[options_at:payload_at])), view[payload_at:]


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise CodecError("got a big-endian machine, expected a little-endian one: payloads are little-endian")
