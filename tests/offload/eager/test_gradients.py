"""Offloading in eager mode gives the gradients of plain PyTorch, bit for bit, in what the others got wrong too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.offload.eager import offload_activations
from shoal.offload.links.open_link import open_link
from tests.engine.training_laws import images
from tests.offload.eager.networks import NETWORKS, assert_the_same, offload_all


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("in_file", [False, True])
def test_gradients_are_those_of_plain_pytorch(name: str, in_file: bool, tmp_path: Path) -> None:
    assert_the_same(NETWORKS[name](), offload_all(tmp_path if in_file else None), images(3, 2, 3, 8, 8))


@pytest.mark.parametrize("name", ["residual", "dense", "written to in place"])
def test_nor_are_they_others_on_a_slow_link(name: str) -> None:
    link = open_link("cpu", "host", None, 3e6, 3e6, 1e-4)
    assert_the_same(NETWORKS[name](), offload_all(link), images(2, 2, 3, 8, 8))


@pytest.mark.parametrize("name", ["residual", "dense", "dropout"])
def test_a_graph_may_be_retained(name: str) -> None:
    assert_the_same(NETWORKS[name](), offload_all(), images(2, 2, 3, 8, 8), backwards=3)


def test_channels_last_comes_back_as_channels_last() -> None:
    batches = [batch.to(memory_format=torch.channels_last) for batch in images(2, 2, 3, 8, 8)]
    model = NETWORKS["residual"]().to(memory_format=torch.channels_last)
    assert_the_same(model, offload_all(), batches)


def test_mixed_precision() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = NETWORKS["residual"]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    assert_the_same(Mixed(), offload_all(), images(2, 2, 3, 8, 8))


def test_two_forwards_before_one_backward() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = NETWORKS["residual"]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.inner(x), self.inner(x + 1)])

    assert_the_same(Twice(), offload_all(), images(2, 2, 3, 8, 8))


def test_a_block_may_stand_in_another_and_around_the_backward_pass() -> None:
    def gradients(block: Callable[[], Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = NETWORKS["residual"]()
        with block():
            with block():
                loss = model(torch.ones(2, 3, 8, 8)).square().sum()
            loss = loss * model(torch.zeros(2, 3, 8, 8)).sum()
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    offloading = offload_all()
    assert all(map(torch.equal, gradients(lambda: offloading), gradients(nullcontext)))


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_of_gradients(inside: bool) -> None:
    def penalty(offloading: offload_activations | None) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Sigmoid())
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        blocks = [offloading] if offloading else []
        for block in blocks:
            block.__enter__()
        loss = model(x).square().sum()
        for block in blocks if not inside else []:
            block.__exit__(None, None, None)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + first.square().sum()).backward()
        for block in blocks if inside else []:
            block.__exit__(None, None, None)
        return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]

    for ours, theirs in zip(penalty(offload_all()), penalty(None), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_on_cuda_too(name: str) -> None:
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=True, deterministic=True, benchmark=False):
        model = NETWORKS[name]().cuda()
        if name == "pooling and up-sampling":
            pytest.skip("its backward pass adds up in any order")
        assert_the_same(model, offload_all(), [batch.cuda() for batch in images(3, 2, 3, 8, 8)])
