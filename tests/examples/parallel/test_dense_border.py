"""The border lies before the first linear layer after the last convolution, whatever its modules are called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from examples.networks import build
from examples.parallel.dense_border import Border, Dense, Drop, Flatten, Pointwise, find_border
from examples.parallel.local_convolution import LocalConv2d
from shoal.errors import InputError
from tests.raising import raising


class Odd(nn.Module):
    """A linear layer among the convolutions, names without meaning, functions, a softmax at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Conv2d(3, 4, 3)
        self.gate = nn.Linear(4, 4)
        self.y = nn.Conv2d(4, 4, 3)
        self.b = nn.Linear(4 * 16, 6)
        self.a = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.z(x)
        x = x * self.gate(x.mean((2, 3)))[..., None, None]
        x = F.relu(self.y(x))
        return F.log_softmax(self.a(F.leaky_relu(self.b(x.flatten(1)), 0.1)), dim=1)


def _run(model: nn.Module, border: Border, x: torch.Tensor) -> torch.Tensor:
    """All three parts one after the other, on whole layers."""
    y = fx.GraphModule(model, border.convolutions)(x)
    for step in border.dense:
        match step:
            case Dense(name):
                y = model.get_submodule(name)(y)
            case Pointwise(apply):
                y = apply(y)
            case Drop(module):
                y = module(y)
            case Flatten():
                y = y.flatten(1)
    return fx.GraphModule(model, border.tail)(y)


LOCAL = nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.ReLU(), LocalConv2d(4, 4, (6, 6), 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
)


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (partial(build, "alexnet"), ("classifier.1", "classifier.4", "classifier.6")),
        (partial(build, "vgg19_cifar"), ("classifier",)),
        (partial(build, "resnet18_cifar"), ("fc",)),
        (Odd, ("b", "a")),
        (lambda: LOCAL, ("2", "5")),
    ],
    ids=["alexnet", "vgg19_cifar", "resnet18_cifar", "odd", "local"],
)
def test_the_parts_make_the_network(make: Callable[[], nn.Module], layers: tuple[str, ...]) -> None:
    model = make()
    border = find_border(model)

    assert border.layers == layers
    x = torch.randn(2, 3, 64, 64) if "classifier.1" in layers else torch.randn(2, 3, 8, 8)
    if layers == ("b", "a"):
        x = torch.randn(2, 3, 8, 8)
    if layers in (("classifier",), ("fc",)):
        x = torch.randn(2, 3, 32, 32)
    model.eval()
    assert torch.equal(_run(model, border, x), model(x))


def test_dropout_of_the_convolutions_stays_with_them() -> None:
    border = find_border(build("alexnet"))

    assert [str(node.target) for node in border.convolutions.nodes][-2] == "classifier.0"
    assert [type(step).__name__ for step in border.dense] == [
        "Dense", "Pointwise", "Drop", "Dense", "Pointwise", "Dense"
    ]  # fmt: skip


class Skipping(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.y(self.z(x)).flatten(1))
        return self.a(x) + x[:, :5]


class Dropping(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(F.dropout(self.b(self.y(self.z(x)).flatten(1)), training=self.training))


class Branching(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Again(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.y(self.z(x)).flatten(1))
        return self.gate(self.gate(x[:, :4]))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[4].weight = model[2].weight
    return model


def _conv(*then: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 6), *then)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), ""),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), ""),
        (nn.Sequential(nn.Linear(4, 4), nn.Conv2d(3, 4, 3)), ""),
        (_conv(nn.BatchNorm1d(6), nn.Linear(6, 2)), "BatchNorm1d"),
        (_conv(nn.Softmax(1), nn.Linear(6, 2)), ""),
        (_conv(nn.BatchNorm1d(6)), ""),
        (Skipping(), ""),
        (Dropping(), ""),
        (Branching(), ""),
        (Again(), ""),
        (_tied(), ""),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_reason(model: nn.Module, why: str) -> None:
    with raising(InputError, why):
        find_border(model)
