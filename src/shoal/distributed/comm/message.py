"""The header of every message between ranks: length, number and checksum, so that none is mistaken for another.

The header is a message of its own, of a fixed size: a receiver learns of another length before it opens a buffer for
it (gloo ends the process where lengths differ). `docs/distributed.md` has the bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from zlib import crc32

import torch

_FIXED = struct.Struct("<4sIQQI")
_MAGIC = b"SHMS"
_DATA, _GAVE_UP = 1, 2
HEADER_BYTES = 256
_MAX_TEXT_BYTES = HEADER_BYTES - _FIXED.size
_ROW = 1024  # words that are summed before the CRC-32 sees them


@dataclass(frozen=True)
class MessageHeader:
    """
    Attributes:
        sequence: how many messages of this exchange came before.
        length_bytes: of the message.
        checksum: of the message.
        text: what the message is; what went wrong where the sender gave up.
        gave_up: no message follows, ever: the sender met an error.
    """

    sequence: int
    length_bytes: int
    checksum: int
    text: str
    gave_up: bool = False

    def to_tensor(self) -> torch.Tensor:
        """(HEADER_BYTES,) uint8 on the CPU."""
        kind = _GAVE_UP if self.gave_up else _DATA
        text = fitting(self.text).encode().ljust(_MAX_TEXT_BYTES, b"\0")
        fixed = _FIXED.pack(_MAGIC, kind, self.sequence, self.length_bytes, self.checksum)
        return torch.frombuffer(bytearray(fixed + text), dtype=torch.uint8)


def body_tag(sequence: int, length_bytes: int) -> int:
    """Of the message that follows a header: another number or length has, but for one in 2**31, another tag.

    Never 0 or 1.
    """
    return crc32(struct.pack("<QQ", sequence, length_bytes)) & 0x7FFFFFFF | 2


def fitting(text: str) -> str:
    """As much of a text as a header holds."""
    return text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore")


def read_header(received: torch.Tensor) -> MessageHeader | None:
    """The header in (HEADER_BYTES,) uint8 bytes, or None where they are none.

    >>> read_header(MessageHeader(3, 100, 7, "bucket 0").to_tensor())
    MessageHeader(sequence=3, length_bytes=100, checksum=7, text='bucket 0', gave_up=False)
    """
    data = received.cpu().numpy().tobytes()
    magic, kind, sequence, length_bytes, checksum = _FIXED.unpack_from(data)
    if magic != _MAGIC or kind not in (_DATA, _GAVE_UP):
        return None
    text = data[_FIXED.size :].rstrip(b"\0").decode(errors="replace")
    return MessageHeader(sequence, length_bytes, checksum, text, kind == _GAVE_UP)


def checksum(message: torch.Tensor) -> int:
    """Of (n,) uint8: sums of rows of 1024 words of 64 bits, modulo 2**64, and the CRC-32 of them and of the rest.

    Any change within 8 bytes is found, and all but one in 2**32 of the others. A CRC-32 by itself takes 30 times as
    long.

    >>> a = torch.arange(20_000).to(torch.uint8)
    >>> b = a.clone(); b[7] += 1
    >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(b)
    (True, False)
    """
    if message.storage_offset() % 8 or message.data_ptr() % 8:
        message = message.clone()
    rows = message.numel() // (8 * _ROW)
    split = rows * 8 * _ROW
    sums = message[:split].view(torch.int64).view(rows, _ROW).sum(1)
    crc = crc32(sums.cpu().numpy().data)
    return crc32(message[split:].cpu().numpy().data, crc)
