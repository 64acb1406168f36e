"""`shoal::statistics` against float64, also far from zero."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.memory_format import memory_format_of
from shoal.kernels.norm.statistics import MeasuredNorm, statistics, whole_gradient


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


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("read", [False, True])
def test_the_whole_gradient_is_that_of_the_tensor_and_of_its_statistics(
    layout: torch.memory_format, read: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, 5, 4, 6), generator=generator).contiguous(memory_format=layout)
    grad = torch.randn((3, 5, 4, 6), generator=generator) if read else None
    of_mean, of_variance = torch.randn((2, 5), generator=generator)
    exact = x.double().requires_grad_()
    variance, mean = torch.var_mean(exact, (0, 2, 3), correction=0)
    loss = (mean * of_mean).sum() + (variance * of_variance).sum() + (0.0 if grad is None else (exact * grad).sum())
    (expected,) = torch.autograd.grad(loss, exact)
    measured = MeasuredNorm(x, mean.float().detach(), of_mean, of_variance)
    found = whole_gradient(grad, measured)
    torch.testing.assert_close(found, expected.float())
    narrow = whole_gradient(grad, measured, torch.bfloat16)
    torch.testing.assert_close(narrow, found.bfloat16())


def test_the_layout_of_a_slice_is_that_of_the_tensor() -> None:
    x = torch.ones(2, 3, 4, 5)
    for whole, layout in ((x, torch.contiguous_format), (x.to(memory_format=torch.channels_last), torch.channels_last)):
        assert memory_format_of(whole) == memory_format_of(whole[:, :2]) == memory_format_of(whole[1:]) == layout
    assert memory_format_of(x[:, :1]) == memory_format_of(x[:, :, :1, :1]) == torch.contiguous_format
