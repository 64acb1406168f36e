"""Who holds which part of a dimension, and who reads it: pure arithmetic on intervals.

A *share* is (start, stop) of one rank along a dimension. A *piece* is what one rank holds and the same ranks read: it
is encoded once, and every reader decodes the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.errors import InputError

Share = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """Part of what a rank holds.

    Attributes:
        owner: the rank that holds it.
        start, stop: along the dimension.
        readers: the ranks that read it, in order; the owner too where it does.
    """

    owner: int
    start: int
    stop: int
    readers: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def travels(self) -> bool:
        """Whether any rank but the owner reads it."""
        return any(reader != self.owner for reader in self.readers)


def shares(length: int, ranks: int) -> tuple[Share, ...]:
    """Contiguous shares of a dimension, as `torch.chunk` and DTensor's `Shard` cut it; the last may be short or empty.

    >>> shares(10, 4), shares(2, 3)
    (((0, 3), (3, 6), (6, 9), (9, 10)), ((0, 1), (1, 2), (2, 2)))
    """
    step = -(-length // ranks)
    return tuple((min(rank * step, length), min((rank + 1) * step, length)) for rank in range(ranks))


def in_order(lengths: Sequence[int]) -> tuple[Share, ...]:
    """Shares of these lengths, one after the other.

    >>> in_order([2, 0, 3])
    ((0, 2), (2, 2), (2, 5))
    """
    found, start = [], 0
    for length in lengths:
        found.append((start, start + length))
        start += length
    return tuple(found)


def everything(have: Sequence[Share]) -> tuple[Share, ...]:
    """What each rank needs where all need all of it.

    >>> everything([(0, 3), (3, 5)])
    ((0, 5), (0, 5))
    """
    return ((0, have[-1][1]),) * len(have)


def pieces(have: Sequence[Share], need: Sequence[Share]) -> tuple[Piece, ...]:
    """The pieces that bring each rank what it needs, by place along the dimension.

    Args:
        have: each rank's share; together the whole dimension, in order, without overlap.
        need: the interval that each rank reads; they may overlap, and leave parts unread.

    Raises:
        InputError: `have` has gaps or overlaps, or `need` leaves the dimension.

    Two ranks with a row of each other's edge:

        >>> for piece in pieces([(0, 4), (4, 8)], [(0, 5), (3, 8)]):
        ...     print(piece.owner, (piece.start, piece.stop), piece.readers)
        0 (0, 3) (0,)
        0 (3, 4) (0, 1)
        1 (4, 5) (0, 1)
        1 (5, 8) (1,)
    """
    length = have[-1][1]
    if in_order([stop - start for start, stop in have]) != tuple(have):
        raise InputError(f"got shares {list(have)}, expected them in order from 0 without gaps; see shares()")
    for start, stop in need:
        if not 0 <= start <= stop <= length:
            raise InputError(f"got a need of {(start, stop)}, expected a part of 0 to {length}")
    cuts = sorted({edge for share in need for edge in share})
    found = []
    for owner, (first, last) in enumerate(have):
        edges = [first, *(cut for cut in cuts if first < cut < last), last]
        for start, stop in pairwise(edges):
            readers = tuple(rank for rank, (low, high) in enumerate(need) if low <= start and stop <= high)
            if start < stop and readers:
                found.append(Piece(owner, start, stop, readers))
    return tuple(found)
