"""Quantization-aware training is captured as one graph, with plain PyTorch's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    QuantStub,
    disable_observer,
    fuse_modules_qat,
    get_default_qat_qconfig,
    prepare_qat,
)
from torch.ao.quantization.qconfig import default_qat_qconfig

import shoal
from tests.engine.several_graphs import peaks_of
from tests.engine.training_laws import assert_same_training, differences, images, needs_compiler, train

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated


class Net(nn.Module):
    def __init__(self, n_layers: int = 2, channels: int = 8) -> None:
        super().__init__()
        widths = [3, *[channels] * n_layers]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.stub, self.body, self.head = QuantStub(), nn.Sequential(*layers), nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stub(x)).mean((2, 3)))


def prepared(model: Net, qconfig: object = None) -> nn.Module:
    model.qconfig = qconfig or get_default_qat_qconfig("x86")  # type: ignore[assignment]
    return prepare_qat(model.train())


def fused() -> nn.Module:
    model = Net().train()
    return prepared(
        fuse_modules_qat(model, [[f"body.{3 * n}", f"body.{3 * n + 1}", f"body.{3 * n + 2}"] for n in (0, 1)])
    )


def watched() -> nn.Module:
    """Its observers no longer move, as late in training."""
    model = prepared(Net())
    train(model, images(1, 2, 3, 8, 8))
    return model.apply(disable_observer)


@pytest.mark.parametrize(
    "made", [lambda: prepared(Net()), fused, watched], ids=["layers", "fused with batch norm", "observers disabled"]
)
def test_it_is_one_graph_and_trains_as_plain_pytorch(made: Callable[[], nn.Module]) -> None:
    assert assert_same_training(made(), images(3, 2, 3, 8, 8)).shoal.captures == 1


def test_observers_that_branch_on_values_end_graphs() -> None:
    plain, batches = prepared(Net(), default_qat_qconfig), images(2, 2, 3, 8, 8)
    planned = shoal.compile(copy.deepcopy(plain), budget="1TiB")
    assert not differences(train(planned, batches), train(plain, batches))
    assert planned.shoal.captures > 1


def test_a_plan_leaves_the_observers_as_they_were() -> None:
    model = prepared(Net())
    before = copy.deepcopy(model.state_dict())
    shoal.plan(model, images(1, 2, 3, 8, 8)[0])
    assert not differences(model.state_dict(), before)


@pytest.mark.slow
def test_observers_that_are_reset_get_their_sizes_again() -> None:
    def reset(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "reset_min_max_vals"):
                module.reset_min_max_vals()

    plain, planned = prepared(Net()), shoal.compile(prepared(Net()), budget="1TiB")
    planned.load_state_dict(plain.state_dict())
    for model in (plain, planned):
        train(model, images(2, 2, 3, 8, 8))
        reset(model)
    ours, theirs = train(planned, images(2, 2, 3, 8, 8)), train(plain, images(2, 2, 3, 8, 8))
    assert not differences(ours, theirs)


def left_by_a_step(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return dict(model.named_buffers()) | gradients


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_it_trains_in_a_share_of_plain_pytorchs_peak(share: float) -> None:
    plain = prepared(Net(n_layers=4, channels=16))
    planned = copy.deepcopy(plain)
    _, peak_bytes = peaks_of(copy.deepcopy(plain))
    budget_bytes = int(share * peak_bytes)
    shoal.compile(planned, budget=budget_bytes)
    for x in images(3, 8, 3, 32, 32):
        for model in (plain, planned):
            model.zero_grad()
            model(x).square().mean().backward()
        ours, theirs = (
            dict(m.named_buffers()) | {n: p.grad for n, p in m.named_parameters()} for m in (planned, plain)
        )
        assert not differences(ours, theirs)
    status = planned.shoal
    assert status.repairs == 0
    assert status.measured_peak_bytes <= budget_bytes
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
