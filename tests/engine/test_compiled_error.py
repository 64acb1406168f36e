"""Gradients of compiled regions are no further from float64 than eager ones, over draws that are always the same.

The root mean square over the draws is compared: that of one draw is as often above as below.
"""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.engine import compiled_regions
from tests.engine.compile.compiled import compiled
from tests.engine.training_laws import costs_that_do_not_matter, needs_compiler

_DRAWS = 12
_MOST_OF_ALL = 1.1  # times eager's error, of all parameters together
_MOST_OF_EACH = 1.5  # of each parameter by itself


class Encoder(nn.Module):
    """Patches, a block with attention written out, and a linear layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.last = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 5)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.up, self.down = (nn.Linear(a * width, b * width) for a, b in ((1, 3), (1, 4), (4, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 4, dim=-1) @ v
        x = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return self.last(x)


def convolutional(width: int = 16) -> nn.Module:
    widths = (3, width, width)
    layers = [
        layer for a, b in pairwise(widths) for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """Of a loss without kinks, in float64."""
    model.zero_grad()
    model(batch).square().mean().backward()
    return [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]


def squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["batch norm, channels_last", "transformer"])
def test_gradients_are_no_further_from_float64_than_eager_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_regions, "_SLOWER", math.inf)  # every region stays, however long it takes
    torch.manual_seed(0)
    in_memory = torch.channels_last if "channels_last" in name else torch.contiguous_format
    net = (Encoder() if name == "transformer" else convolutional()).to(memory_format=in_memory)
    eager, exact = copy.deepcopy(net), copy.deepcopy(net).double()
    draw = torch.Generator().manual_seed(2)
    off_of_all = dict.fromkeys(("eager", "compiled"), torch.zeros(()))
    size = torch.zeros(())
    with costs_that_do_not_matter():
        planned = compiled(net, kernels="compiled", planner="keep_all", budget=None)
        for _ in range(_DRAWS):
            batch = torch.randn(8, 3, 32, 32, generator=draw).to(memory_format=in_memory)
            wanted = gradients(exact, batch.double())
            size = size + squares(wanted)
            for who, model in (("eager", eager), ("compiled", planned)):
                found = gradients(model, batch)
                off = squares([one - other for one, other in zip(found, wanted, strict=True)])
                off_of_all[who] = off_of_all[who] + off
    assert any("compiled_region" in op.target for op in planned.shoal.plan.graph.ops)
    ours, theirs = off_of_all["compiled"], off_of_all["eager"]
    assert math.sqrt(ours.sum()) <= _MOST_OF_ALL * math.sqrt(theirs.sum())
    counted = size > 1e-12 * size.sum()  # the gradient of a bias before a batch norm is zero but for rounding
    assert bool((ours.sqrt() <= _MOST_OF_EACH * theirs.sqrt())[counted].all())
