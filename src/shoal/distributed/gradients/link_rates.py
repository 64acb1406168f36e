"""The measured cost of exchanges between ranks and of encoding: seconds over sizes, as plain data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import InputError


@dataclass(frozen=True)
class Curve:
    """Seconds over a size, in straight lines between the measured ones.

    Constant below the smallest size, proportional to the size above the largest.

    Attributes:
        sizes: ascending.
        seconds: of each, never descending.

    Raises:
        InputError: it is not so.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        never_less = all(a <= b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        if (
            not self.sizes
            or len(self.sizes) != len(self.seconds)
            or self.sizes[0] < 1
            or not (ascending and never_less)
        ):
            raise InputError(
                f"got seconds {self.seconds} of sizes {self.sizes}, expected as many of each, sizes ascending from 1, "
                "and seconds never descending; make it with Curve.of"
            )
        if not (self.seconds[0] >= 0 and self.seconds[-1] < float("inf")):
            raise InputError(f"got seconds {self.seconds}, expected finite ones of 0 or more; measure again")

    @staticmethod
    def of(points: Iterable[tuple[int, float]]) -> Curve:
        """Of measured (size, seconds).

        What disturbs a measurement only adds time: none takes longer than a larger one did.

        >>> Curve.of([(1024, 2e-3), (4096, 1e-3), (65536, 5e-3)]).seconds
        (0.001, 0.001, 0.005)
        """
        ordered = sorted(points)
        lowest: list[float] = []
        for _, seconds in reversed(ordered):
            lowest.append(min([seconds, *lowest[-1:]]))
        return Curve(tuple(size for size, _ in ordered), tuple(reversed(lowest)))

    def at(self, size: float) -> float:
        """Seconds of this size; 0 has none.

        >>> curve = Curve((1000, 2000), (1.0, 3.0))
        >>> curve.at(0), curve.at(10), curve.at(1500), curve.at(4000)
        (0.0, 1.0, 2.0, 6.0)
        """
        if size <= 0:
            return 0.0
        right = bisect_right(self.sizes, size)
        if right == 0:
            return self.seconds[0]
        if right == len(self.sizes):
            return self.seconds[-1] * (size / self.sizes[-1])
        (left_size, right_size), (left, end) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return min(end, left + (end - left) * ((size - left_size) / (right_size - left_size)))


@dataclass(frozen=True)
class LinkRates:
    """What collectives between the ranks of one group cost, the slowest rank's seconds.

    Attributes:
        ranks: that take part.
        plain: the collective that compression would replace (all-reduce, reduce-scatter) over bytes of float32 values.
        exchange: one round of `Exchange` over the bytes that each rank sends to all others together.
    """

    ranks: int
    plain: Curve
    exchange: Curve


@dataclass(frozen=True)
class CodecRates:
    """What one codec costs on this machine, the slowest rank's seconds while all ranks are busy with the same.

    Attributes:
        codec: its name.
        bytes_per_elem: of its payloads, scales included.
        encode: over float32 values.
        decode: over float32 values, adding them to a sum included.
    """

    codec: str
    bytes_per_elem: float
    encode: Curve
    decode: Curve
