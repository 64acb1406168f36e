"""Places for blocks around others that lie where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Spans = Sequence[tuple[int, int]]  # in use at every time t with a <= t < b, of each


def fit_around(fixed: Iterable[tuple[int, int, Spans]], wanted: Sequence[tuple[int, Spans]]) -> list[int]:
    """The lowest place for each block, one after the other, that shares no byte with another while both are in use.

    Args:
        fixed: where each of the others begins and ends, and when it is in use.
        wanted: the size of each block, and when it is in use; the first is placed first.

    >>> fit_around([(0, 4, [(0, 9)]), (6, 9, [(0, 3)])], [(5, [(2, 4)]), (3, [(5, 6)]), (2, [(0, 9)])])
    [9, 4, 14]
    """
    rows = sorted((begin, end, since, until) for begin, end, spans in fixed for since, until in spans)
    n_all = len(rows) + sum(len(spans) for _, spans in wanted)
    placed = np.empty((4, n_all), np.int64)  # begins, ends, since, until; by begin
    count = len(rows)
    placed[:, :count] = np.array(rows, np.int64).reshape(-1, 4).T
    places = []
    for size, spans in wanted:
        begins, ends, since, until = placed[:, :count]
        meets = np.zeros(count, bool)
        for start, stop in spans:
            meets |= (since < stop) & (until > start)
        tops = np.maximum.accumulate(np.concatenate(([0], ends[meets])))
        gaps = begins[meets] - tops[:-1] >= size
        place = int(tops[np.argmax(gaps)] if gaps.any() else tops[-1])
        places.append(place)
        at = int(np.searchsorted(begins, place))
        n_new = len(spans)
        placed[:, at + n_new : count + n_new] = placed[:, at:count].copy()
        for column, (start, stop) in enumerate(spans, at):
            placed[:, column] = place, place + size, start, stop
        count += n_new
    return places
