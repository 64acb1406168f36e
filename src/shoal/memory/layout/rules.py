"""What the native search and its twin in Python have in common: the numbers of csrc/shoal_native.h."""

from __future__ import annotations

from enum import IntEnum, IntFlag


class Outcome(IntEnum):
    """How an attempt at a layout ends."""

    FOUND = 0
    IMPOSSIBLE = 1
    GAVE_UP = 2  # out of nodes or seconds, or told to stop


class Rules(IntFlag):
    """The rules that the search is exact without, only slower; csrc/layout.cpp says what each is."""

    LOWEST = 1 << 0
    PAIR = 1 << 1
    GAP = 1 << 2
    PARTS = 1 << 3
    FAILURES = 1 << 4


ALL_RULES = ~Rules(0)
