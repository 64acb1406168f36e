"""static_tree: three bits for the exponent 10**-e, four for a bisection tree over [0.1, 1].

Dettmers 2016, section 3.1 (the "static" tree of its table 1). As in the paper's own dynamic tree a decade is halved at
0.45: eight of its values lie evenly on [0.1, 0.45], eight on [0.45, 1]. A value is where its interval *starts*: so the
paper's example comes out, 0.2345678 becomes 0.23125. The smallest of the 128, 0.1 * 10**-7, is zero instead.

Not yet good: the greatest value is 0.93125 of the scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from shoal.codecs.table import table_of

_EXPONENTS = 8
_STARTS = [
    *(Fraction(10, 100) + Fraction(35, 100) * Fraction(leaf, 8) for leaf in range(8)),
    *(Fraction(45, 100) + Fraction(55, 100) * Fraction(leaf, 8) for leaf in range(8)),
]


def _magnitudes() -> Iterator[Fraction]:
    values = sorted(start / 10**exponent for exponent in range(_EXPONENTS) for start in _STARTS)
    yield Fraction(0)
    yield from values[1:]


STATIC_TREE = table_of("static_tree", _magnitudes())
