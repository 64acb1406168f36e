"""Networks whose steps save, share and write to storages in many ways, trained with and without offloading."""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from shoal.offload.eager import offload_activations
from shoal.offload.links.open_link import OpenLink
from tests.engine.training_laws import classifier, differences, train

module = importlib.import_module("shoal.offload.eager")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="a memory limit on the CPU needs a C++ compiler"
)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(True))
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(self.second(self.first(x)) + x)


class Dense(nn.Module):
    """Each convolution reads the concatenation of all before it, and one reads two slices of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels * (i + 1), channels, 3, padding=1) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for convolution in self.convolutions:
            features.append(F.relu(convolution(torch.cat(features, 1))))
        together = torch.cat(features, 1)
        left, right = together.chunk(2, 1)
        return left.sigmoid() * right.tanh() + left * right


class Shared(nn.Module):
    """One convolution three times."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.convolution(x))
        return x


class Checkpointed(nn.Module):
    def __init__(self, channels: int, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.outside, self.reentrant = Residual(channels), Residual(channels), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(checkpoint(self.inside, self.outside(x), use_reentrant=self.reentrant))


class Written(nn.Module):
    """Storages are written to between two ops that save them, wherever plain PyTorch allows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        y[:, 1:].mul_(0.5)
        y.sigmoid_()
        left, right = (y * y).unsafe_chunk(2, 1)
        left.mul_(3)
        a = left.sin()
        right.mul_(-3)  # both are at version 1 now, and share a storage
        return (
            torch.cat([a, right.cos(), left * right], 1)
            + y.flatten(1).t().exp().t().view_as(y).repeat(1, 2, 1, 1)[:, :6]
        )


def head(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv-bn-relu": lambda: classifier(3, 8, 8, 8),
    "residual": lambda: head(Residual(4), Residual(4)),
    "dense": lambda: head(Dense(4)),
    "dropout": lambda: head(nn.Dropout(0.5), nn.ReLU(True), nn.Dropout2d(0.3)),
    "shared weights": lambda: head(Shared(4)),
    "written to in place": lambda: head(Written(), nn.LeakyReLU(0.1, True)),
    "checkpointed": lambda: head(Checkpointed(4, reentrant=False)),
    "checkpointed, reentrant": lambda: head(Checkpointed(4, reentrant=True)),
    "pooling and up-sampling": lambda: head(nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.AvgPool2d(3)),
    "group norm": lambda: head(nn.GroupNorm(2, 4), nn.SiLU(True), nn.Hardtanh(inplace=True)),
}


def offload_all(link: OpenLink | str | Path | None = None) -> offload_activations:
    return offload_activations(link, min_bytes=1)


@contextmanager
def counted_fetches(link: OpenLink) -> Iterator[list[StorageWeakRef]]:
    """The storages that are fetched, from here on."""
    fetched: list[StorageWeakRef] = []
    fetch = link.fetch

    def record(storage: torch.UntypedStorage, *rest: Any) -> Any:
        fetched.append(StorageWeakRef(storage))
        return fetch(storage, *rest)

    link.fetch = record  # type: ignore[method-assign]
    yield fetched


def assert_the_same(model: nn.Module, offloading: offload_activations, batches: list[Any], **how: Any) -> None:
    expected = train(copy.deepcopy(model), batches, **how)
    found = train(copy.deepcopy(model), batches, around_forward=lambda: offloading, **how)
    assert not differences(found, expected)
    assert offloading.offloaded_bytes > 0, "the test shows nothing"


def raise_an_error(x: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("in the middle")
