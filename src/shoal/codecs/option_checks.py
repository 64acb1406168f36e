"""What codecs ask of the numbers they are given as options: each says what was got and what is expected."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from shoal.errors import CodecError, brief


def whole_number(codec: str, option: str, value: Any, expected: str, least: int, most: int) -> int:
    """`value` as an int; a NumPy integer is one, a bool is none.

    Raises:
        CodecError: it is no whole number from `least` to `most`.

    >>> whole_number("linear", "block", 8, "at least 1 value", 1, 100)
    8
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise CodecError(f"{codec}: got {option}={brief(value)}, expected {expected}")
    return int(value)


def real_number(codec: str, option: str, value: Any, expected: str) -> float:
    """`value` as a float, infinite where its magnitude is too large for one.

    Raises:
        CodecError: it is no real number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise CodecError(f"{codec}: got {option}={brief(value)}, expected {expected}")
    try:
        return float(value)
    except OverflowError:
        return float("inf")
