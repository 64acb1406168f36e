"""Sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.sizes import HOST_PAGE_BYTES, format_bytes, in_pages, parse_bytes
from shoal.errors import InputError
from tests.engine.compile.wrong_values import WRONG, is_readable
from tests.raising import raising

UNITS = {"": 1, "B": 1} | {
    f"{letter}{infix}B": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("KMGT", 1)
}


@given(st.integers(1, 1 << 50))
def test_a_number_of_bytes_is_itself_as_an_int_and_as_a_text(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == count


@given(
    st.integers(1, 9999),
    st.integers(0, 3),
    st.sampled_from(list(UNITS)),
    st.sampled_from(["", " ", "  "]),
    st.sampled_from([str.upper, str.lower, str]),
)
def test_a_text_is_its_number_times_its_unit_however_it_is_spelt(
    digits: int, decimals: int, unit: str, space: str, spelt: Any
) -> None:
    number = Fraction(digits, 10**decimals)
    expected = number * UNITS[unit]
    text = f"{space}{float(number):.{decimals}f}{space}{spelt(unit)}{space}"
    if expected > Fraction(1, 2):
        assert abs(parse_bytes(text) - expected) <= Fraction(1, 2)
    else:
        with pytest.raises(InputError):
            parse_bytes(text)


@pytest.mark.parametrize(
    "size",
    ["", "GiB", "-1GiB", "1 GiBs", "1e9", "1,5GB", "2 2GB", "1kb/s", "nan", "inf", "0", "0.0GiB", "1 Gi B", 0, -5],
)
def test_what_is_no_size_is_refused_with_an_example_of_one(size: int | str) -> None:
    with raising(InputError, "limit=", "'150MiB'"):
        parse_bytes(size, "limit")


@pytest.mark.parametrize("size", ["9" * 400 + "GiB", "8589934592 GiB", 2**63, 10**400])
def test_more_bytes_than_there_can_be_are_refused(size: int | str) -> None:
    with pytest.raises(InputError) as caught:
        parse_bytes(size)
    assert is_readable(caught.value)


def test_whatever_is_given_is_a_number_of_bytes_or_refused_in_one_line() -> None:
    for size in (*WRONG, "9" * 5000):
        try:
            assert 0 < parse_bytes(size) < 2**63
        except InputError as error:
            assert is_readable(error)


def test_a_numpy_integer_is_an_int() -> None:
    assert parse_bytes(np.int64(4096)) == 4096  # type: ignore[arg-type]
    assert type(parse_bytes(np.uint8(7))) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [True, 1.5, None, [1], b"1GB"])
def test_what_is_neither_int_nor_text_is_refused_by_its_type(size: Any) -> None:
    with raising(InputError, type(size).__name__):
        parse_bytes(size)


@given(st.integers(0, 1 << 55))
def test_what_is_written_for_people_reads_back_within_its_last_digit(count: int) -> None:
    text = format_bytes(count)
    number, unit = text.split(" ")
    assert re.fullmatch(r"\d\.\d{3}|\d\d\.\d\d|\d{3,}\.\d", number) or unit == "B"
    last_digit = 0 if unit == "B" else UNITS[unit] / 10 ** len(number.partition(".")[2])
    assert abs(float(number) * UNITS[unit] - count) <= last_digit / 2 + count * 1e-15
    assert format_bytes(-count) == (f"-{text}" if count else text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.000 KiB"), (1.5 * 2**30, "1.500 GiB"), (2**50, "1024.0 TiB")],
)
def test_units_change_at_powers_of_1024(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 10**12))
def test_bytes_in_pages_are_the_next_whole_page(nbytes: int) -> None:
    assert in_pages(nbytes) % HOST_PAGE_BYTES == 0
    assert 0 <= in_pages(nbytes) - nbytes < HOST_PAGE_BYTES
