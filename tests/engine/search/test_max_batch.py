"""The largest batch that fits, held against trying every one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.search.max_batch import MAX_IMAGES, largest_fitting
from shoal.errors import BudgetError, CaptureError


class Line:
    """What fits is a line: that many bytes, and that many for each image."""

    def __init__(self, fixed: int, each: int, budget: int, misleads: int = 1) -> None:
        self.fixed, self.each, self.budget, self.misleads = fixed, each, budget, misleads
        self.asked: list[int] = []

    def bytes_of(self, batch: int) -> int:
        return self.fixed + self.each * batch

    def __call__(self, batch: int) -> int:
        self.asked.append(batch)
        if self.bytes_of(batch) > self.budget:
            raise BudgetError(f"{batch} do not fit", least_feasible_bytes=self.bytes_of(batch) ** self.misleads)
        return self.bytes_of(batch) if self.misleads == 1 else self.budget


def largest(line: Line, first: int, max_batch: int = MAX_IMAGES) -> tuple[int, int]:
    return largest_fitting(line, line.fixed, line.budget, first=first, max_batch=max_batch)


@given(st.integers(0, 10**6), st.integers(1, 1000), st.integers(1, 190), st.integers(1, 300), st.integers(1, 3))
def test_up_to_200_images_the_next_one_does_not_fit(
    fixed: int, each: int, batch: int, first: int, misleads: int
) -> None:
    line = Line(fixed, each, fixed + each * batch + each // 2, misleads)
    assert largest(line, first) == (batch, batch + 1)
    assert len(line.asked) == len(set(line.asked)) <= 40


@given(st.integers(0, 10**6), st.integers(1, 1000), st.integers(200, 20_000), st.integers(1, 300))
def test_above_200_images_one_per_cent_more_does_not_fit(fixed: int, each: int, batch: int, first: int) -> None:
    found, too_many = largest(Line(fixed, each, fixed + each * batch), first)
    assert found <= batch < too_many <= 1.01 * found


def test_it_takes_few_tries() -> None:
    line = Line(1000, 10, 51_000)
    assert largest(line, 64)[0] in range(4950, 5001)
    assert len(line.asked) <= 11  # 64, 128, ... 8192 are eight of them


def test_where_every_batch_fits_it_stops_at_the_most() -> None:
    assert largest(Line(0, 1, 2**60), 16) == (MAX_IMAGES, 0)
    assert largest(Line(0, 1, 2**60), 16, max_batch=24) == (24, 0)
    assert largest(Line(0, 1, 2**60), 16, max_batch=3) == (3, 0)


def test_where_not_even_one_fits_the_smallest_is_told() -> None:
    line = Line(100, 10, 50)
    with pytest.raises(BudgetError) as refused:
        largest(line, 8)
    assert refused.value.least_feasible_bytes == 110 and refused.value.details["batch"] == 1 and line.asked[-1] == 1


@pytest.mark.parametrize(("first", "error"), [(8, BudgetError), (1, CaptureError)])
def test_a_batch_too_small_for_the_network_ends_the_search(first: int, error: type[Exception]) -> None:
    line = Line(100, 10, 50)

    def peak_of(batch: int) -> int:
        if batch < 2:
            raise CaptureError("too few for a batch norm")
        return line(batch)

    with pytest.raises(error):
        largest_fitting(peak_of, 100, 50, first=first)


def test_a_larger_batch_that_the_network_cannot_take_is_too_many() -> None:
    asked: list[int] = []

    def peak_of(batch: int) -> int:
        asked.append(batch)
        if batch > 4021:
            raise CaptureError("has positions for no more")
        return batch

    found, too_many = largest_fitting(peak_of, 0, 10**6, first=16)
    assert found <= 4021 < too_many <= 1.01 * found and len(asked) <= 20
