"""A norm of one sample has the right gradients, however PyTorch's kernel reads the strides of a view."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from shoal.transforms.split.one_sample import with_strides
from shoal.transforms.split.slice_graph import slice_graph
from shoal.transforms.split.split_region import choose_region


def viewed(x: torch.Tensor) -> torch.Tensor:
    """The same values in channels_last, as a view whose stride along the batch is not that of the layout."""
    x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x.view(x.shape)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("of_samples", [False, True])
@pytest.mark.parametrize("of_gradient", [False, True])
def test_gradients_are_those_in_float64(dims: int, of_samples: bool, of_gradient: bool) -> None:
    x, grad = torch.randn(2, 1, 6, *(5, 4, 3)[:dims])
    weight, mean, var = torch.rand(3, 6) + 0.5
    norm, first = (F.instance_norm, (None, None)) if of_samples else (F.batch_norm, (mean, var))

    read = (x if of_gradient else viewed(x)).detach().requires_grad_(), weight.requires_grad_()
    y = with_strides(norm(with_strides(read[0]), *first, read[1]), contiguous=of_samples)
    ours = torch.autograd.grad(y, read, viewed(grad) if of_gradient else grad)

    wide = x.double().requires_grad_(), weight.detach().double().requires_grad_()
    by = (None, None) if of_samples else (mean.double(), var.double())
    exact = torch.autograd.grad(norm(wide[0], *by, wide[1]), wide, grad.double())
    for mine, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=0, atol=1e-5)


class Normalised(nn.Module):
    """An instance norm, as Dynamo's graph calls it, whose gradient comes from a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.randn(6))
        self.conv = nn.Conv2d(6, 12, 3, padding=1).requires_grad_(False)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(F.instance_norm(x, weight=self.weight, bias=self.bias))
        return (x * 1.5).flatten(2).mean(2)


def test_slices_of_one_sample_have_the_gradients_of_the_whole() -> None:
    network = Normalised()
    graph = fx.Tracer().trace(network)
    region = choose_region(graph, dict(network.named_modules()), dims=None, depth=1.0, join="auto")
    assert region is not None
    x, weights = torch.randn(2, 6, 12, 12), torch.randn(2, 12)
    norm = network.weight, network.bias
    ours = torch.autograd.grad((slice_graph(network, graph, region, 2, 2)(x) * weights).sum(), norm)
    exact = torch.autograd.grad((network.double()(x.double()) * weights).sum(), norm)
    for mine, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), reference.double(), rtol=0, atol=1e-5 * float(reference.abs().max()))
