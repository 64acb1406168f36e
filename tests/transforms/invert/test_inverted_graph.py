"""Which batch norms are found invertible, by structure, and what is told of the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.kernels import pieces
from shoal.lowlevel import allocations
from shoal.transforms.invert.invert_norm import invert_norm
from tests.engine.training_laws import conv_bn_relu
from tests.inverted_networks import small_resnet, with_trained_layers
from tests.scratch import needs_little_scratch


def test_what_is_converted_and_what_is_not_is_told() -> None:
    converted = invert_norm(small_resnet(), slope=0.05)
    assert [(site.layer, site.was, site.activation, site.slope) for site in converted.inverted] == [
        ("1", "ReLU", "leaky_relu", 0.05),
        ("3.bn1", "ReLU", "leaky_relu", 0.05),
        ("6", "ELU", "elu", 1.0),
    ]
    assert [left.layer for left in converted.left] == ["3.bn2"]
    told = converted.describe().splitlines()
    assert told[0] == "3 of 4 norms inverted"
    assert told[-1] == "3.bn2  kept: there is no ReLU, LeakyReLU or ELU after it but add"


def volumes() -> nn.Sequential:
    """Norms of each sample: what has an inverse after it, and what has not."""
    return nn.Sequential(
        *(nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.01)),
        *(nn.Conv3d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ELU()),
        *(nn.Conv3d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
        *(nn.Conv3d(8, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.PReLU()),
        *(nn.InstanceNorm3d(8, track_running_stats=True), nn.LeakyReLU()),
        *(nn.LayerNorm(5), nn.LeakyReLU()),
    )


def test_norms_of_samples_are_told_layer_by_layer() -> None:
    assert invert_norm(volumes(), slope=None).describe().splitlines() == [
        "2 of 6 norms inverted",
        "layer  was                           now              inexact to",
        "1      InstanceNorm3d and LeakyReLU  LeakyReLU(0.01)  3e-06",
        "4      GroupNorm and ELU             ELU(1)           4e-05",
        "7   kept: the ReLU after it has no inverse",
        "10  kept: there is no ReLU, LeakyReLU or ELU after it but 11 (PReLU)",
        "12  kept: it keeps running statistics, by which it normalises in eval mode",
        "14  kept: it is a LayerNorm, which has no inverted form",
    ]
    assert [site.layer for site in invert_norm(volumes()).inverted] == ["1", "4", "7"]


class Functional(nn.Module):
    """Activations as functions and methods, a slope of its own, and what cannot be converted."""

    def __init__(self) -> None:
        super().__init__()
        for place in range(8):
            self.add_module(f"bn{place}", nn.BatchNorm1d(4))
        self.flat, self.clipped = nn.LeakyReLU(0.0), nn.ReLU6()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn0(x))
        x = self.bn1(x).relu_()
        x = F.leaky_relu(self.bn2(x), negative_slope=0.2)
        x = F.elu(self.bn3(x), 0.5)
        x = self.flat(self.bn4(x))
        x = self.clipped(self.bn5(x))
        x = self.bn6(x)
        return torch.relu(x) + self.bn7(x)


def test_activations_are_found_as_functions_methods_and_modules() -> None:
    converted = invert_norm(Functional())
    assert [(site.layer, site.slope) for site in converted.inverted] == [
        ("bn0", 0.01),
        ("bn1", 0.01),
        ("bn2", 0.2),
        ("bn3", 0.5),
    ]
    reasons = {left.layer: left.reason for left in converted.left}
    assert reasons["bn4"] == "the LeakyReLU(0) after it has no inverse"
    assert reasons["bn5"] == "there is no ReLU, LeakyReLU or ELU after it but clipped (ReLU6)"
    assert reasons["bn6"] == "its result has other readers: relu, bn7 (BatchNorm1d)"
    assert converted(torch.randn(6, 4)).shape == (6, 4)


class OwnBatchNorm(nn.BatchNorm2d):
    pass


def _hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("layer", "activation", "reason"),
    [
        (nn.SyncBatchNorm(4), nn.ReLU(), "it is a SyncBatchNorm, whose statistics are of all ranks"),
        (OwnBatchNorm(4), nn.ReLU(), "it is a OwnBatchNorm, which may do more than batch norm"),
        (_hooked(nn.BatchNorm2d(4)), nn.ReLU(), "it has hooks, which would not run"),
        (nn.BatchNorm2d(4), _hooked(nn.ReLU()), "1 after it has hooks, which would not run"),
    ],
)
def test_layers_that_do_more_stay_as_they_are(layer: nn.Module, activation: nn.Module, reason: str) -> None:
    converted = invert_norm(nn.Sequential(layer, activation))
    assert [left.reason for left in converted.left] == [reason]
    assert converted.inverted == ()


class Twice(nn.Module):
    """One batch norm for two places."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.relu, self.other = nn.BatchNorm2d(3), nn.ReLU(), other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.norm(self.second(self.relu(self.norm(self.first(x))))))


def test_a_shared_batch_norm_is_converted_in_both_places_or_in_none() -> None:
    net = with_trained_layers(Twice(nn.ReLU()))
    weight = net.norm.weight.detach().clone()
    plain = copy.deepcopy(net)
    converted = invert_norm(net, slope=1e-6)
    x = torch.randn(4, 3, 8, 8)
    for _ in range(2):
        torch.testing.assert_close(converted(x), plain(x), rtol=1e-4, atol=1e-4)
    assert converted.get_buffer("norm.num_batches_tracked") == 4
    converted.restore()
    torch.testing.assert_close(net.norm.weight, weight, rtol=1e-6, atol=0)
    assert invert_norm(Twice(nn.Sigmoid())).inverted == ()
    assert [left.reason for left in invert_norm(Twice(nn.ELU())).left] == [
        "it is called with different activations after it"
    ]


@needs_little_scratch
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolution_s_result_is_written_over_in_eager_mode(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TILE_ELEMS", 1)
    converted = invert_norm(conv_bn_relu(3, 4, dims))
    x = torch.randn(2, 3, *[8] * dims)
    _, changes = allocations.record(lambda: converted(x).sum().backward())
    one = 2 * 4 * 8**dims * 4
    seen: list[Any] = []
    converted.get_submodule("0").register_forward_hook(lambda *arguments: seen.append(arguments[2]))
    result = converted(x)
    assert seen[0].data_ptr() != result.data_ptr()  # a hook may keep what it sees
    assert changes.count(one) == 2  # the convolution's result and its gradient
