"""Published faults: an op writes over what was saved, or what was handed out, and gradients are lost or wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from tests.published.training import Network, Training, trains_in_less


def network(module: nn.Module, *shape: int) -> Network:
    return Network(module, (torch.randn(shape, generator=torch.Generator().manual_seed(1)),))


def test_noise_that_is_filled_after_it_was_saved() -> None:
    """pytorch/pytorch#193671: RReLU saves its noise before it fills it; what copies a saved tensor at once has zeros,
    and gradients are silently wrong."""
    gradients = []
    for offloads in (False, True):
        torch.manual_seed(0)
        x = torch.randn(1 << 20, requires_grad=True)
        if offloads:
            with shoal.offload_activations(min_bytes=1024):
                y = F.rrelu(x, 0.1, 0.9, training=True)
        else:
            y = F.rrelu(x, 0.1, 0.9, training=True)
        y.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_rrelu_in_less() -> None:
    """pytorch/pytorch#193671, where the step is planned: the noise is kept, or drawn again."""

    def build() -> Network:
        torch.manual_seed(0)
        return network(nn.Sequential(nn.Linear(16, 32), nn.RReLU(), nn.Linear(32, 32), nn.RReLU()), 64, 16)

    trains_in_less(build)


class WrittenView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).exp().sin()[:].relu_()


def test_an_output_that_is_a_view_written_in_place() -> None:
    """pytorch/pytorch#36383: where a checkpointed function returns a view that it wrote in place, its backward is never
    called and the parameters get no gradient."""
    trains_in_less(lambda: _seeded(WrittenView, 64, 16))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU(inplace=True)),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU(inplace=True)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_an_instance_norm_before_a_relu_in_place() -> None:
    """pytorch/pytorch#7617: a checkpointed instance norm with a ReLU in place after it has the gradient None."""
    trains_in_less(lambda: _seeded(Normalised, 2, 3, 12, 12))


@pytest.mark.filterwarnings("ignore:cannot time")
@pytest.mark.parametrize("inplace", [False, True])
def test_a_leaky_relu_with_a_negative_slope(inplace: bool) -> None:
    """pytorch/pytorch#31938: the sign of the input was taken from the result, which has it only for slopes above 0.
    Plain PyTorch refuses it in place since then, and so does Shoal."""

    def build() -> Network:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(-2.0, inplace))
        return network(nn.Sequential(first, nn.Linear(32, 32), nn.LeakyReLU(-0.5)), 64, 16)

    if not inplace:
        trains_in_less(build)
        return
    with pytest.raises(RuntimeError, match="negative slope"):
        Training(build)
    model = shoal.compile(build().module, "1MiB", allow="exact")
    with pytest.raises(RuntimeError, match="negative slope"):
        model(torch.ones(64, 16)).sum().backward()


class TransposedCopy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.linspace(0, 1, 32 * 32).view(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5
        z = x.t().clone() * self.y
        x.add_(1)
        return (z.sin() * x).cos()


def test_an_input_that_is_written_after_a_copy_of_it_was_read() -> None:
    """pytorch/pytorch#185876: of `x.T.clone() * y` and then `x.add_(1)`, the copy is taken for superfluous, and the
    gradient of y is made of what was added."""
    trains_in_less(lambda: _seeded(TransposedCopy, 32, 32))


def _seeded(kind: type[nn.Module], *shape: int) -> Network:
    torch.manual_seed(0)
    return network(kind(), *shape)
