"""What is captured runs the kernels of eager PyTorch: the same bits, and nothing different for anyone else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.capture.capture_step import capture_step
from shoal.engine.loop_memory import by_itself
from shoal.lowlevel import torch_internals as module
from shoal.lowlevel.torch_internals import eager_kernels
from tests.engine.training_laws import assert_same_training
from tests.joint_graphs import batch

MODES = {
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "nearest-exact": lambda: nn.Upsample(size=(13, 11), mode="nearest-exact"),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "aligned": lambda: nn.Upsample(size=(13, 11), mode="bilinear", align_corners=True),
    "bicubic": lambda: nn.Upsample(scale_factor=1.7, mode="bicubic"),
}


def model_with(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), layer(), nn.Conv2d(4, 2, 1))


@pytest.mark.parametrize("mode", MODES)
def test_interpolation_is_one_op_each_way_with_the_bits_of_eager_pytorch(mode: str) -> None:
    model = model_with(MODES[mode])
    with eager_kernels():
        captured, _ = capture_step(model, batch(), name="net")
    targets = [op.target for op in captured.graph.ops if op.layer == "1"]
    assert len(targets) == 2
    assert all("upsample" in target for target in targets)
    assert_same_training(model, [batch()])


@pytest.mark.parametrize("mode", MODES)
def test_interpolation_has_its_backward_pass_also_on_meta(mode: str) -> None:
    model = model_with(MODES[mode])
    here, _ = capture_step(model, batch(), name="net")
    there, _ = capture_step(model.to("meta"), batch().to("meta"), name="net")
    assert [(op.phase, op.layer) for op in there.graph.ops] == [(op.phase, op.layer) for op in here.graph.ops]


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(3, 4, 3), layer(6, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.conv(x).flatten(1, 2))[0]


def kernels() -> list[tuple[str, frozenset[object]]]:
    return [(str(overload), frozenset(overload.py_kernels)) for overload in module._decomposed()]


def test_outside_of_the_block_everything_is_as_it_was_also_after_an_error() -> None:
    before = kernels()
    with pytest.raises(ZeroDivisionError), eager_kernels():
        assert kernels() != before
        print(1 // 0)
    assert kernels() == before
    with eager_kernels(), eager_kernels():
        pass
    assert kernels() == before


def test_others_capture_as_they_did() -> None:
    def targets() -> list[str]:
        torch._dynamo.reset()
        captured, _ = capture_step(model_with(MODES["bilinear"]), batch(), name="net")
        return [op.target for op in captured.graph.ops]

    before = targets()
    with eager_kernels():
        pass
    assert targets() == before


def test_a_plan_made_ahead_is_for_the_step_that_is_trained() -> None:
    model = model_with(MODES["bilinear"])
    plan = shoal.plan(model, batch())
    trained = shoal.compile(copy.deepcopy(model), options=shoal.Options(plan=plan))
    trained(batch()).sum().backward()
    assert by_itself(trained.shoal.plan.graph).fingerprint == by_itself(plan.graph).fingerprint


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.unfold(0, 4, 2),
        lambda x: (x.unfold(0, 4, 1), x.sin()),
        lambda x: x.as_strided((2, 2, 2, 2), (1, 1, 1, 1)),
        lambda x: x.view(4, 4).unfold(0, 3, 1).transpose(0, 1),
        lambda x: x.expand(3, 16),
    ],
    ids=["windows", "windows and more", "strided", "turned", "expanded"],
)
def test_gradients_of_results_that_overlap_are_those_of_plain_pytorch(read: Callable[[torch.Tensor], Any]) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(1, 2, 16))

        def forward(self, x: torch.Tensor) -> Any:
            return read((self.weight * x).sin().exp())

    def loss_of(outputs: Any) -> torch.Tensor:
        parts = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum(
            ((one * torch.linspace(0.5, 1.5, one.numel()).view(one.shape)).sum() for one in parts), torch.zeros(())
        )

    assert_same_training(Read(), [torch.rand(16), torch.rand(16)], loss_of=loss_of)
