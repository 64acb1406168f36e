"""What layers compute alike of the same is computed once, where no more bytes wait for it."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from tests.engine.training_laws import differences, images, train
from tests.joint_graphs import before_and_after_rewrites, captured_step, operands, run_joint

_aten = torch.ops.aten


class Masked(nn.Module):
    """Adds a mask that every layer makes again, and that is saved with what it is multiplied by."""

    def __init__(self, keeps_mask: bool, flat: bool = False) -> None:
        super().__init__()
        self.scale, self.keeps_mask, self.flat = nn.Parameter(torch.randn(16)), keeps_mask, flat

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        mask = torch.where(allowed, 0.5, -0.5) * 3.0
        if self.flat:
            mask = mask.view(16, 32).view(32, 16)
        return (x * self.scale * mask if self.keeps_mask else x * self.scale + mask).sin()


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, allowed)
        return x


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 16, requires_grad=True), torch.rand(32, 16) > 0.5


def test_a_mask_that_waits_for_the_backward_pass_is_made_once_with_the_same_bits() -> None:
    torch.manual_seed(0)
    before, after = before_and_after_rewrites(Layers(*(Masked(True) for _ in range(3))), *inputs())
    ops = [Counter(op.target for op in step.graph.ops)["aten.where.ScalarSelf"] for step in (before, after)]
    ops += [Counter(op.target for op in step.graph.ops)["aten.where.self"] for step in (before, after)]
    assert sorted(ops) == [0, 0, 1, 3]
    saved = [sum(step.graph.storages[s].nbytes for s in step.graph.saved) for step in (before, after)]
    assert saved[0] - saved[1] == 2 * 32 * 16 * 4
    tensors = operands(before.joint)
    for ours, theirs in zip(run_joint(after.joint, tensors), run_joint(before.joint, tensors), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.mark.parametrize("flat", [False, True], ids=["itself", "through views"])
def test_one_that_would_wait_for_a_later_layer_alone_is_made_again(flat: bool) -> None:
    torch.manual_seed(0)
    step = captured_step(Layers(*(Masked(False, flat) for _ in range(3))), *inputs())
    wheres = [op for op in step.graph.ops if op.target.startswith("aten.where")]
    assert len(wheres) == 3


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.layer(x)


@pytest.mark.parametrize(
    ("layer", "target", "times"), [(nn.Dropout(), "dropout", 2), (nn.Tanh(), "aten.tanh.default", 1)]
)
def test_what_is_drawn_is_drawn_each_time(layer: nn.Module, target: str, times: int) -> None:
    step = captured_step(Twice(layer), torch.randn(32, 16, requires_grad=True))
    found = [op for op in step.graph.ops if op.phase == "forward" and op.target.endswith(target.split("shoal.")[-1])]
    assert len(found) == times


class Both(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.tanh(), x.tanh()


def test_what_the_caller_gets_twice_stays_two_tensors() -> None:
    step = captured_step(Both(), torch.randn(32, 16, requires_grad=True))
    given = [step.storage_of[node] for node in step.forward_outputs if isinstance(node, torch.fx.Node)]
    assert len(set(given[:2])) == 2


class TwicePooled(nn.Module):
    """Pools what two branches read, once for each, as the cells of NASNet do."""

    def __init__(self, second_stride: int = 2) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.second_stride = second_stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        left = self.left(F.max_pool2d(x, 3, 2)).sigmoid()
        right = self.right(F.max_pool2d(x, 3, self.second_stride)).tanh()
        return left.mean((2, 3)) * right.mean((2, 3))


def test_two_poolings_alike_are_one_whose_places_take_a_byte_and_serve_both_gradients() -> None:
    torch.manual_seed(0)
    before, after = before_and_after_rewrites(TwicePooled(), torch.randn(2, 3, 33, 33, requires_grad=True))
    poolings = [op for op in after.graph.ops if op.phase == "forward" and "pool" in op.target]
    gradients = [op for op in after.graph.ops if op.phase == "backward" and "pool" in op.target]
    assert (len(poolings), len(gradients)) == (1, 2)
    written = sorted(after.graph.storages[storage].nbytes for storage in poolings[0].writes)
    assert written == [2 * 8 * 15 * 15, 2 * 8 * 15 * 15 * 4]
    tensors = operands(before.joint)
    for ours, theirs in zip(run_joint(after.joint, tensors), run_joint(before.joint, tensors), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.mark.parametrize(("second_stride", "poolings"), [(2, 1), (1, 2)], ids=["alike", "of other strides"])
@pytest.mark.parametrize("budget", ["1MiB", "500KiB"])
def test_a_network_that_pools_twice_trains_with_the_same_bits(second_stride: int, poolings: int, budget: str) -> None:
    torch.manual_seed(0)
    net = TwicePooled(second_stride)
    planned = shoal.compile(copy.deepcopy(net), budget=budget, allow="bitwise")
    batches = images(2, 4, 3, 33, 33)
    assert not differences(train(planned, batches), train(net, batches))
    targets = [op.target for op in planned.shoal.plan.captured_graph.ops if op.phase == "forward"]
    assert sum("pool" in target for target in targets) == poolings
