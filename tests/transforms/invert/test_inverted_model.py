"""Inverted networks compute and train what they should, with fewer bytes saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from examples import networks as models
from shoal.app.models import Bottleneck
from shoal.core.plan import Plan
from shoal.lowlevel import allocations
from shoal.transforms.invert.invert_norm import invert_norm
from shoal.transforms.invert.inverted_model import InvertedModel
from tests.engine.training_laws import assert_same_training, blocks, images, same_bits, train
from tests.inverted_networks import chain, small_resnet, with_leaky, with_trained_layers
from tests.scratch import needs_little_scratch


@pytest.mark.parametrize("training", [True, False])
def test_the_inverted_network_is_the_one_with_leaky_activations(training: bool) -> None:
    net = with_trained_layers(small_resnet())
    net[4].p = 0.0
    net.train(training)
    expected = with_leaky(net)
    converted = invert_norm(net)
    x = torch.randn(4, 3, 12, 12)
    theirs, ours = expected(x), converted(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    gradients = dict(expected.named_parameters())
    for name, parameter in converted.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-3, atol=1e-5, msg=name)
    for mine, other in zip(converted.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_batch_norms_may_have_one_parameter(missing: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Conv2d(4, 2, 1)).double()
    nn.init.uniform_(net[1].weight, 0.5, 2.0)
    nn.init.uniform_(net[1].bias)
    setattr(net[1], missing, None)
    converted, x = invert_norm(copy.deepcopy(net)), torch.randn(4, 3, 6, 6, dtype=torch.float64)
    assert [site.layer for site in converted.inverted] == ["1"]
    assert converted.reconstruction_errors()["1"].shape == (4,)
    theirs, ours = (torch.autograd.grad(one(x).square().sum(), one.parameters()) for one in (net, converted))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("training", [True, False])
def test_with_norms_of_samples_it_is_the_same_network_and_state(layout: torch.memory_format, training: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.01, inplace=True)),
        *(nn.Conv3d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.LeakyReLU(0.01, inplace=True)),
        nn.Conv3d(8, 2, 1),
    ).to(memory_format=layout)
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([1.0, -1.0, 0.5, 2.0, -0.1, 0.3, 0.7, -2.0]))
    state = copy.deepcopy(net.state_dict())
    converted = invert_norm(copy.deepcopy(net)).train(training)
    assert all(torch.equal(value, state[name]) for name, value in converted.state_dict().items())
    x = torch.randn(2, 1, 6, 6, 6).to(memory_format=layout)
    runs = []
    for model, batch in ((converted, x), (net, x), (copy.deepcopy(net).double(), x.double())):
        model.train(training)(batch).square().mean().backward()
        runs.append({name: p.grad.double() for name, p in model.named_parameters() if name != "0.bias"})
    for name, right in runs[2].items():
        ours, theirs = ((run[name] - right).abs().max() for run in runs[:2])
        assert ours <= 2 * theirs + 1e-6 * right.abs().max(), name
    torch.testing.assert_close(converted(x), net(x), rtol=1e-5, atol=1e-5)
    assert all(same_bits(value, state[name]) for name, value in converted.restore().state_dict().items())


def test_a_plan_of_an_inverted_network_saves_one_tensor_for_a_pair_of_instance_norm_and_activation() -> None:
    def block() -> nn.Sequential:
        pairs = [(nn.Conv3d(8, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU()) for _ in range(3)]
        return nn.Sequential(*(layer for pair in pairs for layer in pair), nn.Conv3d(8, 8, 1))

    x, one = torch.randn(1, 8, 8, 8, 8, requires_grad=True), 8 * 8**3 * 4
    plain, ours = shoal.plan(block(), x), shoal.plan(invert_norm(block()), x)

    assert saved_bytes(plain) - saved_bytes(ours) >= 3 * one
    assert ours.predicted_peak_bytes <= plain.predicted_peak_bytes - 2 * one


def test_state_dicts_go_both_ways() -> None:
    net = with_trained_layers(small_resnet())
    state = copy.deepcopy(net.state_dict())
    converted = invert_norm(small_resnet())
    converted.load_state_dict(state)
    small_resnet().load_state_dict(converted.state_dict())
    assert [name for name, _ in converted.named_parameters()] == [name for name, _ in net.named_parameters()]
    x = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(converted.eval()(x), with_leaky(net).eval()(x), rtol=1e-3, atol=1e-3)


def test_dropout_and_statistics_follow_the_mode() -> None:
    converted = invert_norm(small_resnet())
    x = torch.randn(4, 3, 12, 12)
    converted.eval()
    assert torch.equal(converted(x), converted(x))
    assert converted.get_buffer("1.num_batches_tracked") == 0
    converted.train()
    assert not torch.equal(converted(x), converted(x))
    assert converted.get_buffer("1.num_batches_tracked") == 2


def test_training_reduces_the_loss_with_accumulated_gradients() -> None:
    converted = invert_norm(small_resnet())
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.1, momentum=0.9)
    x, targets = torch.randn(10, 3, 12, 12), torch.arange(10) % 5
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        for half in (slice(0, 5), slice(5, 10)):
            loss = F.cross_entropy(converted(x[half]), targets[half]) / 2
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0] / 2


def test_a_copy_is_independent() -> None:
    converted = invert_norm(small_resnet())
    twin = copy.deepcopy(converted)
    with torch.no_grad():
        twin.get_parameter("1.weight").zero_()
    x = torch.randn(2, 3, 12, 12)
    assert not torch.equal(twin.eval()(x), converted.eval()(x))
    assert converted.get_parameter("1.weight").min() > 0.9


def saved_bytes(plan: Plan) -> int:
    graph = plan.graph
    written = {storage for op in graph.ops[: graph.n_forward] for storage in op.writes}
    read = {storage for op in graph.ops[graph.n_forward :] for storage in op.reads}
    saved = [graph.storages[storage] for storage in written & read]
    return sum(one.nbytes for one in saved if one.kind != "output")  # such as new running statistics


def test_in_eager_mode_a_step_saves_and_needs_less() -> None:
    x = torch.randn(4, 3, 32, 32)
    one = 4 * 16 * 32 * 32 * 4

    def cost(net: nn.Module) -> tuple[int, int]:
        held: dict[int, int] = {}
        known = {p.data_ptr() for p in (*net.parameters(), x)}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.data_ptr() not in known:
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = net(x).square().sum()
        del loss
        _, changes = allocations.record(lambda: net(x).square().sum().backward())
        return sum(held.values()), allocations.peak_bytes(changes)

    (plain_saved, plain_peak), (saved, peak) = cost(chain()), cost(invert_norm(chain()))
    assert plain_saved >= 6 * one
    assert saved <= 3.1 * one
    assert peak <= plain_peak - 2 * one


@needs_little_scratch
def test_under_shoal_less_is_saved_and_the_prediction_holds() -> None:
    x = torch.randn(4, 3, 32, 32)
    plain, ours = shoal.plan(chain(), x), shoal.plan(invert_norm(chain()), x)
    one = 4 * 16 * 32 * 32 * 4
    assert saved_bytes(plain) - saved_bytes(ours) >= 2 * one
    assert saved_bytes(ours) <= 3.2 * one
    assert ours.predicted_peak_bytes <= plain.predicted_peak_bytes - 2 * one
    assert {op.layer for op in ours.graph.ops if "inverted" in op.target} == {"0.1", "1.1", "2.1"}
    model = shoal.compile(invert_norm(chain()))
    for _ in range(2):
        model(x).square().sum().backward()
        model.zero_grad()
    assert model.shoal.measured_peak_bytes == pytest.approx(model.shoal.predicted_peak_bytes, rel=0.02)


def test_under_shoal_a_block_of_resnet_saves_one_tensor_for_a_pair_where_it_saved_two() -> None:
    def block() -> nn.Sequential:
        ahead = nn.Conv2d(3, 64, 3, padding=1)
        return nn.Sequential(ahead, Bottleneck(64, 16, 1, None), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    x = torch.randn(2, 3, 12, 12)
    plain, ours = shoal.plan(block(), x), shoal.plan(invert_norm(block()), x)
    (one, vector), pairs = (2 * 16 * 12 * 12 * 4, 16 * 4), 2
    # Mean and inverse deviation, of which the inverted form saves the second.
    assert saved_bytes(plain) - saved_bytes(ours) == pairs * (one + vector)
    forward = [op.target for op in ours.graph.ops[: ours.graph.n_forward]]
    assert forward.count("shoal.inverted_batch_norm.default") == pairs
    kept = {s.layer: s.nbytes for s in ours.graph.storages if s.kind == "activation" and s.nbytes == one}
    assert {"1.bn1", "1.bn2"} <= set(kept)


def test_after_ten_steps_that_recompute_statistics_are_those_of_plain_batch_norm() -> None:
    batches = images(10, 4, 3, 12, 12)
    net = nn.Sequential(*blocks(3, 8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    plain = copy.deepcopy(net)
    for part in plain[:2]:
        part[2] = nn.LeakyReLU(0.01)
    planned = assert_same_training(nn.Sequential(invert_norm(net)), batches)
    assert any("inverted" in op.target for op in planned.shoal.plan.graph.ops)
    train(plain, batches)
    for (name, ours), theirs in zip(planned.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)
        assert "tracked" not in name or ours == 10


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"around_forward": lambda: torch.autocast("cpu", torch.bfloat16)},
        {"batches_a_step": 2},
    ],
)
def test_planned_training_has_the_bits_of_eager_training(how: dict[str, Any]) -> None:
    layout = torch.channels_last if "batches_a_step" in how else torch.contiguous_format
    net = nn.Sequential(invert_norm(small_resnet())).to(memory_format=layout)
    assert_same_training(net, [batch.to(memory_format=layout) for batch in images(2, 4, 3, 12, 12)], **how)


def test_networks_of_the_zoo_are_converted_or_left_and_run() -> None:
    for name, inverted, size in (("resnet18_cifar", 9, 32), ("mobilenet_v2", 0, 32), ("densenet121", 120, 32)):
        converted = invert_norm(models.build(name, seed=0))
        assert isinstance(converted, InvertedModel)
        assert len(converted.inverted) >= inverted
        assert converted.eval()(torch.randn(1, 3, size, size)).isfinite().all()


def phantoms(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Volumes of noise with an ellipsoid each, and where it is."""
    draws = torch.Generator().manual_seed(seed)
    centres, radii = torch.rand(4, 3, generator=draws) + 0.5, torch.rand(4, 3, generator=draws) / 2 + 0.4
    axes = torch.linspace(0, 2, 12)
    grid = torch.stack(torch.meshgrid(axes, axes, axes, indexing="ij"), -1)
    inside = (((grid - centres.view(4, 1, 1, 1, 3)) / radii.view(4, 1, 1, 1, 3)) ** 2).sum(-1) < 1
    return (inside + 0.5 * torch.randn(inside.shape, generator=draws)).unsqueeze(1), inside.long()


def trained_losses(seed: int, *, inverts: bool) -> torch.Tensor:
    torch.manual_seed(seed)
    layers = [
        (nn.Conv3d(before, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.01, inplace=True))
        for before in (1, 8, 8)
    ]
    net: nn.Module = nn.Sequential(*(layer for three in layers for layer in three), nn.Conv3d(8, 2, 1))
    net = invert_norm(net, slope=None) if inverts else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for volumes, labels in (phantoms(100 * seed + step) for step in range(20)):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(volumes), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.slow
def test_a_segmentation_trains_as_with_plain_norms_well_within_what_seeds_differ_by() -> None:
    plain, inverted = (
        torch.stack([trained_losses(seed, inverts=inverts) for seed in range(3)]) for inverts in (False, True)
    )
    assert inverted.mean(0)[-1] < 0.7 * inverted.mean(0)[0]
    assert (inverted - plain).abs().max() < 0.1 * plain.std(0).mean()
