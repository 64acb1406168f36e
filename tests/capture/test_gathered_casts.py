"""Casts of parameters and of their gradients, several to an op: the same bits, the bytes as predicted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shoal
from shoal.capture import gathered_casts
from shoal.kernels.casts import cast_together


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_casts, "_ON", ("cpu",))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for place in range(4):
        layers += [
            nn.Conv2d(8 if place else 3, 8, 1 + 2 * (place % 2), padding=place % 2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def train(model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()


def gathered_ops(model: nn.Module) -> list[int]:
    """How many casts each of the plan's gathered ops makes."""
    graph = model.shoal.plan.graph  # type: ignore[union-attr]
    return [len(op.writes) for op in graph.ops if op.target.endswith("cast_together")]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_a_step_has_the_bits_and_the_predicted_bytes_of_one_that_casts_one_by_one(
    layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = network().to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 16, 16).to(memory_format=layout)
    models = {}
    for where in ("cpu", "cuda"):
        monkeypatch.setattr(gathered_casts, "_ON", (where,))
        models[where] = shoal.compile(copy.deepcopy(own), budget="1GiB", allow="bitwise")
        train(models[where], x)
    together, alone = models["cpu"], models["cuda"]
    # Forward the weights and the one bias that is cast; backward their gradients.
    assert len(gathered_ops(together)) == 2 and sum(gathered_ops(together)) >= 16 and not gathered_ops(alone)
    for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad) and ours.grad.stride() == theirs.grad.stride()
    off_bytes = [one.shoal.measured_peak_bytes - one.shoal.predicted_peak_bytes for one in (together, alone)]
    assert off_bytes[0] == off_bytes[1] and together.shoal.repairs == 0


@pytest.mark.usefixtures("on_the_cpu")
def test_no_op_makes_more_than_a_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_casts, "_MOST_BYTES", 2 * 8 * 8 * 9 * 4)  # two gradients of 3 x 3 kernels
    model = shoal.compile(network(), budget="1GiB", allow="bitwise")
    train(model, torch.randn(4, 3, 16, 16))
    graph = model.shoal.plan.graph
    ops = [op for op in graph.ops if op.target.endswith("cast_together")]
    assert len(ops) > 2
    for op in ops:
        assert sum(graph.storages[storage].nbytes for storage in op.writes) <= 2 * 8 * 8 * 9 * 4


def test_a_weight_that_two_layers_share_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.first(self.first(x).relu()).relu())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    own, x = Shared(), torch.randn(3, 6)
    gradients = []
    for where in ("cpu", "cuda"):
        monkeypatch.setattr(gathered_casts, "_ON", (where,))
        model = shoal.compile(copy.deepcopy(own), budget="1GiB", allow="bitwise")
        train(model, x)
        assert bool(gathered_ops(model)) == (where == "cpu")
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_together_are_casts(dtype: torch.dtype) -> None:
    tensors = [torch.randn(5), torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last), torch.randn(0, 3)]
    strides = [tuple(x.stride()) for x in tensors]
    for made, x in zip(cast_together(tensors, dtype, strides), tensors, strict=True):
        assert torch.equal(made, x.to(dtype)) and made.dtype == dtype and made.stride() == x.stride()
