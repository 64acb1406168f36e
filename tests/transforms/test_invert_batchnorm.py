"""Networks in the inverted form and back: by structure, told in the open, and with fewer bytes saved."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal import allocations, models
from shoal.errors import CaptureError, InputError
from shoal.plan import Plan
from shoal.runtime import inverted_batch_norm_reference
from shoal.transforms.invert_batchnorm import InvertedModel, RestoredModel, invert_batchnorm, restore_batchnorm
from tests.training_laws import assert_same_training, conv_bn_relu, images


class Residual(nn.Module):
    """A block with one ReLU for two places, as torchvision's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + x)


def small_resnet() -> nn.Sequential:
    """Four batch norms, of which two are before an addition."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Residual(8),
        nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def with_trained_layers(net: nn.Module, least: float = 0.2) -> nn.Module:
    """Batch norms as training leaves them, negative scales included."""
    generator = torch.Generator().manual_seed(3)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            drawn = torch.randn(module.num_features, generator=generator)
            nn.init.zeros_(module.bias)
            with torch.no_grad():
                module.weight.copy_(torch.where(drawn < 0, drawn - least, drawn + least))
                module.bias.copy_(torch.randn(module.num_features, generator=generator) / 2)
                module.running_mean.copy_(drawn / 4)
                module.running_var.copy_(drawn.abs() + 0.5)
    return net


def with_leaky(net: nn.Sequential, slope: float = 0.01) -> nn.Sequential:
    """The converted function in PyTorch's own modules; in `Residual` the first ReLU alone."""

    class Leaky(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.bn2(self.conv2(F.leaky_relu(self.bn1(self.conv1(x)), slope)))
            return self.relu(out + x)

    net = copy.deepcopy(net)
    net[2] = nn.LeakyReLU(slope)
    net[3].__class__ = Leaky
    return net


@pytest.mark.parametrize("training", [True, False])
def test_the_inverted_network_is_the_one_with_leaky_activations(training: bool) -> None:
    net = with_trained_layers(small_resnet())
    net[4].p = 0.0
    net.train(training)
    expected = with_leaky(net)
    converted = invert_batchnorm(net)
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


def test_what_is_converted_and_what_is_not_is_told() -> None:
    converted = invert_batchnorm(small_resnet(), slope=0.05)
    assert [(site.layer, site.was, site.activation, site.slope) for site in converted.inverted] == [
        ("1", "ReLU", "leaky_relu", 0.05),
        ("3.bn1", "ReLU", "leaky_relu", 0.05),
        ("6", "ELU", "elu", 1.0),
    ]
    assert [left.layer for left in converted.left] == ["3.bn2"]
    told = converted.describe().splitlines()
    assert told[0] == "3 of 4 batch norms inverted"
    assert told[-1] == "3.bn2  kept: there is no ReLU, LeakyReLU or ELU behind it but add"


class Functional(nn.Module):
    """Activations as functions and methods, a slope of its own, and what cannot be converted."""

    def __init__(self) -> None:
        super().__init__()
        for place in range(8):
            self.add_module(f"bn{place}", nn.BatchNorm1d(4))
        self.flat, self.clipped = nn.LeakyReLU(0.0), nn.ReLU6()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn0(x))
        x = self.bn1(x).relu_()
        x = F.leaky_relu(self.bn2(x), negative_slope=0.2)
        x = F.elu(self.bn3(x), 0.5)
        x = self.flat(self.bn4(x))
        x = self.clipped(self.bn5(x))
        x = self.bn6(x)
        return torch.relu(x) + self.bn7(x)


def test_activations_are_found_as_functions_methods_and_modules() -> None:
    converted = invert_batchnorm(Functional())
    assert [(site.layer, site.slope) for site in converted.inverted] == [
        ("bn0", 0.01),
        ("bn1", 0.01),
        ("bn2", 0.2),
        ("bn3", 0.5),
    ]
    reasons = {left.layer: left.reason for left in converted.left}
    assert reasons["bn4"] == "the LeakyReLU(0) behind it has no inverse"
    assert reasons["bn5"] == "there is no ReLU, LeakyReLU or ELU behind it but clipped (ReLU6)"
    assert reasons["bn6"] == "its result has other readers: relu, bn7 (BatchNorm1d)"
    assert converted(torch.randn(6, 4)).shape == (6, 4)


class OwnBatchNorm(nn.BatchNorm2d):
    pass


def _hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("layer", "activation", "reason"),
    [
        (nn.SyncBatchNorm(4), nn.ReLU(), "it is a SyncBatchNorm, whose statistics are of all ranks"),
        (OwnBatchNorm(4), nn.ReLU(), "it is a OwnBatchNorm, which may do more than batch norm"),
        (_hooked(nn.BatchNorm2d(4)), nn.ReLU(), "it has hooks, which would not run"),
        (nn.BatchNorm2d(4), _hooked(nn.ReLU()), "1 behind it has hooks, which would not run"),
    ],
)
def test_layers_that_do_more_stay_as_they_are(layer: nn.Module, activation: nn.Module, reason: str) -> None:
    converted = invert_batchnorm(nn.Sequential(layer, activation))
    assert [left.reason for left in converted.left] == [reason]
    assert converted.inverted == ()


def test_hooks_of_a_module_that_is_taken_apart_are_refused_before_anything_changes() -> None:
    net = nn.Sequential(conv_bn_relu(3, 4), nn.Flatten())
    net[0].register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="0 has hooks, which do not run in a converted network"):
        invert_batchnorm(net)
    assert torch.equal(net[0][1].weight, torch.ones(4))


def test_there_and_back_the_network_is_what_it_was() -> None:
    net = with_trained_layers(small_resnet()).eval()
    x = torch.randn(4, 3, 12, 12)
    before, state = net(x), copy.deepcopy(net.state_dict())
    restored = restore_batchnorm(invert_batchnorm(net), activation="relu")
    assert restored is net
    assert not restored.training
    torch.testing.assert_close(restored(x), before, rtol=1e-5, atol=1e-5)
    for name, value in restored.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_a_trained_inverted_network_is_restored_to_the_same_function(training: bool) -> None:
    net = small_resnet()
    net[4].p = 0.0
    converted = with_trained_layers(invert_batchnorm(net))
    with torch.no_grad():
        converted.get_parameter("1.weight")[:2] = torch.tensor([0.0, -1e-6])
    converted.train(training)
    x = torch.randn(4, 3, 12, 12)
    before = copy.deepcopy(converted)(x)
    names = list(converted.state_dict())
    restored = restore_batchnorm(converted)
    assert isinstance(restored, RestoredModel)
    assert list(restored.state_dict()) == names
    torch.testing.assert_close(restored(x), before, rtol=1e-5, atol=1e-5)


def test_a_network_whose_activations_did_not_change_is_restored_as_itself() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
    assert restore_batchnorm(invert_batchnorm(net)) is net


def test_state_dicts_go_both_ways() -> None:
    net = with_trained_layers(small_resnet())
    state = copy.deepcopy(net.state_dict())
    converted = invert_batchnorm(small_resnet())
    converted.load_state_dict(state)
    small_resnet().load_state_dict(converted.state_dict())
    assert [name for name, _ in converted.named_parameters()] == [name for name, _ in net.named_parameters()]
    x = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(converted.eval()(x), with_leaky(net).eval()(x), rtol=1e-3, atol=1e-3)


def inexact() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU())
    with torch.no_grad():
        net[1].weight[2:4] = 1e-5
        net[1].bias[2:12] = 1.0
    return net


def test_channels_over_the_limit_are_refused_by_name_and_nothing_changes() -> None:
    net = inexact()
    state = copy.deepcopy(net.state_dict())
    with pytest.raises(InputError, match=r"inexact to more than limit=0.001 in 1: channels 2, 3: their scales"):
        invert_batchnorm(net, limit=1e-3)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    converted = invert_batchnorm(net, limit=1.0)
    with pytest.raises(InputError, match="channels 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"):
        restore_batchnorm(converted, limit=3.5e-6)
    assert converted.reconstruction_errors()["1"].argmax() in (2, 3)
    assert converted.reconstruction_errors(torch.bfloat16)["1"].min() > 1e-3


def test_inexact_channels_are_told_when_a_network_is_restored(caplog: pytest.LogCaptureFixture) -> None:
    converted = invert_batchnorm(inexact())
    assert "in channels 2, 3" in converted.describe()
    with caplog.at_level(logging.WARNING):
        restore_batchnorm(converted)
    assert "inverted batch norm was inexact in 1: channels 2, 3" in caplog.text


class Twice(nn.Module):
    """One batch norm for two places."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.relu, self.other = nn.BatchNorm2d(3), nn.ReLU(), other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.norm(self.second(self.relu(self.norm(self.first(x))))))


def test_a_shared_batch_norm_is_converted_in_both_places_or_in_none() -> None:
    net = with_trained_layers(Twice(nn.ReLU()))
    weight = net.norm.weight.detach().clone()
    plain = copy.deepcopy(net)
    converted = invert_batchnorm(net, slope=1e-6)
    x = torch.randn(4, 3, 8, 8)
    for _ in range(2):
        torch.testing.assert_close(converted(x), plain(x), rtol=1e-4, atol=1e-4)
    assert converted.get_buffer("norm.num_batches_tracked") == 4
    restore_batchnorm(converted)
    torch.testing.assert_close(net.norm.weight, weight, rtol=1e-6, atol=0)
    assert invert_batchnorm(Twice(nn.Sigmoid())).inverted == ()
    assert [left.reason for left in invert_batchnorm(Twice(nn.ELU())).left] == [
        "it is called with different activations behind it"
    ]


def test_dropout_and_statistics_follow_the_mode() -> None:
    converted = invert_batchnorm(small_resnet())
    x = torch.randn(4, 3, 12, 12)
    converted.eval()
    assert torch.equal(converted(x), converted(x))
    assert converted.get_buffer("1.num_batches_tracked") == 0
    converted.train()
    assert not torch.equal(converted(x), converted(x))
    assert converted.get_buffer("1.num_batches_tracked") == 2


def test_training_reduces_the_loss_with_accumulated_gradients() -> None:
    converted = invert_batchnorm(small_resnet())
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
    converted = invert_batchnorm(small_resnet())
    twin = copy.deepcopy(converted)
    with torch.no_grad():
        twin.get_parameter("1.weight").zero_()
    x = torch.randn(2, 3, 12, 12)
    assert not torch.equal(twin.eval()(x), converted.eval()(x))
    assert converted.get_parameter("1.weight").min() > 0.9


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolution_s_result_is_written_over_in_eager_mode(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverted_batch_norm_reference, "_PIECE_ELEMS", 1)
    converted = invert_batchnorm(conv_bn_relu(3, 4, dims))
    x = torch.randn(2, 3, *[8] * dims)
    _, changes = allocations.record(lambda: converted(x).sum().backward())
    one = 2 * 4 * 8**dims * 4
    seen: list[Any] = []
    converted.get_submodule("0").register_forward_hook(lambda *arguments: seen.append(arguments[2]))
    result = converted(x)
    assert seen[0].data_ptr() != result.data_ptr()  # a hook may keep what it sees
    assert changes.count(one) == 2  # the convolution's result and its gradient


def saved_bytes(plan: Plan) -> int:
    graph = plan.graph
    written = {storage for op in graph.ops[: graph.n_forward] for storage in op.writes}
    read = {storage for op in graph.ops[graph.n_forward :] for storage in op.reads}
    return sum(graph.storages[storage].nbytes for storage in written & read)


def chain() -> nn.Sequential:
    return nn.Sequential(
        *(conv_bn_relu(a, b) for a, b in ((3, 16), (16, 16), (16, 16))), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


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

    (plain_saved, plain_peak), (saved, peak) = cost(chain()), cost(invert_batchnorm(chain()))
    assert plain_saved >= 6 * one
    assert saved <= 3.1 * one
    assert peak <= plain_peak - 2 * one


def test_under_shoal_less_is_saved_and_the_prediction_holds() -> None:
    x = torch.randn(4, 3, 32, 32)
    plain, ours = shoal.plan(chain(), x), shoal.plan(invert_batchnorm(chain()), x)
    one = 4 * 16 * 32 * 32 * 4
    assert saved_bytes(plain) - saved_bytes(ours) >= 2 * one
    assert saved_bytes(ours) <= 3.2 * one
    assert ours.predicted_peak_bytes <= plain.predicted_peak_bytes - 2 * one
    assert {op.layer for op in ours.graph.ops if "inverted" in op.target} == {"0.1", "1.1", "2.1"}
    model = shoal.compile(invert_batchnorm(chain()))
    for _ in range(2):
        model(x).square().sum().backward()
        model.zero_grad()
    assert model.shoal.measured_peak_bytes == pytest.approx(model.shoal.predicted_peak_bytes, rel=0.02)


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
    net = nn.Sequential(invert_batchnorm(small_resnet())).to(memory_format=layout)
    assert_same_training(net, [batch.to(memory_format=layout) for batch in images(2, 4, 3, 12, 12)], **how)


def test_networks_of_the_zoo_are_converted_or_left_and_run() -> None:
    for name, inverted, size in (("resnet18_cifar", 9, 32), ("mobilenet_v2", 0, 32), ("densenet121", 120, 32)):
        converted = invert_batchnorm(models.build(name, seed=0))
        assert isinstance(converted, InvertedModel)
        assert len(converted.inverted) >= inverted
        assert converted.eval()(torch.randn(1, 3, size, size)).isfinite().all()


@pytest.mark.parametrize("slope", [0, -0.1, float("inf"), float("nan"), "0.1", True])
def test_a_slope_without_an_inverse_is_refused(slope: Any) -> None:
    with pytest.raises(InputError, match="a slope of 0 has no inverse"):
        invert_batchnorm(small_resnet(), slope)


def test_mistakes_are_told() -> None:
    converted = invert_batchnorm(small_resnet())
    for mistake, said in (
        (lambda: invert_batchnorm(converted), "inverted already"),
        (lambda: invert_batchnorm("resnet"), "model is a str"),  # type: ignore[arg-type]
        (lambda: invert_batchnorm(small_resnet(), limit=0), "limit=0: expected the largest error allowed"),
        (lambda: restore_batchnorm(small_resnet()), "expected what shoal.invert_batchnorm returned"),  # type: ignore[arg-type]
        (lambda: restore_batchnorm(converted, activation="elu"), "activation='elu'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=said):
            mistake()


class Control(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_traced_is_told() -> None:
    with pytest.raises(CaptureError, match=r"torch\.fx cannot trace Control"):
        invert_batchnorm(Control())
