"""Blocks are placed around others: held against a look at each byte at each time."""

from __future__ import annotations

from random import Random

import pytest

from shoal.memory.layout.around import fit_around

Block = tuple[int, int, list[tuple[int, int]]]


def lowest(blocks: list[Block], size: int, spans: list[tuple[int, int]]) -> int:
    """The lowest place at which no byte is another's at any time of the spans, by trying each."""
    for place in range(1000):
        taken = any(
            place < end and begin < place + size and any(a < d and c < b for a, b in spans for c, d in theirs)
            for begin, end, theirs in blocks
        )
        if not taken:
            return place
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_each_block_lies_at_the_lowest_place_that_is_free(seed: int) -> None:
    random = Random(seed)

    def spans() -> list[tuple[int, int]]:
        first = random.randrange(20)
        second = random.randrange(first + 2, 30)
        return [(first, first + 1), (second, second + 4)] if random.random() < 0.3 else [(first, second)]

    fixed: list[Block] = []
    for _ in range(4):
        begin = random.randrange(40)
        fixed.append((begin, begin + random.randrange(1, 9), spans()))
    wanted = [(random.randrange(1, 12), spans()) for _ in range(15)]
    blocks = list(fixed)
    for (size, when), place in zip(wanted, fit_around(fixed, wanted), strict=True):
        assert place == lowest(blocks, size, when)
        blocks.append((place, place + size, when))


def test_without_others_the_first_lies_at_the_start() -> None:
    assert fit_around([], [(5, [(0, 1)]), (3, [(1, 2)]), (2, [(0, 2)])]) == [0, 0, 5]
    assert fit_around([(0, 1, [(0, 1)])], []) == []
