"""AWP's threshold from norms that were watched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from examples.awp_threshold import NormMonitor, threshold_from
from shoal.errors import InputError


def test_a_monitor_finds_the_mean_change_of_the_norms() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    monitor = NormMonitor(model)
    for _ in range(5):
        monitor.update()
        model[0].weight.data.mul_(0.98)
        model[1].weight.data.mul_(0.96)
    assert monitor.threshold() == pytest.approx(-0.03, abs=1e-6)


@given(st.floats(-0.2, 0.2), st.integers(2, 20), st.integers(1, 4))
def test_a_threshold_derived_from_a_steady_change_is_that_change(rate: float, batches: int, layers: int) -> None:
    history = [[(layer + 1) * (1 + rate) ** batch for layer in range(layers)] for batch in range(batches)]
    assert threshold_from(history) == pytest.approx(rate, abs=1e-10)


def test_one_batch_has_no_change() -> None:
    with pytest.raises(InputError):
        threshold_from([[1.0]])
