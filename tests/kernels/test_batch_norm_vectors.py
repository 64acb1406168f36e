"""Batch norm's work on vectors against the layer's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.kernels.batch_norm_vectors import batch_norm_scale, measures, move_statistics


@pytest.mark.parametrize("options", [{}, {"momentum": 0.3}, {"momentum": None}, {"track_running_stats": False}])
@pytest.mark.parametrize("later", [{}, {"training": False}, {"track_running_stats": False}], ids=str)
def test_statistics_move_as_the_layer_moves_them(options: dict[str, Any], later: dict[str, bool]) -> None:
    ours, theirs = (nn.BatchNorm2d(3, **options).double() for _ in range(2))
    for layer in (ours, theirs):
        vars(layer).update(later)
    for seed in range(3):
        x = torch.randn((4, 3, 2, 2), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        theirs(x)
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        move_statistics(ours, mean, variance, 16)
    for own, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(own, other)


def test_a_layer_measures_where_its_output_does_not_depend_on_running_statistics() -> None:
    x = torch.randn(4, 3, 2, 2)
    for options in ({}, {"track_running_stats": False}):
        for training in (True, False):
            layer, other = (nn.BatchNorm2d(3, **options).train(training) for _ in range(2))
            if other.running_mean is not None:
                other.running_mean.add_(1.0)
            assert measures(layer) == torch.equal(layer(x), other(x))


def test_scale_gradcheck_and_opcheck() -> None:
    variance = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64).requires_grad_()
    weight = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, w: batch_norm_scale(v, w, 0.1), (variance, weight))
    assert torch.autograd.gradcheck(lambda v: batch_norm_scale(v, None, 0.1), (variance,))
    torch.library.opcheck(torch.ops.shoal.batch_norm_scale.default, (variance, weight, 0.1))
