"""Seconds over sizes: between, below and above what was measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.distributed.gradients.link_rates import Curve
from shoal.errors import InputError
from tests.distributed.rates import curves

sizes = st.floats(0, 1e12)


@given(curves, sizes, sizes)
def test_more_never_takes_less(curve: Curve, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert curve.at(small) <= curve.at(large)


@given(curves)
def test_it_goes_through_what_was_measured(curve: Curve) -> None:
    assert [curve.at(size) for size in curve.sizes] == pytest.approx(list(curve.seconds))


@given(curves, st.floats(1, 1e3))
def test_twice_the_largest_takes_twice_as_long(curve: Curve, times: float) -> None:
    assert curve.at(times * curve.sizes[-1]) == pytest.approx(times * curve.seconds[-1])


@given(st.dictionaries(st.integers(1, 10**9), st.floats(0, 10), min_size=1, max_size=6))
def test_a_disturbed_measurement_is_cut_to_what_a_larger_one_took(points: dict[int, float]) -> None:
    curve = Curve.of(points.items())
    assert curve.sizes == tuple(sorted(points))
    for size, seconds in zip(curve.sizes, curve.seconds, strict=True):
        assert seconds == min(took for other, took in points.items() if other >= size)


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        ((), ()),
        ((1,), (1.0, 2.0)),
        ((0,), (1.0,)),
        ((2, 1), (1.0, 2.0)),
        ((1, 2), (2.0, 1.0)),
        ((1,), (-1.0,)),
        ((1,), (math.inf,)),
        ((1,), (math.nan,)),
    ],
)
def test_what_is_no_curve_is_refused(measured: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(InputError):
        Curve(measured, seconds)
