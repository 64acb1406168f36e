"""The 8-bit data types are the paper's: their values, and where one gives way to the next."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from shoal import codecs
from shoal.codecs.tables import Table, table_of

TYPES = ("dynamic_tree", "dynamic_tree_even", "static_tree", "mantissa", "linear")


def table(name: str) -> Table:
    return codecs.get(name).table()


@pytest.mark.parametrize(
    ("name", "options", "x", "comes_back"),
    [
        ("dynamic_tree", {"scale": 1.0}, 0.2345678, 0.236719),
        ("dynamic_tree", {"scale": 1.0}, 0.0000234, 0.000019),
        ("dynamic_tree_even", {"scale": 1.0}, 0.2345678, 0.233594),
        ("dynamic_tree_even", {"scale": 1.0}, 0.0000234, 0.00002125),
        ("static_tree", {"exponent_offset": 0}, 0.2345678, 0.23125),
        ("mantissa", {"exponent_offset": 0}, 0.2345678, 0.2),
        ("static_tree", {"exponent_offset": 2}, 23.45678, 23.125),
        ("mantissa", {"exponent_offset": 1}, 2.345678, 2.0),
        ("mantissa", {"exponent_offset": 1}, 149.0, 150.0),
    ],
)
def test_the_examples_of_the_paper_come_out(name: str, options: dict, x: float, comes_back: float) -> None:
    digits = len(f"{comes_back:.8f}".rstrip("0").partition(".")[2])
    for sign in (1, -1):
        decoded = codecs.get(name, **options).encode(torch.tensor([sign * x])).decode().item()
        assert round(decoded, digits) == sign * comes_back


@pytest.mark.parametrize("name", TYPES)
def test_magnitudes_ascend_from_zero_and_fill_every_code(name: str) -> None:
    magnitudes = table(name).magnitudes
    assert (magnitudes.dtype, magnitudes.shape) == (torch.float32, (128,))
    assert magnitudes[0] == 0
    assert (magnitudes.diff() > 0).all()
    assert magnitudes[-1] <= 1
    values = table(name).values()
    assert torch.equal(values[128:], -values[:128])
    assert values[128].signbit()


@pytest.mark.parametrize("name", TYPES)
def test_a_threshold_is_the_float32_nearest_to_the_middle(name: str) -> None:
    magnitudes = [Fraction(value) for value in table(name).magnitudes.tolist()]
    for low, high, threshold in zip(magnitudes, magnitudes[1:], table(name).thresholds.numpy(), strict=False):
        middle = (low + high) / 2
        error = abs(Fraction(float(threshold)) - middle)
        for toward in (0, 1):
            assert error <= abs(Fraction(float(np.nextafter(threshold, np.float32(toward)))) - middle)


@pytest.mark.parametrize("name", ["dynamic_tree", "dynamic_tree_even"])
def test_a_dynamic_tree_halves_its_values_with_every_decade(name: str) -> None:
    magnitudes = table(name).magnitudes
    for zeros in range(7):
        within = (magnitudes > 10.0 ** -(zeros + 1)) & (magnitudes < 10.0**-zeros)
        assert int(within.sum()) == 2 ** (6 - zeros)


def test_the_papers_tree_halves_a_decade_at_045_and_the_even_one_in_its_middle() -> None:
    top = table("dynamic_tree").magnitudes[64:].double()
    assert int((top < 0.45).sum()) == 32
    assert torch.allclose(top[:32].diff(), torch.tensor(0.35 / 32, dtype=torch.float64), rtol=1e-5)
    assert torch.allclose(top[32:].diff(), torch.tensor(0.55 / 32, dtype=torch.float64), rtol=1e-5)
    even = table("dynamic_tree_even").magnitudes[64:].double()
    assert torch.allclose(even.diff(), torch.tensor(0.9 / 64, dtype=torch.float64), rtol=1e-5)


def test_the_even_tree_is_bitsandbytes_map_without_its_one() -> None:
    # functional.create_dynamic_map of bitsandbytes, written out: middles of 2**i even parts of each decade.
    expected = [0.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1)
        expected += list((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6))
    assert np.allclose(table("dynamic_tree_even").magnitudes, sorted(expected), rtol=1e-6, atol=0)


def test_the_static_tree_has_sixteen_values_in_each_of_eight_decades_the_smallest_being_zero() -> None:
    magnitudes = table("static_tree").magnitudes[1:]
    decades = torch.floor(torch.log10(magnitudes.double() * (1 + 1e-6))).long()
    assert [int((decades == -1 - exponent).sum()) for exponent in range(8)] == [16] * 7 + [15]


def test_the_mantissa_is_a_whole_number_to_fifteen_and_an_exponent() -> None:
    numbers = sorted({m * Fraction(10) ** -e for e in range(9) for m in range(16)})
    ours = table("mantissa").magnitudes.double() * 15
    assert np.allclose(ours, [float(number) for number in numbers], rtol=1e-6, atol=0)
    # Of the type read literally, with eight exponents, none is missing.
    assert {m * Fraction(10) ** -e for e in range(8) for m in range(16)} <= set(numbers)


def test_linear_is_even() -> None:
    assert torch.equal(table("linear").magnitudes, (torch.arange(128, dtype=torch.float64) / 127).float())


def test_a_table_is_one_object_for_whoever_asks() -> None:
    assert table("linear") is table("linear")
    assert hash(table("linear")) != hash(table("mantissa"))


@pytest.mark.parametrize(
    "magnitudes",
    [range(127), range(1, 129), [*range(127), 126]],
    ids=["too few", "without zero", "one twice"],
)
def test_a_table_that_is_none_is_refused(magnitudes: list[int]) -> None:
    with pytest.raises(ValueError, match="128 magnitudes"):
        table_of("odd", (Fraction(value, 128) for value in magnitudes))
