"""Layers in a row, of which one ends a graph: those before and after it are captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shoal.capture.layer_by_layer import containers
from tests.engine.training_laws import assert_same_training, blocks, images


def breaks(module: nn.Module, args: Any, output: Any) -> None:
    torch._dynamo.graph_break()


def doubles(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


class Break(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


class Row(nn.Sequential):
    """A name for layers in a row, as torchvision has them."""


class Columns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(2).transpose(1, 2)


class First(nn.Module):
    def forward(self, x: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x[0]


def row(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(*blocks(3, 4, 4), *between, *blocks(4, 4, 4))


def hooked() -> nn.Module:
    model = row(nn.Conv2d(4, 4, 1))
    model[2].register_forward_hook(breaks)
    return model


def recurrent() -> nn.Module:
    return nn.Sequential(
        *blocks(3, 4, 4), Columns(), nn.LSTM(4, 6, batch_first=True), First(), nn.Linear(6, 9), nn.ReLU()
    )


class Holding(nn.Module):
    """A model that holds the layers."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    "layers",
    [
        hooked,
        lambda: Holding(hooked()),
        recurrent,
        lambda: nn.Sequential(*blocks(3, 4), row_of_a_class(), *blocks(4, 4)),
    ],
    ids=["hook", "hook in a part", "LSTM", "nested"],
)
def test_the_layers_before_and_behind_a_break_are_captured(layers: Any) -> None:
    assert assert_same_training(layers(), images(2, 2, 3, 8, 8)).shoal.captures >= 2


def row_of_a_class() -> nn.Module:
    return Row(*blocks(4, 4), Break(), *blocks(4, 4))


def test_a_row_with_a_hook_of_its_own_has_that_called() -> None:
    """Where it is called by itself, too."""
    model = Holding(nn.Sequential(Break(), row(Break())))
    model.layers[1].register_forward_hook(doubles)
    model.layers.append(nn.Conv2d(4, 4, 1))
    model.layers.append(nn.Sequential(*blocks(4, 4)))
    assert_same_training(model, images(3, 2, 3, 8, 8))


def test_a_row_that_gets_another_layer_is_called_with_it() -> None:
    planned = assert_same_training(row(Break()), images(2, 2, 3, 8, 8))
    planned.append(nn.Flatten())
    x = images(1, 2, 3, 8, 8)[0]
    assert planned(x).shape == (2, 4 * 8 * 8)
    planned(x).square().mean().backward()


class Backwards(nn.Sequential):
    """Calls its layers from the last to the first."""

    def __iter__(self) -> Iterator[nn.Module]:
        return reversed(list(super().__iter__()))


def test_a_row_in_an_order_of_its_own_is_called_in_that() -> None:
    layers = Backwards(nn.Conv2d(4, 2, 3), Break(), nn.Conv2d(3, 4, 3))
    assert_same_training(nn.Sequential(layers, *blocks(2, 4, 4)), images(3, 2, 3, 8, 8))


def test_a_break_is_named_by_the_layer_at_which_it_is() -> None:
    planned = assert_same_training(recurrent(), images(2, 2, 3, 8, 8))
    assert any("x = layers['3'](x)  # LSTM" in place for place in planned.shoal.plan.breaks)


def test_containers_are_those_that_are_called_and_begin_no_graph() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    outer = Row(inner, nn.Linear(2, 2))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 1)
    model = Holding(nn.ModuleList([outer, encoder, nn.Linear(2, 2)]))
    assert list(containers(model)) == [outer, inner, encoder]
