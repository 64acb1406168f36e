"""Bytes as people write them: "2GiB", "800MB", 1_000_000."""

from __future__ import annotations

import math
import re
from numbers import Integral

from shoal.errors import InputError, brief

MAX_BYTES = 2**63 - 1  # what torch and the operating system count with
HOST_PAGE_BYTES = 4096  # what direct I/O asks for, and how slots in a slab are aligned

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def in_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages of the host: what they take there."""
    return -(-nbytes // HOST_PAGE_BYTES) * HOST_PAGE_BYTES


def parse_bytes(size: int | str, what: str = "budget") -> int:
    """Turn `2_000_000`, `"2GiB"` or `"800 MB"` into bytes. A NumPy integer is an int like another.

    Raises:
        InputError: the text is not a size, or the size is not positive or has more than 63 bits.

    >>> parse_bytes("1.5MiB")
    1572864
    """
    if isinstance(size, bool) or not isinstance(size, (Integral, str)):
        kind = type(size).__name__
        raise InputError(f"{what}={brief(size)}: expected an int of bytes or a text such as '2GiB', got {kind}")
    if isinstance(size, Integral):
        count: int | float = int(size)
    else:
        match = _PATTERN.fullmatch(size)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None:
            raise InputError(
                f"{what}={brief(size)} is not a size; write a positive number with a unit: '150MiB' or '2GB'"
            )
        count = float(match.group(1)) * unit
    if count > MAX_BYTES:
        raise InputError(f"{what}={brief(size)} is more bytes than any device has; give fewer, such as '150MiB'")
    count = round(count)
    if count <= 0:
        raise InputError(f"{what}={brief(size)} is less than a byte; it must be positive, such as '150MiB'")
    return count


def format_bytes(count: int | float) -> str:
    """Bytes for people, in binary units with four significant digits.

    >>> format_bytes(1572864)
    '1.500 MiB'
    """
    magnitude = abs(count)
    if magnitude < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 1024 or unit == "TiB":
            break
    digits = 3 if abs(count) < 10 else 2 if abs(count) < 100 else 1
    return f"{count:.{digits}f} {unit}"


def budget_text(count: int) -> str:
    """A budget of at least `count` bytes, as one would type it: rounded up to three digits.

    >>> budget_text(218_412_345), budget_text(1_287_651_328), budget_text(700)
    ('209MiB', '1.2GiB', '700B')
    """
    for unit in ("tib", "gib", "mib", "kib"):
        if count >= _UNITS[unit]:
            step = 10 ** max(0, 2 - int(math.log10(count / _UNITS[unit])))
            return f"{math.ceil(count * step / _UNITS[unit]) / step:g}{unit[0].upper()}iB"
    return f"{count}B"
