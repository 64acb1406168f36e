"""Tensors of a fused network lie in memory as those of the network itself: dropout draws its mask in that order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.transforms.fuse.fuse_graph import LEVELS, Level

_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def _net(dims: int, kernel: int) -> nn.Sequential:
    convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    norm: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    pad = kernel // 2
    return nn.Sequential(
        *(convolution(4, 8, kernel, padding=pad), norm(8), nn.ReLU()),
        *(convolution(8, 8, kernel, padding=pad, groups=2), norm(8), nn.ReLU(), nn.Dropout(0.5)),
        # Not fewer than 8 channels: PyTorch's own gradient would write out of bounds (docs/upstream.md).
        *(convolution(8, 8, 1), nn.ReLU(), convolution(8, 6, kernel, padding=pad, stride=2), norm(6), nn.Dropout(0.5)),
    )


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=_LAST[x.dim() - 2]) if x.dim() > 3 else x


IMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": _channels_last,
    "slice": lambda x: torch.cat([x, x], 1)[:, :4],
    "every other pixel": lambda x: x[..., ::2],
}


def _trained(net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    torch.manual_seed(1)
    y = run(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "images"),
    [
        *((torch.float32, images) for images in IMAGES),
        *((torch.float64, images) for images in ("channels_last", "slice")),
    ],
)
def test_results_and_masks_are_the_networks(dims: int, dtype: torch.dtype, images: str) -> None:
    for kernel, batch, weights_last in ((1, 1, False), (1, 3, True), (3, 1, True), (3, 3, False)):
        net = _net(dims, kernel).to(dtype)
        if weights_last and dims > 1:
            net.to(memory_format=_LAST[dims])
        x = IMAGES[images](torch.randn([batch, 4] + [6] * dims, dtype=dtype))
        expected = _trained(net, net, x)
        for level in LEVELS:
            fused = shoal.fuse_batchnorm(copy.deepcopy(net), level, when="always")
            found = _trained(fused, fused, x)
            assert found[0].stride() == expected[0].stride()
            assert torch.equal(found[0] == 0, expected[0] == 0)
            if dtype == torch.float64:  # in float32 roundings of gradients that are zero would be compared
                for own, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(own, other, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("level", ["rcf", "bnff"])
@pytest.mark.parametrize("weights_last", [False, True])
def test_so_they_are_within_a_budget(level: Level, weights_last: bool) -> None:
    net = _net(3, 3).double()
    net = net.to(memory_format=torch.channels_last_3d) if weights_last else net
    x = _channels_last(torch.randn(2, 4, 4, 4, 4).double())
    fused = shoal.fuse_batchnorm(copy.deepcopy(net), level, when="always")
    plain = shoal.compile(copy.deepcopy(net), budget="1GiB", allow="keep")
    assert shoal.compile(fused, budget="1GiB", allow="keep")(x).stride() == plain(x).stride() == net(x).stride()


def test_images_of_one_channel() -> None:
    """Contiguous and channels_last at once: their strides tell which."""
    for layout in (torch.contiguous_format, torch.channels_last):
        net = nn.Sequential(
            nn.BatchNorm2d(1), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()
        )
        x = torch.randn(2, 1, 6, 6).to(memory_format=layout)
        for level in LEVELS:
            fused = shoal.fuse_batchnorm(copy.deepcopy(net), level, when="always")
            for own, other in zip(_trained(fused, fused, x), _trained(net, net, x), strict=True):
                assert own.stride() == other.stride()
                torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
