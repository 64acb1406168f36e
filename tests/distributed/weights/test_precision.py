from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from examples import networks as models
from shoal.distributed.weights.precision import AdaptivePrecision, packable, square_sums
from shoal.errors import InputError
from tests.raising import raising


@settings(max_examples=25)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=4), st.integers(0, 9), st.sampled_from([1e-3, 1.0, 1e3]))
def test_square_sums_are_those_of_float64_to_six_digits(sizes: list[int], seed: int, scale: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=draw) * scale for size in sizes]
    for found, tensor in zip(square_sums(tensors), tensors, strict=True):
        assert found == pytest.approx(float(tensor.double().square().sum()), rel=2e-6)


def test_square_sums_see_what_float32_sums_lose() -> None:
    values = torch.full((5_000_000,), 0.05)
    exact = 5_000_000 * float(values[0].double()) ** 2
    assert square_sums([values])[0] == pytest.approx(exact, rel=2e-6)


def test_square_sums_take_any_layout_and_hand_on_what_is_no_number() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    gaps = torch.randn(6, 6)[:, ::2]
    bad = torch.tensor([1.0, math.nan])
    found = square_sums([image, gaps, bad, torch.empty(0)])
    assert found[:2] == pytest.approx([float(t.double().square().sum()) for t in (image, gaps)])
    assert math.isnan(found[2])
    assert found[3] == 0.0


def test_biases_and_normalisations_are_not_watched() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm((5, 5)), nn.Linear(5, 2))
    assert packable(model) == ["0.weight", "3.weight"]
    precision = AdaptivePrecision(model, -1e-3, 10)
    assert precision.watches("0.weight") and not precision.watches("0.bias") and not precision.watches("2.weight")


def test_blocks_of_a_resnet_share_their_bits() -> None:
    precision = AdaptivePrecision(models.build("resnet34"), -2e-5, 2000, by="block")
    names = list(precision.groups)
    assert names[0] == "conv1.weight" and names[-1] == "fc.weight"
    assert len(names) == 1 + 16 + 1  # the paper's stem, 3 + 4 + 6 + 3 building blocks, the dense layer
    assert len(precision.groups["layer2.0"]) == 3  # two convolutions and the shortcut's
    with torch.no_grad():
        precision.update()
        for tensor in precision.groups["layer2.0"]:
            tensor.mul_(0.5)
    precision.interval = 1
    assert precision.update() == ["layer2.0"]
    assert precision.bytes_of("layer2.0.conv1.weight") == precision.bytes_of("layer2.0.downsample.0.weight") == 2
    assert precision.bytes_of("layer2.1.conv1.weight") == 1


def test_layers_of_a_vgg_are_its_weights() -> None:
    precision = AdaptivePrecision(models.build("alexnet", num_classes=10), -5e-2, 4000)
    assert len(precision.groups) == 8
    assert precision.mean_bytes == 1.0


def test_a_state_survives_a_checkpoint() -> None:
    model = nn.Linear(3, 3)
    first, second = (AdaptivePrecision(model, -0.01, 2) for _ in range(2))
    for _ in range(4):
        first.update()
        model.weight.data.mul_(0.9)
    second.load_state_dict(first.state_dict())
    assert second.update() == first.update()
    assert second.bits == first.bits == {"weight": 24}


def test_norms_of_groups_of_tensors() -> None:
    precision = AdaptivePrecision({"a": [torch.tensor([3.0]), torch.tensor([4.0])], "b": [torch.zeros(2)]}, -1.0, 1)
    assert precision.norms() == [5.0, 0.0]


def test_what_cannot_be_watched_is_refused() -> None:
    with raising(InputError, "by='stage'"):
        AdaptivePrecision(nn.Linear(2, 2), -1.0, 1, by="stage")
    with raising(InputError, "float32"):
        AdaptivePrecision(nn.BatchNorm2d(3), -1.0, 1)
    precision = AdaptivePrecision(nn.Linear(2, 2), -1.0, 1)
    with raising(InputError, "'bias'"):
        precision.bytes_of("bias")
    with pytest.raises(InputError):
        precision.watch({})
