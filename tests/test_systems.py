"""The five published systems, each in small: a network trains with it, in fewer bytes or the same function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shoal
from examples.planners import NAMES
from shoal.distributed import AdaptivePrecision, HostWeights, compress_gradients
from tests.engine.training_laws import blocks
from tests.ranks import run_on_ranks

HARDWARE = "p100-nvlink"


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*blocks(3, 16, 16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def images() -> torch.Tensor:
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Losses of three steps, which fall."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images()), torch.arange(8) % 4)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    return losses


def split_cnn_with_hmms() -> None:
    with torch.device("meta"):
        patched = shoal.split(layers(), 0.5, (2, 2))
        plan = shoal.plan(
            patched, torch.empty(8, 3, 32, 32), "1GiB", hardware=HARDWARE, options=shoal.Options(planner=NAMES["hmms"])
        )
    assert plan.offloaded and plan.predicted_peak_bytes < plan.plain_peak_bytes
    trained(
        shoal.compile(
            shoal.split(layers(), 0.5, (2, 2)), "1GiB", options=shoal.Options(planner=NAMES["hmms"], rehearse=HARDWARE)
        )
    )


def offloading_with_invertible_batch_norm() -> None:
    inverted = shoal.invert_norm(layers(), slope=0.01)
    assert inverted.describe().startswith("3 of 3 norms inverted")
    with shoal.offload_activations(min_bytes=1):
        trained(inverted)
    inverted = shoal.invert_norm(layers(), slope=0.01)
    options = shoal.Options(planner="examples.planners.hascoet:hascoet", rehearse=HARDWARE)
    trained(shoal.compile(inverted, "1GiB", options=options))
    assert inverted.shoal.plan.offloaded


def fission_n_fusion() -> None:
    plain, fused = layers(), shoal.fuse_batchnorm(layers(), when="always")
    assert "3 fused, 0 left" in str(fused.summary)
    assert trained(fused) == pytest.approx(trained(plain), rel=1e-4)


def approximations_in_8_bits() -> None:
    losses, sent, raw = run_on_ranks(trained_in_8_bits, 2)[0]
    assert losses[-1] < losses[0] and 0 < sent < 0.5 * raw


def trained_in_8_bits() -> tuple[list[float], int, int]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(layers())
    gradients = compress_gradients(model, "dynamic_tree")
    losses = trained(model)
    total = gradients.traffic.total()
    gradients.close()
    return losses, total.sent_bytes, total.raw_bytes


def a2dtwp() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = AdaptivePrecision(model, threshold=-1e-9, interval=1)
    weights = HostWeights(model, optimizer, precision=precision, one_byte="dynamic_tree")
    trained(model, optimizer)
    sent = weights.traffic.total("weights")
    weights.close()
    assert 0 < sent.sent_bytes < sent.raw_bytes


@pytest.mark.parametrize(
    "system",
    [split_cnn_with_hmms, offloading_with_invertible_batch_norm, fission_n_fusion, approximations_in_8_bits, a2dtwp],
    ids=lambda system: system.__name__,
)
def test_a_system_of_the_papers_trains(system: Callable[[], None]) -> None:
    system()
