"""Compiled regions on CUDA: fewer launches than one by one, and the bytes that were predicted.

Their code does nothing here, so nothing can be measured: every region stays.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.engine import compiled_regions
from tests.cuda_standin.counts import device_counts
from tests.engine.compile.compiled import Residual
from tests.engine.training_laws import blocks


def launches_of_a_step(model: nn.Module, x: torch.Tensor) -> int:
    """Of the third one, in bfloat16 autocast."""
    target = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    before = 0
    for _ in range(3):
        model.zero_grad()
        before = device_counts().launches
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
    return device_counts().launches - before


def test_a_step_launches_less_and_takes_the_predicted_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_regions, "_SLOWER", math.inf)
    torch.manual_seed(0)
    body = [*blocks(3, 32), Residual(32), *blocks(32, 32), Residual(32)]
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).cuda()
    x = torch.randn(8, 3, 32, 32, device="cuda")
    one_by_one, joined = (
        shoal.compile(copy.deepcopy(net), kernels=kernels, budget="1GiB", allow="recompute")
        for kernels in ("eager", "compiled")
    )
    assert launches_of_a_step(joined, x) <= launches_of_a_step(one_by_one, x) - 10  # an op for each of its regions
    assert joined.shoal.plan.compiled == ("12 regions of 27 ops, 7 of them different",)
    assert joined.shoal.measured_peak_bytes == pytest.approx(joined.shoal.predicted_peak_bytes, rel=0.02)
