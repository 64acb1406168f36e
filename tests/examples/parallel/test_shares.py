"""Shares are those of DTensor, and pieces bring every rank exactly what it needs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.parallel.shares import everything, in_order, pieces, shares
from shoal.errors import InputError

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@given(st.integers(0, 100), st.integers(1, 9))
def test_shares_are_those_that_torch_chunk_cuts(length: int, ranks: int) -> None:
    found = [stop - start for start, stop in shares(length, ranks)]

    chunks = [len(chunk) for chunk in torch.arange(length).chunk(ranks)] if length else []
    assert found == chunks + [0] * (ranks - len(chunks))
    assert in_order(found) == shares(length, ranks)


@given(LENGTHS, st.data())
def test_every_rank_can_put_what_it_needs_together(lengths: list[int], data: st.DataObject) -> None:
    have = in_order(lengths)
    ends = st.integers(0, have[-1][1])
    need = [tuple(sorted((data.draw(ends), data.draw(ends)))) for _ in have]

    found = pieces(have, need)

    for rank, (start, stop) in enumerate(need):
        read = [place for piece in found if rank in piece.readers for place in range(piece.start, piece.stop)]
        assert read == list(range(start, stop))
    for piece in found:
        assert have[piece.owner][0] <= piece.start < piece.stop <= have[piece.owner][1]
        assert piece.travels == (set(piece.readers) != {piece.owner})


@given(LENGTHS)
def test_what_all_need_is_one_piece_of_each_rank(lengths: list[int]) -> None:
    have = in_order(lengths)

    found = pieces(have, everything(have))

    assert [(piece.owner, piece.start, piece.stop) for piece in found] == [
        (rank, *share) for rank, share in enumerate(have) if share[0] < share[1]
    ]


@pytest.mark.parametrize("have", [[(1, 2)], [(0, 2), (3, 4)], [(0, 2), (1, 4)]])
def test_shares_with_gaps_or_overlaps_are_refused(have: list[tuple[int, int]]) -> None:
    with pytest.raises(InputError):
        pieces(have, [(0, 1)] * len(have))


def test_a_need_outside_is_refused() -> None:
    with pytest.raises(InputError):
        pieces([(0, 4)], [(2, 5)])
