"""Patches that are too small for a layer are told in one line, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import InputError
from shoal.transforms.split.split import split
from tests.raising import raising


@pytest.mark.parametrize("halo", [None, "exact"])
def test_a_layer_that_mirrors_more_than_a_patch_has_is_named(halo: Any) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 9, padding=4, padding_mode="reflect"))
    x = torch.randn(1, 1, 8, 9)
    divided = split(net, 1.0, (4, 1), halo=halo)
    assert net(x).shape == x.expand(-1, 2, -1, -1).shape
    if halo == "exact":  # the halo has the rows
        torch.testing.assert_close(divided(x), net(x))
        return
    for call in (lambda: divided(x), lambda: divided.describe((8, 9)), lambda: divided.check((8, 9))):
        with raising(InputError, "8 x 9", "grid=(4, 1)"):
            call()
    with pytest.raises(InputError):
        shoal.compile(divided, budget="1GiB")(x)
    pads = split(nn.Sequential(nn.ReflectionPad2d((0, 0, 2, 2)), nn.Conv2d(1, 1, 5, padding=(0, 2))), 1.0, (4, 1))
    with pytest.raises(InputError):
        pads(x)


def test_a_batch_norm_of_one_element_a_patch_is_named() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2))
    divided, x = split(net, 1.0, (2, 2)), torch.randn(1, 1, 2, 2)
    for call in (lambda: divided(x), lambda: divided.check((2, 2), 1), lambda: shoal.compile(divided, "1GiB")(x)):
        with raising(InputError, "grid: (2, 2)", "image: 2 x 2"):
            call()
    divided.check((2, 2))
    assert divided(x.expand(2, -1, -1, -1)).shape == (2, 2, 2, 2)
    net[1].eval()
    assert divided(x).shape == (1, 2, 2, 2)
    net[1].train()
    assert split(net, 1.0, (2, 2), batch_norm="joint")(x).shape == (1, 2, 2, 2)
