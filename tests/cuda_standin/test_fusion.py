"""What fused batch norms launch on CUDA in eager mode."""

from __future__ import annotations

import copy

import torch
from torch import nn

import shoal
from tests.cuda_standin.counts import device_counts
from tests.engine.training_laws import blocks


def launches_of_a_step(model: nn.Module, x: torch.Tensor) -> int:
    """Of the second one."""
    for _ in range(2):
        before = device_counts().launches
        model(x).sum().backward()
    return device_counts().launches - before


def test_a_small_map_is_left_to_pytorchs_layers_where_launching_would_take_longer_than_computing() -> None:
    net, x = nn.Sequential(*blocks(8, 8, 8, 8)).cuda(), torch.empty(4, 8, 16, 16, device="cuda")
    plain, pays, always = (
        launches_of_a_step(model, x)
        for model in (
            copy.deepcopy(net),
            shoal.fuse_batchnorm(copy.deepcopy(net)),
            shoal.fuse_batchnorm(copy.deepcopy(net), when="always"),
        )
    )
    assert pays == plain < always
