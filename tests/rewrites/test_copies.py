"""What layers compute alike of the same is computed once; gradients written into zeros as a whole are views.

The bits are those of eager PyTorch, and no more bytes are in use at any time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import shoal
from shoal.graph.joint import Joint
from shoal.rewrites.copies import view_what_is_written, whole_scatters
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


class Strided(nn.Module):
    """Rows of features read by an `as_strided` of its own, between two layers that need the gradient."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.read = nn.Linear(6, 8), read
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.read(self.first(x).sin()).reshape(-1, 4))  # type: ignore[no-any-return]


def pooled() -> nn.Module:
    """Pooled to a pixel, of a channels_last map, which PyTorch's own formula ends in an `as_strided`."""
    body = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*body).to(memory_format=torch.channels_last)


def ops_of_a_step(model: nn.Module, x: torch.Tensor) -> list[str]:
    """The ops of a planned step whose output and gradients have eager PyTorch's bits."""
    plain = copy.deepcopy(model)
    planned = shoal.compile(model, budget="1GiB", allow="bitwise", options=shoal.Options(kernels="eager"))
    for _ in range(2):
        outputs = []
        for one in (plain, planned):
            one.zero_grad()
            outputs.append(one(x))
            outputs[-1].square().sum().backward()
        assert torch.equal(*outputs)
        for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
    return [op.target for op in planned.shoal.plan.graph.ops]


def test_the_gradient_of_pooling_to_a_pixel_is_a_view() -> None:
    torch.manual_seed(0)
    ops = ops_of_a_step(pooled(), torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last))
    assert "aten.mean.dim" in ops  # PyTorch's own formula
    assert not {"aten.as_strided_scatter.default", "aten.new_zeros.default"} & set(ops)


@pytest.mark.parametrize(("dtype", "n_scatters"), [(torch.float64, 0), (torch.float32, 1)])
def test_what_is_written_in_another_dtype_is_not_what_lies_there(dtype: torch.dtype, n_scatters: int) -> None:
    def read_back(x: torch.Tensor) -> torch.Tensor:
        zeros = torch.ops.aten.new_zeros.default(x, [6])
        whole = torch.ops.aten.as_strided_scatter.default(zeros, x.to(dtype).sin(), [2, 3], [3, 1], 0)
        return torch.ops.aten.as_strided.default(whole, [3, 2], [2, 1], 0) * 2

    x = torch.randn(2, 3, dtype=torch.float64)
    module = make_fx(read_back, tracing_mode="fake")(x)
    joint = Joint(module, set())
    for site in whole_scatters(joint):
        view_what_is_written(joint, site)
    module.recompile()
    scatters = module.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided_scatter.default)
    assert len(scatters) == n_scatters
    assert torch.equal(module(x), read_back(x)) and module(x).dtype == torch.float64


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y.as_strided((4, 8), (8, 1)),
        lambda y: y.as_strided((4, 2, 4), (8, 4, 1)),
        lambda y: y.as_strided((8, 4), (1, 8)),
        lambda y: y.as_strided((4, 4), (8, 1)),
        lambda y: y.as_strided((3, 8), (8, 1), 8),
        lambda y: y.as_strided((5, 8), (4, 1)),
        lambda y: y.transpose(0, 1).as_strided((4, 8), (8, 1)),
        lambda y: (y[1:] * 2).as_strided((2, 8), (8, 1)) + y.as_strided((2, 8), (16, 1)),
    ],
    ids=["all", "all, cut", "turned", "half of each row", "from the second row", "overlapping", "of a view", "summed"],
)
def test_any_as_strided_has_eager_pytorchs_gradient(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    ops_of_a_step(Strided(read), torch.randn(4, 6))
