"""Published faults: what saves memory computes another function, or does not save what it says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from tests.published.training import Network, Training, trains_in_less


def test_peaks_fall_with_the_budget() -> None:
    """pytorch/pytorch#197838: `activation_memory_budget` 0.05 peaks at 1145 MB where 0.15 peaks at 275."""

    def build() -> Network:
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())]
        return Network(nn.Sequential(*layers), (torch.randn(128, 16),))

    training = Training(build)
    room_bytes = training.within(1 << 30)
    budgets = [int(share * room_bytes) for share in (1.0, 0.9, 0.8)]
    peaks = [training.within(budget_bytes) for budget_bytes in budgets]
    assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))


class ByFreeMemory(nn.Module):
    """Attention in chunks whose number depends on what is read from outside in each call."""

    free = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.layer(x).chunk(3, -1)
        chunks = 2 if ByFreeMemory.free < 2 else 4
        ByFreeMemory.free += 1
        return torch.cat([torch.softmax(part @ key.mT, -1) @ value for part in query.chunk(chunks, 1)], 1)


def test_a_choice_that_is_made_otherwise_when_computed_again() -> None:
    """Comfy-Org/ComfyUI#15845: attention takes its chunks from the free memory, which is another one when it is
    recomputed. Shoal computes the ops of forward again, not its choices."""

    def build() -> Network:
        ByFreeMemory.free = 1
        return Network(ByFreeMemory(), (torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(1)),))

    trains_in_less(build)


@pytest.mark.parametrize("weight", [-1.0, 1e-3])
def test_an_inverted_norm_with_weights_below_zero(weight: float) -> None:
    """mapillary/inplace_abn#92: the in-place norm takes the absolute values of its weights, so that it differs from the
    batch norm that it replaces."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.01))
    nn.init.constant_(layers[1].weight, weight)
    x = torch.randn(4, 3, 8, 8)
    plain = layers(x).detach()
    try:
        inverted = shoal.invert_norm(layers)
    except shoal.ShoalError:
        return
    assert torch.allclose(inverted(x), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU(), nn.LeakyReLU(0.0)])
def test_activations_that_have_no_inverse(activation: nn.Module) -> None:
    """mapillary/inplace_abn#15 and #199: a slope of 0 divides by zero, and models with activations that are not
    monotonic fail to train."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), activation, nn.Conv2d(4, 2, 3))
    x = torch.randn(4, 3, 8, 8)
    layers(x).square().mean().backward()
    plain = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    try:
        inverted = shoal.invert_norm(layers, slope=None)
    except shoal.ShoalError:
        return
    inverted(x).square().mean().backward()
    for ours, theirs in zip(inverted.parameters(), plain, strict=True):
        assert torch.allclose(ours.grad, theirs, rtol=1e-3, atol=1e-5)


class ComplexPinv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.layer(x).view(*x.shape, 2)) + torch.eye(8, 6)
        return torch.view_as_real(torch.linalg.pinv(z))


def test_a_complex_pseudoinverse() -> None:
    """pytorch/pytorch#198118: under any dispatch mode, and so under `torch.compile`, a conjugated view within
    `linalg.pinv` is taken for what it is a view of."""
    trains_in_less(lambda: Network(ComplexPinv(), (torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)),)))


class SkipNet(nn.Module):
    """A small U-Net with leaky ReLUs and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1))
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.LeakyReLU(0.1))
        self.up = nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.up(torch.cat((skip, F.interpolate(self.middle(F.max_pool2d(skip, 2)), scale_factor=2)), 1))


def test_skip_connections() -> None:
    """deepspeedai/DeepSpeed#1116: a U-Net with leaky ReLUs and batch norms trains to a tenth of the accuracy where its
    activations are checkpointed."""
    trains_in_less(lambda: Network(SkipNet(), (torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1)),)))
