"""MONAI: its trainer, a loop with MetaTensors and sliding windows between epochs, and its networks for volumes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.hosts import laws, page

pytest.importorskip("monai", reason="MONAI is not installed: make test-hosts")

from monai.data import DataLoader, MetaTensor
from monai.losses import DiceCELoss
from monai.networks.nets import AttentionUnet, DynUNet, SegResNet, SwinUNETR, UNet, VNet

SIDE = 16
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {  # how it is made, patch, share of bytes
    "UNet": (lambda: UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1), (24, 24, 24), 0.85),
    "DynUNet": (
        lambda: DynUNet(
            3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[8, 16, 32], deep_supervision=True, deep_supr_num=1
        ),
        (24, 24, 24),
        0.8,
    ),
    "SegResNet": (
        lambda: SegResNet(3, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
        (24, 24, 24),
        0.8,
    ),
    "AttentionUnet": (lambda: AttentionUnet(3, 1, 2, (8, 16, 32), (2, 2)), (24, 24, 24), 0.8),
    "VNet": (lambda: VNet(3, 1, 2), (32, 32, 32), 0.985),  # 96 % of it are 45 million parameters
    "SwinUNETR": (  # its smallest patch; it checks the patch in NumPy, where the graph ends
        lambda: SwinUNETR(1, 2, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), feature_size=12),
        (64, 32, 32),
        0.9,
    ),
}


def small() -> nn.Module:
    torch.manual_seed(0)
    return UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1)


def volumes() -> DataLoader:
    """Three batches of MetaTensors, the same every time."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        {
            "image": MetaTensor(torch.randn(1, SIDE, SIDE, SIDE, generator=generator), meta={"filename": f"{n}.nii"}),
            "label": MetaTensor(torch.randint(2, (1, SIDE, SIDE, SIDE), generator=generator)),
        }
        for n in range(6)
    ]
    return DataLoader(rows, batch_size=2)


def run_page(budget: int | None, block: int) -> nn.Module:
    """The network as the lines of the page train it."""
    volume = torch.randn(1, 1, 20, 24, 18, generator=torch.Generator().manual_seed(2))
    net = small()
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    names = {"net": net, "optimizer": optimizer, "loss_function": DiceCELoss(to_onehot_y=True, softmax=True)}
    page.run(page.block("monai.md", block), budget, batches=volumes(), volume=volume, torch=torch, **names)
    return net


@pytest.fixture(scope="module")
def plain_peak_bytes() -> int:
    """It depends on the scratch that this processor's convolutions take."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = run_page(2**34, 0)
    return int(net.shoal.plan.plain_peak_bytes)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("block", [0, 1, 2], ids=["loop", "trainer", "trainer by name"])
def test_it_trains_inside_the_budget(block: int, plain_peak_bytes: int) -> None:
    # The trainer's block stands for both: without a backend's name, `compile=True` is Inductor and not plain PyTorch.
    plain, budget = run_page(None, min(block, 1)), 9 * plain_peak_bytes // 10
    there = {id(status) for status in laws._statuses()}
    planned = run_page(budget, block)
    (status,) = (status for status in laws._statuses() if id(status) not in there)
    assert status.measured_peak_bytes <= budget
    ours, theirs = ({name: value.numpy() for name, value in net.state_dict().items()} for net in (planned, plain))
    assert not laws.beyond_rounding(ours, theirs)


def test_sliding_windows_of_a_compiled_network_are_those_of_the_plain_one() -> None:
    from monai.inferers import sliding_window_inference

    volume = torch.randn(1, 1, 20, 24, 18, generator=torch.Generator().manual_seed(2))
    plain, compiled = small().eval(), shoal.compile(small(), "1GiB").eval()
    with torch.no_grad():
        windows = [sliding_window_inference(volume, (16, 16, 16), 2, net) for net in (plain, compiled)]
    assert torch.equal(*windows)
    assert not compiled.shoal.planning_seconds  # nothing was planned


def trained(name: str, budget: int | None) -> tuple[nn.Module, Any]:
    make, patch, _ = NETWORKS[name]
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    if budget is not None:
        net = shoal.compile(net, budget, optimizer=optimizer, allow="bitwise")
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        image = torch.randn(1, 1, *patch, generator=generator)
        label = torch.randint(2, (1, *patch), generator=generator)
        optimizer.zero_grad()
        output = net(image)
        outputs = output.unbind(1) if name == "DynUNet" else [output]  # deep supervision stacks its scales
        sum(nn.functional.cross_entropy(one, label) for one in outputs).backward()
        optimizer.step()
    return net, getattr(net, "shoal", None)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_monai_trains_inside_a_budget_to_the_bits_of_plain_pytorch(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, _ = trained(name, None)
        _, whole = trained(name, 2**34)
        budget = int(NETWORKS[name][2] * whole.plan.plain_peak_bytes)
        planned, status = trained(name, budget)
    assert status.measured_peak_bytes <= budget
    assert all(torch.equal(value, planned.state_dict()[key]) for key, value in plain.state_dict().items())
