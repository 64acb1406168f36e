"""mantissa: three bits for the exponent 10**-e, four for a whole number m from 0 to 15; the value is m * 10**-e.

Dettmers 2016, section 3.1, where it is the type that the trees improve on: 0.2345678 becomes 0.2. Read literally it
spends fourteen codes twice: m = 0 is zero at every exponent, and 10 * 10**-e is 1 * 10**-(e - 1). Here those fourteen
hold one decade more, so that every code is reached: m * 10**-8 for m = 1 ... 9 and the five between 10 and 16 that are
missing there, 11 ... 15 * 10**-8.

The scale stands for the largest value, 15.
"""

from __future__ import annotations

from fractions import Fraction

from shoal.codecs.table import table_of

LARGEST = 15
_EXPONENTS = 9  # 0 ... 7, and 8 for the codes that are left over

MANTISSA = table_of(
    "mantissa",
    {Fraction(m, LARGEST * 10**exponent) for exponent in range(_EXPONENTS) for m in range(LARGEST + 1)},
)
