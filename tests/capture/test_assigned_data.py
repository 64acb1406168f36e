"""`.data = ...` in a forward pass trains as in plain PyTorch, bit for bit; what a copy cannot repeat is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import CaptureError
from tests.raising import raising

Update = Callable[["Assigns"], None]


class Assigns(nn.Conv2d):
    """A convolution that updates its own tensors before it convolves."""

    def __init__(self, update: Update) -> None:
        super().__init__(4, 4, 3, padding=1)
        self.update = update
        self.register_buffer("seen", torch.zeros(4))
        self.follower = nn.Parameter(torch.zeros_like(self.weight), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.update(self)
        return super().forward(x) + self.seen.mean() + self.follower.mean()


def scaled(layer: Assigns) -> None:
    layer.weight.data = layer.weight.data * 0.9


def renormed(layer: Assigns) -> None:
    with torch.no_grad():
        layer.weight.data = torch.renorm(layer.weight, 2, 0, 0.3)


def twice(layer: Assigns) -> None:
    layer.weight.data = layer.weight.data + 0.01
    layer.weight.data.mul_(0.9)
    layer.weight.data = layer.weight.data.tanh()


def transposed(layer: Assigns) -> None:
    layer.weight.data = (layer.weight.data * 0.9).transpose(2, 3)


def followed(layer: Assigns) -> None:
    layer.follower.data = layer.follower.data * 0.9 + layer.weight.data * 0.1
    layer.seen.data = layer.seen.data + layer.weight.detach().mean((1, 2, 3))


def parameters_in_place(layer: Assigns) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.9)
        layer.bias.copy_(layer.bias * 0.5)


ALL = (scaled, renormed, twice, transposed, followed, parameters_in_place)


def train(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for seed in range(3):
        x = torch.randn(8, 4, 32, 32, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
def test_it_trains_as_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for update in ALL for layer in (Assigns(update), nn.BatchNorm2d(4), nn.Tanh())))
    model = shoal.compile(copy.deepcopy(plain), budget="2MiB", allow="bitwise", options=shoal.Options(strict=True))
    ours, expected = train(model), train(plain)
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
        assert ours[name].shape == value.shape
    assert model.shoal.measured_peak_bytes <= model.shoal.budget_bytes
    assert model.shoal.measured_peak_bytes <= 1.02 * model.shoal.predicted_peak_bytes


def tied(layer: Assigns) -> None:
    layer.follower.data = layer.weight.data


def changed_afterwards(layer: Assigns) -> None:
    value = layer.weight.data * 0.9
    layer.weight.data = value
    value.add_(0.1)


def grown(layer: Assigns) -> None:
    layer.seen.data = torch.cat([layer.seen.data, layer.seen.data])


@pytest.mark.parametrize("update", [tied, changed_afterwards, grown])
def test_what_a_copy_would_not_repeat_is_refused_with_its_line(update: Update) -> None:
    model = shoal.compile(Assigns(update), budget="64MiB")
    with raising(CaptureError, "test_assigned_data.py", "tensor.data.copy_(value)"):
        model(torch.randn(2, 4, 8, 8))
