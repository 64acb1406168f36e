"""A tensor's blocks, of which each has a scale, and pieces of bounded size, so that scratch does not grow with it."""

from __future__ import annotations

from collections.abc import Iterator

PIECE_ELEMS = 1 << 16


def blocks_of(elems: int, block_elems: int | None) -> int:
    """How many blocks, the last one perhaps short; None is one for the whole.

    >>> blocks_of(10_000, 4096), blocks_of(10_000, None), blocks_of(0, None)
    (3, 1, 0)
    """
    return -(-elems // (block_elems or max(elems, 1)))


def pieces(elems: int, block_elems: int | None) -> Iterator[tuple[slice, slice, int]]:
    """Elements, their blocks, and how many elements of each: some whole blocks, or a part of one.

    `x[elements].view(-1, columns)` has a row for each of `scales[blocks]`.

    >>> [(p.start, p.stop, b.start, b.stop, columns) for p, b, columns in pieces(100_000, 40_000)]
    [(0, 40000, 0, 1, 40000), (40000, 80000, 1, 2, 40000), (80000, 100000, 2, 3, 20000)]
    """
    block = block_elems or max(elems, 1)
    whole = elems // block * block
    step = max(PIECE_ELEMS // block, 1) * block
    for first in range(0, whole, step):
        last = min(first + step, whole)
        yield from _parts(first, last, block)
    if whole < elems:
        yield from _parts(whole, elems, block)


def _parts(first: int, last: int, block: int) -> Iterator[tuple[slice, slice, int]]:
    blocks = slice(first // block, -(-last // block))
    if last - first <= PIECE_ELEMS:
        yield slice(first, last), blocks, min(block, last - first)
        return
    for begin in range(first, last, PIECE_ELEMS):
        end = min(begin + PIECE_ELEMS, last)
        yield slice(begin, end), blocks, end - begin
