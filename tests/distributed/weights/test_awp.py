from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.distributed.weights.precision import AdaptivePrecision, relative_change
from shoal.errors import InputError
from tests.raising import raising

NORMS = st.lists(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=2), min_size=1, max_size=60)


def layers_of(names: Sequence[str], **numbers: Any) -> AdaptivePrecision:
    """Layers of these names, whose norms are given to `observe`."""
    return AdaptivePrecision({name: [torch.zeros(1)] for name in names}, **numbers)


def as_printed(history: list[list[float]], threshold: float, interval: int, step: int, first: int) -> list[int]:
    """Algorithm 1, line by line."""
    bits = [first] * len(history[0])
    counter = [0] * len(history[0])
    for batch in range(1, len(history)):
        for layer in range(len(bits)):
            delta = (history[batch][layer] - history[batch - 1][layer]) / history[batch - 1][layer]
            if delta < threshold:
                counter[layer] += 1
            if counter[layer] == interval:
                bits[layer] += step
                counter[layer] = 0
    return bits


@given(NORMS, st.floats(-0.5, 0.1), st.integers(1, 5), st.integers(1, 12), st.integers(1, 32))
def test_bits_are_those_of_algorithm_1_up_to_those_of_a_float32(
    history: list[list[float]], threshold: float, interval: int, step: int, first: int
) -> None:
    layers = layers_of(["a", "b"], threshold=threshold, interval=interval, bits_step=step, first_bits=first)
    for norms in history:
        layers.observe(norms)
    expected = as_printed(history, threshold, interval, step, first)
    assert list(layers.bits.values()) == [min(32, bits) for bits in expected]


@given(NORMS, st.integers(0, 60))
def test_a_state_goes_on_where_it_was_saved(history: list[list[float]], cut: int) -> None:
    whole, first, second = (layers_of(["a", "b"], threshold=-0.01, interval=2) for _ in range(3))
    for norms in history:
        whole.observe(norms)
    for norms in history[:cut]:
        first.observe(norms)
    second.load_state_dict(first.state_dict())
    for norms in history[cut:]:
        second.observe(norms)
    assert second.state_dict() == whole.state_dict()


@given(NORMS)
def test_precision_only_grows(history: list[list[float]]) -> None:
    layers = layers_of(["a", "b"], threshold=-0.05, interval=1)
    last = 0
    for norms in history:
        layers.observe(norms)
        assert layers.bits["a"] >= last
        last = layers.bits["a"]


def test_a_threshold_of_the_paper_is_met_by_a_norm_that_falls_faster() -> None:
    layers = layers_of(["slow", "fast", "rising"], threshold=-2e-3, interval=3)
    for batch in range(4):
        layers.observe([0.999**batch, 0.997**batch, 1.003**batch])
    assert layers.bits == {"slow": 8, "fast": 16, "rising": 8}


def test_the_count_begins_again_when_it_has_fired() -> None:
    layers = layers_of(["a"], threshold=-0.1, interval=2)
    seen = []
    for batch in range(6):
        layers.observe([0.5**batch])
        seen.append((layers.bits["a"], layers.counts["a"]))
    assert seen == [(8, 0), (8, 1), (16, 0), (16, 1), (24, 0), (24, 1)]


def test_bits_are_rounded_up_to_bytes() -> None:
    found = []
    for bits in (1, 8, 9, 14, 16, 17, 24, 25, 32):
        found.append(layers_of(["a"], threshold=-1.0, interval=1, first_bits=bits).bytes_of("a"))
    assert found == [1, 1, 2, 2, 2, 3, 3, 4, 4]


def test_a_norm_that_is_no_number_or_leaves_zero_never_counts() -> None:
    layers = layers_of(["nan", "zero"], threshold=0.5, interval=1)
    for norms in ([1.0, 0.0], [math.nan, 1.0], [math.nan, math.inf], [1.0, math.nan]):
        layers.observe(norms)
    assert layers.bits == {"nan": 8, "zero": 8}
    assert relative_change(0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"threshold": math.nan},
        {"interval": 0},
        {"interval": 2.5},
        {"bits_step": 0},
        {"first_bits": 33},
        {"first_bits": True},
    ],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with raising(InputError, *wrong):
        layers_of(["a"], **{"threshold": -1.0, "interval": 1, **wrong})


def test_other_layers_norms_and_states_are_refused() -> None:
    layers = layers_of(["a", "b"], threshold=-1.0, interval=1)
    with pytest.raises(InputError):
        layers.observe([1.0])
    with raising(InputError, "'c'"):
        layers.bytes_of("c")
    with pytest.raises(InputError):
        layers.load_state_dict(layers_of(["a", "c"], threshold=-1.0, interval=1).state_dict())
    with raising(InputError, "'bits'"):
        layers.load_state_dict({})
