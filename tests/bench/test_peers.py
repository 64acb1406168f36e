"""Peers at their best: checkpoints by hand train as their network does; the fastest setting that fits is chosen."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bench.chain import Chain
from bench.peers import Candidate, Scouted, checkpointed, extrapolate, fastest_within, least, scout, sequence
from bench.workload import make_workload
from examples import networks as models
from examples.networks.densenet import DenseNet
from examples.networks.unet import UNet

SMALL = {
    "chain": (lambda: Chain(blocks=3, channels=4), (2, 3, 8, 8)),
    "resnet18": (lambda: models.build("resnet18", num_classes=4), (2, 3, 32, 32)),
    "densenet": (lambda: DenseNet((2, 3), num_classes=4), (2, 3, 32, 32)),
    "unet": (lambda: UNet(2, 2, 4, 2, 3), (2, 3, 16, 16)),
    "unet3d": (lambda: UNet(3, 1, 4, 2, 1), (2, 1, 8, 8, 8)),
}


@pytest.mark.parametrize("name", SMALL)
def test_checkpointing_by_hand_gives_plain_gradients(name: str) -> None:
    make, shape = SMALL[name]
    model, x = make(), torch.randn(shape)
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    settings = []
    for setting, forward in checkpointed(model):
        model.zero_grad(set_to_none=True)
        forward(x).square().mean().backward()
        for (who, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad), f"{setting}: {who}"
        settings.append(setting)
    assert len(settings) == len(set(settings)) >= 2


@pytest.mark.parametrize("name", ["googlenet", "mobilenet_v2", "vgg16_bn", "resnet50", "densenet121"])
def test_blocks_in_a_row_are_the_network(name: str) -> None:
    model = models.build(name, num_classes=3, seed=0).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(nn.Sequential(*sequence(model))(x), model(x))


def test_a_network_nobody_has_cut_is_named() -> None:
    with pytest.raises(TypeError, match="Linear has no blocks"):
        sequence(nn.Linear(2, 2))


def scouted(setting: str, peak_bytes: float, seconds: float, exact: bool = True) -> Scouted:
    return Scouted(Candidate("checkpoint", setting, lambda x: x), peak_bytes, seconds, exact)


def test_the_fastest_that_fits_is_chosen() -> None:
    found = [scouted("large", 90, 1.0), scouted("slow", 40, 3.0), scouted("good", 50, 2.0)]
    chosen = fastest_within(found, 60, lambda one: one.peak_bytes)
    assert chosen is not None and chosen.candidate.setting == "good"
    assert fastest_within(found, 30, lambda one: one.peak_bytes) is None


def test_a_prediction_has_to_be_confirmed() -> None:
    found = [scouted("hopeful", 50, 1.0, exact=False), scouted("just over", 61, 2.0, exact=False)]
    truth = {"hopeful": 70, "just over": 59}
    chosen = fastest_within(found, 60, lambda one: truth[one.candidate.setting])
    assert chosen is not None and chosen.candidate.setting == "just over"
    lowest = least(found, lambda one: truth[one.candidate.setting])
    assert lowest is not None and lowest.candidate.setting == "just over"


def test_a_peak_is_drawn_through_two_batch_sizes() -> None:
    whole = make_workload("resnet18_cifar", 8, 32)
    assert extrapolate([30, 50], [2, 4], whole) == 90


def test_contenders_share_parameters() -> None:
    workload = make_workload("resnet18_cifar", 1, 32)
    twin = workload.shared_copy()
    assert all(a is b for a, b in zip(twin.parameters(), workload.model.parameters(), strict=True))
    assert all(a is b for a, b in zip(twin.buffers(), workload.model.buffers(), strict=True))
    assert twin is not workload.model and twin.fc is not workload.model.fc


def test_a_setting_that_fails_is_told_and_one_over_every_budget_is_not_timed() -> None:
    workload = make_workload("resnet18_cifar", 1, 32)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a variable was modified\nby an in-place operation")

    found = [Candidate("checkpoint", "broken", broken), Candidate("checkpoint", "plain", workload.shared_copy())]
    (plain,), failed = scout(found, workload, most_bytes=1, advance=lambda what: None)
    assert failed == {"checkpoint broken": "a variable was modified"}
    assert plain.seconds == float("inf") and plain.peak_bytes > 2 * workload.parameter_bytes
