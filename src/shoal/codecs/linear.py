"""linear: 128 evenly spaced magnitudes, i / 127 of the scale.

Also known as linear quantization (Vanhoucke et al. 2011) and symmetric int8. Dettmers 2016, section 3.1: a bisection
tree of seven bits over [0, 1]. The largest value of a block is exact; an error is at most 1 / 254 of it, which is much
for small values.
"""

from __future__ import annotations

from fractions import Fraction

from shoal.codecs.table import table_of

LINEAR = table_of("linear", (Fraction(i, 127) for i in range(128)))
