"""What transforms return is the network under its own names, and what one returned another takes or refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.app.models import Bottleneck, ResNet
from shoal.errors import InputError
from shoal.transforms.invert.invert_norm import invert_norm
from shoal.transforms.split.split import split
from shoal.transforms.stand_in import StandIn
from tests.engine.training_laws import assert_same_training, classifier, images
from tests.inverted_networks import small_resnet, with_leaky, with_trained_layers
from tests.raising import raising
from tests.ranks import run_on_ranks

Transform = Callable[[nn.Module], Any]


def in_half(model: nn.Module) -> nn.Module:
    return split(model, depth=0.5)


def fuse_batchnorm(model: nn.Module) -> nn.Module:
    return shoal.fuse_batchnorm(model, when="always")  # tests have small maps


def exactly(model: nn.Module) -> nn.Module:
    return split(model, depth=0.5, halo="exact")


def drawn(model: nn.Module) -> nn.Module:
    return split(model, depth=0.5, stochastic=0.2)


def there_and_back(model: nn.Module) -> nn.Module:
    return invert_norm(model).restore()


TRANSFORMS: list[Transform] = [in_half, fuse_batchnorm, invert_norm, there_and_back]
each = pytest.mark.parametrize("transform", TRANSFORMS)


def network() -> nn.Sequential:
    """Trained, without dropout."""
    net = with_trained_layers(small_resnet())
    net[4].p = 0.0
    assert isinstance(net, nn.Sequential)
    return net


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Result, gradients and statistics of a step."""
    y = model(x)
    gradients = torch.autograd.grad(y.square().mean(), list(model.parameters()))
    return [y.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


@each
def test_hooks_on_the_network_run_once_a_call_whatever_the_mode_and_whoever_has_them(transform: Transform) -> None:
    net, seen = network(), []
    net.register_forward_pre_hook(lambda *_: seen.append("before"))
    net.register_full_backward_hook(lambda *_: seen.append("backward"))
    model = transform(net)
    model.register_forward_hook(lambda *_: seen.append("after"))
    x = torch.randn(4, 3, 16, 16, requires_grad=True)
    for training in (True, False):
        model.train(training)
        model(x).sum().backward()
        assert seen == ["before", "after", "backward"]
        seen.clear()


@each
def test_the_network_s_own_train_decides(transform: Transform) -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self[1].eval()
            return self

    net = Frozen(*network())
    model = transform(net).eval()
    assert not net.training and not model.training and not any(module.training for module in model.modules())
    assert model.train() is model
    assert net.training and model.training and net[6].training and not net[1].training
    model(torch.randn(4, 3, 16, 16))
    assert net[1].num_batches_tracked == 0 and net[6].num_batches_tracked > 0


@each
def test_what_is_set_in_one_is_set_in_the_other(transform: Transform) -> None:
    net = network()
    model = transform(net)
    assert isinstance(model, StandIn) and net not in list(model.modules())
    model.register_buffer("mark", torch.ones(1), persistent=False)
    net[10] = nn.Linear(8, 7)
    assert net.get_buffer("mark") is model.get_buffer("mark")
    assert "mark" not in model.state_dict() and list(model.state_dict()) == list(net.state_dict())
    assert model.get_submodule("10") is net[10]
    twin = copy.deepcopy(model)
    assert twin.get_submodule("10") is twin.source[10] and twin.source is not net


def deep() -> nn.Module:
    torch.manual_seed(0)
    return ResNet(Bottleneck, (1, 1, 1, 1), 3)


@pytest.mark.parametrize("make", [network, deep])
def test_of_an_inverted_network_the_batch_norms_that_stayed_are_fused(make: Callable[[], nn.Module]) -> None:
    net = make()
    x = torch.randn(4, 3, 48, 48)
    inverted = invert_norm(copy.deepcopy(net))
    both = fuse_batchnorm(invert_norm(copy.deepcopy(net)))
    assert both.summary.fused
    converted = {site.layer for site in inverted.inverted}
    reasons = {left.layer: left.reason for left in both.summary.left}
    assert {reasons[layer] for layer in converted} == {"it is inverted"}
    assert not converted & {fused.layer for fused in both.summary.fused}
    for training in (True, False):
        inverted.train(training)
        both.train(training)
        for ours, theirs in zip(step(both, x), step(inverted, x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4 * float(theirs.abs().max()) + 1e-6)


def saved_bytes(model: nn.Module) -> int:
    """What a step keeps of activations, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(torch.randn(4, 3, 48, 48))
    del y
    return sum(kept.values())


def test_together_they_save_no_more_than_the_better_of_both() -> None:
    inverted, fused = (saved_bytes(transform(deep())) for transform in (invert_norm, fuse_batchnorm))
    assert saved_bytes(fuse_batchnorm(invert_norm(deep()))) <= inverted < fused < saved_bytes(deep())


@pytest.mark.parametrize("training", [True, False])
def test_an_inverted_network_is_split_as_the_one_with_leaky_activations(training: bool) -> None:
    net, x = network(), torch.randn(4, 3, 16, 16)
    ours, theirs = split(invert_norm(copy.deepcopy(net)), depth=0.6), split(with_leaky(net), depth=0.6)
    assert ours.describe((16, 16)) == theirs.describe((16, 16))
    ours.train(training)
    theirs.train(training)
    for mine, other in zip(step(ours, x), step(theirs, x), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-6)
    ours, theirs = split(invert_norm(copy.deepcopy(net)), stochastic=0.2), split(with_leaky(net), stochastic=0.2)
    torch.manual_seed(5)
    expected = theirs(x)
    torch.manual_seed(5)
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)


def test_a_converted_layer_can_be_joined_behind_by_its_name() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)))
    for name in ("0", "0.1", "0.2"):
        divided = split(invert_norm(copy.deepcopy(net)), join=name)
        assert divided.plan is not None and len(divided.plan.steps) == 2  # the convolution, and both others as one


def test_statistics_of_all_patches_are_no_inverted_batch_norm_s() -> None:
    inverted = invert_norm(network())
    for way in ({"halo": "exact"}, {"batch_norm": "joint"}):
        with raising(InputError, "batch_norm="):
            split(inverted, depth=0.5, **way)  # type: ignore[arg-type]
    without = invert_norm(nn.Sequential(nn.Conv2d(3, 3, 3), nn.MaxPool2d(2), nn.Conv2d(3, 3, 3)))
    assert split(without, depth=0.5, halo="exact").plan is not None


@pytest.mark.parametrize(
    ("first", "then", "complaint"),
    [
        (fuse_batchnorm, invert_norm, "shoal.fuse_batchnorm"),
        (
            in_half,
            invert_norm,
            "shoal.split",
        ),
        (invert_norm, invert_norm, ""),
        (fuse_batchnorm, in_half, "shoal.fuse_batchnorm"),
        (in_half, in_half, "shoal.split"),
        (in_half, fuse_batchnorm, "shoal.split"),
        (drawn, fuse_batchnorm, "shoal.split"),
        (fuse_batchnorm, fuse_batchnorm, "shoal.fuse_batchnorm"),
    ],
)
def test_the_wrong_order_is_refused_and_nothing_changes(first: Transform, then: Transform, complaint: str) -> None:
    model = first(network())
    state = copy.deepcopy(model.state_dict())
    with raising(InputError, complaint):
        then(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model(torch.randn(4, 3, 16, 16))


@pytest.mark.parametrize("last", [fuse_batchnorm, in_half, exactly])
def test_a_restored_network_is_one_like_any_other(last: Transform) -> None:
    net, x = network(), torch.randn(4, 3, 16, 16)
    ours, theirs = last(there_and_back(copy.deepcopy(net))), last(with_leaky(net))
    for mine, other in zip(step(ours, x), step(theirs, x), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("last", [fuse_batchnorm, in_half])
def test_both_together_train_planned_with_the_bits_of_eager_training(last: Transform) -> None:
    planned = assert_same_training(nn.Sequential(last(invert_norm(network()))), images(2, 4, 3, 16, 16))
    targets = [op.target for op in planned.shoal.plan.graph.ops]
    assert "shoal.inverted_batch_norm.default" in targets and "shoal.inverted_batch_norm_backward.default" in targets
    if last is fuse_batchnorm:
        assert any("norm_act" in target or "norm_conv" in target for target in targets)


def test_drawn_cuts_reach_inverted_batch_norms_under_one_plan() -> None:
    model = shoal.compile(split(invert_norm(classifier(3, 4, 4)), depth=0.5, grid=(2, 1), stochastic=0.2))
    for batch in images(3, 2, 3, 16, 16):
        model(batch).square().mean().backward()
        model.zero_grad()
        assert len(model.shoal.plans) == 1
    assert "shoal.inverted_batch_norm.default" in {op.target for op in model.shoal.plan.graph.ops}


def with_leaky_relu(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1))


def of_sharded_blocks() -> list[str]:
    """What each transform does before and after `fully_shard` of the blocks, on one of several ranks."""
    from torch.distributed.fsdp import fully_shard

    def ended(run: Callable[[], object]) -> str:
        try:
            run()
        except InputError:
            return "refused"
        return "trains"

    def later(transform: Transform) -> object:
        model = nn.Sequential(with_leaky_relu(3), with_leaky_relu(8))
        transformed = transform(model)
        fully_shard(model[0])
        return fully_shard(transformed)(torch.ones(2, 3, 8, 8)).sum().backward()

    def before(transform: Transform) -> object:
        model = nn.Sequential(with_leaky_relu(3), with_leaky_relu(8))
        fully_shard(model[0])
        return transform(fully_shard(model))(torch.ones(2, 3, 8, 8)).sum().backward()

    transforms = (in_half, invert_norm, fuse_batchnorm)
    return [ended(lambda t=t, order=order: order(t)) for order in (later, before) for t in transforms]


def test_layers_whose_blocks_are_sharded_are_not_called_one_by_one() -> None:
    each = ["refused", "refused", "trains"] * 2  # what is fused calls sharded blocks as they are
    assert run_on_ranks(of_sharded_blocks, 2) == [each] * 2
