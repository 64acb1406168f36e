"""Gradients of concatenations are added as a whole: eager PyTorch's bits, as many bytes, few ops."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shoal
from shoal.rewrites import concatenations

_LAYERS = 5


class Dense(nn.Module):
    """A dense block: each layer reads all earlier ones side by side, along `dim`."""

    def __init__(self, dim: int = 1, first: int = 16, growth: int = 4) -> None:
        super().__init__()
        self.dim = dim
        self.stem = nn.Conv2d(3, first, 3, padding=1)
        sizes = [first + growth * place for place in range(_LAYERS)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(size), nn.ReLU(), nn.Conv2d(size, growth, 3, padding=1)) for size in sizes
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1] + growth, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.stem(x)]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, self.dim)))
        return self.head(torch.cat(parts, self.dim))  # type: ignore[no-any-return]


class Nested(nn.Module):
    """Skips of skips, as in a U-Net++: `high` waits for the last convolution, and is as large as what does not."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.last = nn.Conv2d(24, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.high(x)
        first = self.first(high).relu()
        second = self.second(torch.cat([high, first], 1)).relu()
        return self.last(torch.cat([high, first, second], 1)).mean((2, 3))  # type: ignore[no-any-return]


def train(model: nn.Module, x: torch.Tensor, precision: torch.dtype) -> list[torch.Tensor | None]:
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
            loss = model(x).float().square().mean()
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def sums(model: nn.Module) -> int:
    """Of gradients, in the backward pass."""
    graph = model.shoal.plan.graph  # type: ignore[union-attr]
    return sum(op.target == "aten.add.Tensor" and op.phase == "backward" for op in graph.ops)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(torch.channels_last, torch.float32), (torch.contiguous_format, torch.bfloat16)],
    ids=["channels_last", "contiguous, bfloat16"],
)
def test_a_dense_block_has_eager_bits_and_a_sum_a_layer_in_the_same_bytes(
    layout: torch.memory_format, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Dense().to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 12, 12).to(memory_format=layout)
    expected = train(copy.deepcopy(model), x, precision)
    models = [shoal.compile(copy.deepcopy(model), "1GiB", allow="bitwise") for _ in range(2)]
    whole, one_by_one = models
    for got, wanted in zip(train(whole, x, precision), expected, strict=True):
        assert got is not None and wanted is not None and torch.equal(got, wanted)
    monkeypatch.setattr(concatenations, "_neighbours", lambda part: [])
    train(one_by_one, x, precision)
    assert (sums(whole), sums(one_by_one)) == (_LAYERS, sum(range(_LAYERS + 1)))
    measured, predicted = ([getattr(one.shoal, f"{a}_peak_bytes") for one in models] for a in ("measured", "predicted"))
    assert measured[0] == measured[1] and predicted[0] == predicted[1] and whole.shoal.repairs == 0


def test_within_less_the_bits_stay() -> None:
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(8, 3, 24, 24)
    whole = shoal.plan(model, x, "1GiB", allow="bitwise").predicted_peak_bytes
    expected = train(copy.deepcopy(model), x, torch.float32)
    ours = shoal.compile(model, int(0.6 * whole), allow="bitwise")
    for got, wanted in zip(train(ours, x, torch.float32), expected, strict=True):
        assert got is not None and wanted is not None and torch.equal(got, wanted)
    assert ours.shoal.measured_peak_bytes <= 0.6 * whole


def test_so_it_is_along_other_dimensions() -> None:
    class Along(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [x * 2]
            for layer in self.layers:
                parts.append(layer(torch.cat(parts, 1)).tanh()[:, :1])
            return torch.cat(parts, 1)

    torch.manual_seed(0)
    model, x = Along(), torch.randn(3, 8, 6)
    expected = train(copy.deepcopy(model), x, torch.float32)
    ours = shoal.compile(model, "1GiB", allow="bitwise")
    for got, wanted in zip(train(ours, x, torch.float32), expected, strict=True):
        assert got is not None and wanted is not None and torch.equal(got, wanted)


def test_what_would_be_copied_for_the_most_part_is_added_part_by_part() -> None:
    torch.manual_seed(0)
    model, x = Nested(), torch.randn(2, 3, 16, 16)
    expected = train(copy.deepcopy(model), x, torch.float32)
    ours = shoal.compile(model, "1GiB", allow="bitwise")
    for got, wanted in zip(train(ours, x, torch.float32), expected, strict=True):
        assert got is not None and wanted is not None and torch.equal(got, wanted)
    assert not any(op.target == "aten.clone.default" for op in ours.shoal.plan.graph.ops)
    assert sums(ours) == 3  # of `high` twice, and of `first`
