"""`shoal::statistics` against float64, also far from zero."""

from __future__ import annotations

import pytest
import torch

from shoal.runtime.statistics import statistics


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_far_from_zero_too(offset: float, layout: torch.memory_format) -> None:
    drawn = torch.randn((3, 5, 9, 7), generator=torch.Generator().manual_seed(0)) + offset
    mean, variance = statistics(drawn.contiguous(memory_format=layout))
    true_variance, true_mean = torch.var_mean(drawn.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(mean.double(), true_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(variance.double(), true_variance, rtol=1e-5, atol=0)


def test_a_half_is_measured_in_float32() -> None:
    mean, variance = statistics(torch.full((1, 2, 2, 2), 3.0, dtype=torch.bfloat16))
    assert mean.dtype == variance.dtype == torch.float32
    assert mean.tolist() == [3.0, 3.0] and variance.tolist() == [0.0, 0.0]


def test_gradcheck_and_opcheck() -> None:
    x = torch.randn((2, 3, 2, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(statistics, (x,))
    torch.library.opcheck(torch.ops.shoal.statistics.default, (x,))
