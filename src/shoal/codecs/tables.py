"""The 8-bit data types: the 128 magnitudes that the seven bits other than the sign stand for, and the thresholds
between.

Dettmers 2016, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import torch

MAGNITUDES = 128
SIGN = 0x80
MANTISSA_LARGEST = 15


@dataclass(frozen=True, eq=False)
class Table:
    """The values of an 8-bit type, on a scale where the largest is at most 1; code = sign bit | index.

    Attributes:
        name: of the data type.
        magnitudes: (128,) float32 on the CPU, strictly ascending from 0.
        thresholds: (127,) float32 on the CPU: `thresholds[i]` is the float32 nearest to the middle of magnitudes i and
            i + 1. A value on a threshold belongs to the magnitude above.
    """

    name: str
    magnitudes: torch.Tensor = field(repr=False)
    thresholds: torch.Tensor = field(repr=False)

    def values(self) -> torch.Tensor:
        """What each code stands for on a scale of 1, (256,) float32; code 128 is -0.0."""
        return torch.cat([self.magnitudes, -self.magnitudes])


def table_of(name: str, magnitudes: Iterable[Fraction]) -> Table:
    """The table of these exact values in any order, each rounded once to float32.

    >>> table_of("linear", (Fraction(i, 127) for i in range(128))).thresholds[:2].tolist()
    [0.003937007859349251, 0.011811023578047752]
    """
    exact = sorted(magnitudes)
    rounded = torch.tensor([float(value) for value in exact], dtype=torch.float64).float()
    if len(rounded) != MAGNITUDES or rounded[0] != 0 or rounded[-1] > 1 or not bool((rounded.diff() > 0).all()):
        raise ValueError(f"{name}: a table has {MAGNITUDES} magnitudes that ascend from 0 to at most 1")
    # The sum of two neighbours is exact in float64, so each threshold is rounded once.
    middles = (rounded[1:].double() + rounded[:-1].double()) / 2
    return Table(name, rounded, middles.float())


def _linear() -> Table:
    """128 evenly spaced magnitudes, i / 127 of the scale.

    Also known as linear quantization (Vanhoucke et al. 2011) and symmetric int8; in the paper a bisection tree of seven
    bits over [0, 1]. The largest value of a block is exact; an error is at most 1 / 254 of it, which is much for small
    values.
    """
    return table_of("linear", (Fraction(i, 127) for i in range(MAGNITUDES)))


def _mantissa() -> Table:
    """Three bits for the exponent 10**-e, four for a whole number m from 0 to 15; the value is m * 10**-e.

    In the paper the type that the trees improve on: 0.2345678 becomes 0.2. Read literally it spends fourteen codes
    twice: m = 0 is zero at every exponent, and 10 * 10**-e is 1 * 10**-(e - 1). Here those fourteen hold one decade
    more, so that every code is reached: m * 10**-8 for m = 1 ... 9 and the five between 10 and 16 that are missing
    there, 11 ... 15 * 10**-8. The scale stands for the largest value, 15.
    """
    exponents = range(9)  # 0 ... 7, and 8 for the codes that are left over
    numbers = range(MANTISSA_LARGEST + 1)
    return table_of("mantissa", {Fraction(m, MANTISSA_LARGEST * 10**e) for e in exponents for m in numbers})


def _static_tree() -> Table:
    """Three bits for the exponent 10**-e, four for a bisection tree over [0.1, 1].

    The "static" tree of the paper's table 1. As in the paper's own dynamic tree a decade is halved at 0.45: eight of
    its values lie evenly on [0.1, 0.45], eight on [0.45, 1]. A value is where its interval *starts*: so the paper's
    example comes out, 0.2345678 becomes 0.23125. The smallest of the 128, 0.1 * 10**-7, is zero instead.

    Not yet good: the greatest value is 0.93125 of the scale.
    """
    starts = [
        *(Fraction(10, 100) + Fraction(35, 100) * Fraction(leaf, 8) for leaf in range(8)),
        *(Fraction(45, 100) + Fraction(55, 100) * Fraction(leaf, 8) for leaf in range(8)),
    ]
    values = sorted(start / 10**exponent for exponent in range(8) for start in starts)
    return table_of("static_tree", [Fraction(0), *values[1:]])


def _dynamic_tree(name: str, halved_at: Fraction) -> Table:
    """As many leading zeros as tenths, a flag bit, and what is left of seven bits as a bisection tree.

    Seven bits `0...01tt...t`: n zeros are the exponent 10**-n, the one ends them, and the 6 - n bits t lead through a
    tree over [0.1, 1]; seven zeros are zero. So the decade below the scale has 64 values, the next 32, and so on: large
    values are resolved well and small ones down to a millionth are not lost.

    - `DYNAMIC_TREE` is the table of the paper: its authors halve each decade at 0.45 (half of its *length*, not its
      middle), so half of the values lie evenly on [0.1, 0.45] and half on [0.45, 1], each in the middle of its
      interval. The paper's examples come out: 0.2345678 becomes 0.236719 and 0.0000234 becomes 0.000019.
    - `DYNAMIC_TREE_EVEN` halves each decade at 0.55: all of its values lie evenly, as in bitsandbytes' map (Dettmers et
      al. 2021), but that one has 1.0 for our -0.0.

    Known limits: 1 itself is not a value, so the greatest of a block decodes 0.9 % (even: 0.7 %) too small.
    """
    return table_of(name, _dynamic_magnitudes(halved_at))


def _dynamic_magnitudes(halved_at: Fraction) -> Iterator[Fraction]:
    low, high, decades = Fraction(1, 10), Fraction(1), 7
    yield Fraction(0)
    for zeros in range(decades):
        exponent = Fraction(1, 10**zeros)
        leaves = 2 ** (decades - 1 - zeros)
        if leaves == 1:  # no bit is left to halve by
            yield exponent * (low + high) / 2
            continue
        for value in (*_middles(low, halved_at, leaves // 2), *_middles(halved_at, high, leaves // 2)):
            yield exponent * value


def _middles(low: Fraction, high: Fraction, parts: int) -> Iterator[Fraction]:
    return (low + (high - low) * Fraction(2 * part + 1, 2 * parts) for part in range(parts))


LINEAR = _linear()
MANTISSA = _mantissa()
STATIC_TREE = _static_tree()
DYNAMIC_TREE = _dynamic_tree("dynamic_tree", Fraction(45, 100))
DYNAMIC_TREE_EVEN = _dynamic_tree("dynamic_tree_even", Fraction(55, 100))
