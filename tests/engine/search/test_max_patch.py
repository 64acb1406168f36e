"""The largest patch that fits, against every patch that could, and what a network's strides divide."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.search.max_patch import Patch, check_divides, ladder, largest_patch, multiples
from shoal.errors import BudgetError, CaptureError, InputError
from tests.raising import raising

STEPS = st.sampled_from((1, 2, 4, 8, 16, 32))


@given(st.tuples(STEPS, STEPS, STEPS), st.tuples(*[st.integers(1, 6)] * 3))
def test_what_the_strides_divide_is_found_by_trying(multiple: Patch, times: Patch) -> None:
    def why_not(patch: Patch) -> str:
        return "" if all(side % step == 0 for side, step in zip(patch, multiple, strict=True)) else "uneven"

    assert multiples(why_not, tuple(n * step for n, step in zip(times, multiple, strict=True))) == multiple
    assert multiples(why_not, (7, 11, 13)) == multiple  # which it does not take: others are tried


def test_a_network_that_takes_no_patch_is_told_with_its_own_reason() -> None:
    with raising(InputError, "10x10", "never", "multiple_of="):
        multiples(lambda patch: "never", (10, 10))


@pytest.mark.parametrize(
    ("patch", "would_do"), [((100, 128), "96x128 or 128x128"), ((5, 64), "32x64"), ((40, 64), "32x64 or 64x64")]
)
def test_a_patch_that_the_strides_do_not_divide_is_told_what_would_do(patch: Patch, would_do: str) -> None:
    with raising(InputError, "32x32", would_do):
        check_divides(patch, (32, 32))
    with raising(InputError, "multiple_of=", "32x32"):
        check_divides(patch, (32, 32), asked=True)


@given(
    st.tuples(*[st.integers(1, 5)] * 3),
    st.tuples(STEPS, STEPS, STEPS),
    st.none() | st.tuples(*[st.integers(5, 9)] * 3),
)
def test_a_ladder_goes_from_the_smallest_patch_to_the_largest_by_one_side_at_a_time(
    times: Patch, multiple: Patch, limits: Patch | None
) -> None:
    patch = tuple(n * step for n, step in zip(times, multiple, strict=True))
    most = limits and tuple(n * step + step - 1 for n, step in zip(limits, multiple, strict=True))
    steps = ladder(patch, multiple, most, 40 * prod(patch))
    assert steps[0] == multiple and patch in steps
    for smaller, larger in pairwise(steps):
        grown = [b - a for a, b in zip(smaller, larger, strict=True)]
        assert sorted(grown)[:2] == [0, 0] and max(grown) == multiple[grown.index(max(grown))]
    assert all(prod(one) <= 40 * prod(patch) for one in steps)
    if limits is not None and most is not None and prod(most) <= 40 * prod(patch):
        assert steps[-1] == tuple(n * step for n, step in zip(limits, multiple, strict=True))


@given(
    st.tuples(*[st.integers(1, 4)] * 3),
    st.tuples(*[st.sampled_from((4, 8, 16))] * 3),
    st.integers(1, 10**6),
    st.booleans(),
)
def test_no_side_of_the_answer_can_grow(times: Patch, multiple: Patch, budget: int, tells_least: bool) -> None:
    patch = tuple(n * step for n, step in zip(times, multiple, strict=True))

    def needed(one: Patch) -> int:
        return 1000 + prod(one)

    def plan_of(one: Patch) -> None:
        if needed(one) > budget:
            raise BudgetError("too small", least_feasible_bytes=needed(one) if tells_least else None)

    steps = ladder(patch, multiple, None, 8 * max(budget, prod(patch)))
    tried: list[Patch] = []
    how = {"fixed_bytes": 1000, "budget_bytes": budget, "trying": tried.append}
    if needed(multiple) > budget:
        with raising(BudgetError, "x".join(map(str, multiple))):
            largest_patch(plan_of, steps, patch, multiple, None, **how)
        return
    found = largest_patch(plan_of, steps, patch, multiple, None, **how)
    assert needed(found.patch) <= budget
    assert tried[0] == patch and len(tried) < 40
    for axis in range(3):
        larger = tuple(side + (axis == n) * multiple[n] for n, side in enumerate(found.patch))
        assert needed(larger) > budget or prod(larger) <= 1.01 * prod(found.patch)
    if found.too_large is not None:
        assert needed(found.too_large) > budget and found.too_large in tried


def test_a_patch_that_cannot_be_captured_ends_the_search_and_alone_is_what_is_raised() -> None:
    def plan_of(one: Patch) -> None:
        if one[0] > 16:
            raise CaptureError("no such size")

    how = {"fixed_bytes": 0, "budget_bytes": 10**6}
    steps = ladder((16, 16), (16, 16), None, 10**4)
    assert largest_patch(plan_of, steps, (16, 16), (16, 16), None, **how).patch[0] == 16
    with pytest.raises(CaptureError):
        largest_patch(plan_of, steps, (32, 32), (16, 16), None, **how)
