"""dynamic_tree: as many leading zeros as tenths, a flag bit, and what is left of seven bits as a bisection tree.

Dettmers 2016, section 3.1. Seven bits `0...01tt...t`: n zeros are the exponent 10**-n, the one ends them, and the 6 - n
bits t lead through a tree over [0.1, 1]; seven zeros are zero. So the decade below the scale has 64 values, the next
32, and so on: large values are told apart well and small ones down to a millionth are not lost.

- `DYNAMIC_TREE` is the table of the paper: its authors halve each decade at 0.45 (half of its *length*, not its
  middle), so half of the values lie evenly on [0.1, 0.45] and half on [0.45, 1], each in the middle of its interval.
  The paper's examples come out: 0.2345678 becomes 0.236719 and 0.0000234 becomes 0.000019.
- `DYNAMIC_TREE_EVEN` halves each decade at 0.55: all of its values lie evenly, as in bitsandbytes' map (Dettmers et al.
  2021), but that one has 1.0 for our -0.0.

Not yet good: 1 itself is no value, so the greatest of a block comes back 0.9 % (even: 0.7 %) too small.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from shoal.codecs.table import table_of

_DECADES = 7


def _middles(low: Fraction, high: Fraction, parts: int) -> Iterator[Fraction]:
    return (low + (high - low) * Fraction(2 * part + 1, 2 * parts) for part in range(parts))


def _magnitudes(halved_at: Fraction) -> Iterator[Fraction]:
    low, high = Fraction(1, 10), Fraction(1)
    yield Fraction(0)
    for zeros in range(_DECADES):
        exponent = Fraction(1, 10**zeros)
        leaves = 2 ** (_DECADES - 1 - zeros)
        if leaves == 1:  # no bit is left to halve by
            yield exponent * (low + high) / 2
            continue
        for value in (*_middles(low, halved_at, leaves // 2), *_middles(halved_at, high, leaves // 2)):
            yield exponent * value


DYNAMIC_TREE = table_of("dynamic_tree", _magnitudes(Fraction(45, 100)))
DYNAMIC_TREE_EVEN = table_of("dynamic_tree_even", _magnitudes(Fraction(55, 100)))
