"""Fused and inverted networks in their users' hands: saved, changed, called in unusual ways. They do as the network."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.errors import InputError
from tests.raising import raising

Transform = Callable[[nn.Module], Any]


class Layers(nn.Module):
    """Batch norms with ReLUs between convolutions, in addition to a parameter and a buffer that its own code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.full((1, 3, 1, 1), 0.25))
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU()),
            *(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)),
        )
        self.scales = nn.ParameterList([torch.full((1, 2, 1, 1), 3.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x - self.mean)
        return y * self.scales[0]


class Leaky(Layers):
    """What it is where it is inverted."""

    def __init__(self) -> None:
        super().__init__()
        self.body[5] = nn.LeakyReLU()


def _fused(net: nn.Module) -> Any:
    return shoal.fuse_batchnorm(net, when="always")


EITHER = pytest.mark.parametrize(
    ("transform", "kind"), [(_fused, Layers), (shoal.invert_norm, Leaky)], ids=["fused", "inverted"]
)


def _pair(transform: Transform, kind: type[nn.Module]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = kind().double()
    return net, transform(copy.deepcopy(net))


def _images(images: int = 2) -> torch.Tensor:
    return torch.randn(images, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _trained(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for parameter in net.parameters():
        parameter.grad = None
    y = net(x)
    y.sin().sum().backward()
    return [y.detach(), *net.buffers(), *(p.grad for p in net.parameters() if p.grad is not None)]


def _same(net: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    for mine, theirs in zip(_trained(other, x), _trained(net, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


@EITHER
def test_it_is_saved_and_loaded_whole(transform: Transform, kind: type[nn.Module]) -> None:
    net, found = _pair(transform, kind)
    loaded = pickle.loads(pickle.dumps(found))
    _same(net, loaded, _images())
    _same(net.eval(), loaded.eval(), _images())


@EITHER
def test_parameters_and_buffers_of_its_own_code_are_read_as_they_are(
    transform: Transform, kind: type[nn.Module]
) -> None:
    net, found = _pair(transform, kind)
    _same(net, found, _images())
    others = {name: value + 1 for name, value in net.state_dict().items() if name in ("mean", "scales.0")}
    for each in (net, found):
        each.load_state_dict(copy.deepcopy(others), strict=False, assign=True)
    _same(net, found, _images())
    stands_in = {"scales.0": torch.zeros(1, 2, 1, 1, dtype=torch.float64)}
    assert not torch.func.functional_call(found, stands_in, (_images(),)).any()


@EITHER
def test_an_empty_batch_trains_nothing_and_moves_what_it_moves(transform: Transform, kind: type[nn.Module]) -> None:
    net, found = _pair(transform, kind)
    _same(net, found, _images(0))
    _same(net, found, _images())


@EITHER
def test_transforms_of_functions_see_the_same_network(transform: Transform, kind: type[nn.Module]) -> None:
    net, found = _pair(transform, kind)

    def gradients(of: nn.Module) -> dict[str, torch.Tensor]:
        buffers = {name: buffer.clone() for name, buffer in of.named_buffers()}

        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            return torch.func.functional_call(of, (parameters, copies), (_images(),)).sin().sum()

        return torch.func.grad(loss)({name: p.detach() for name, p in of.named_parameters()})

    mine, theirs = gradients(found), gradients(net)
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-6, atol=1e-9)


def test_forward_mode_derivatives_are_those_of_the_network() -> None:
    net, fused = _pair(_fused, Layers)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(_images(), torch.ones_like(_images()))
        mine, theirs = (torch.autograd.forward_ad.unpack_dual(each(x)).tangent for each in (fused, net))
    torch.testing.assert_close(mine, theirs)


@EITHER
def test_on_the_meta_device_shapes_go_through(transform: Transform, kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        net = kind()
    found = transform(net)
    y = found(torch.empty(2, 3, 6, 6, device="meta"))
    y.sum().backward()
    assert y.is_meta and y.shape == (2, 2, 4, 4)


@EITHER
def test_a_step_of_a_network_without_values_is_planned_as_of_one_with(
    transform: Transform, kind: type[nn.Module]
) -> None:
    ops = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            net, example = kind(), torch.empty(2, 3, 6, 6)
        ops.append(
            [op.target for op in shoal.plan(transform(net), example, budget="1MiB", hardware="p100-nvlink").graph.ops]
        )
    assert ops[0] == ops[1] and any("shoal." in target for target in ops[0])


def test_a_network_that_was_inverted_without_values_is_described_filled_and_restored() -> None:
    with torch.device("meta"):
        inverted = shoal.invert_norm(Layers())
    assert "unknown" in inverted.describe()
    inverted.to_empty(device="cpu")
    for parameter in inverted.parameters():
        nn.init.ones_(parameter)
    for buffer in inverted.buffers():
        nn.init.ones_(buffer)
    x, was = _images().float(), inverted.eval()(_images().float())
    torch.testing.assert_close(inverted.restore()(x), was)


def test_layers_that_are_replaced_after_fusing_are_those_that_run() -> None:
    net, fused = _pair(_fused, Layers)
    for at, layer in ((3, nn.Conv2d(4, 4, 1)), (1, nn.BatchNorm2d(4, eps=0.5)), (6, nn.Conv2d(4, 2, 1))):
        for each in (net, fused):
            each.body[at] = copy.deepcopy(layer).double()  # type: ignore[operator]
        _same(net, fused, _images())
    fused.body[1] = nn.Identity()
    fused(_images())
    assert [one.layer for one in fused.summary.fused] == ["body.4"]


def test_an_inverted_network_does_not_run_beside_layers_that_replaced_its_own() -> None:
    net, inverted = _pair(shoal.invert_norm, Leaky)
    old = inverted.body[6]
    inverted.body[6] = nn.Conv2d(4, 2, 1).double()
    with raising(InputError, "shoal.invert_norm"):
        inverted(_images())
    inverted.body[6] = old
    _same(net, inverted, _images())


def test_a_network_is_restored_once() -> None:
    inverted = shoal.invert_norm(Layers())
    inverted.restore()
    with pytest.raises(InputError):
        inverted.restore()


@EITHER
def test_a_transformed_part_of_a_network_stays_as_it_is(transform: Transform, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    outer = nn.Sequential(kind(), nn.BatchNorm2d(2), nn.LeakyReLU(), nn.Conv2d(2, 2, 1)).double()
    of_both = copy.deepcopy(outer)
    of_both[0] = transform(of_both[0])
    for around in (_fused, shoal.invert_norm):
        _same(copy.deepcopy(outer), around(copy.deepcopy(of_both)), _images())


class Twice(nn.Module):
    """A convolution that a batch norm reads after one call, and nothing that is fused after the others."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.convolution(x)))
        z = self.convolution(y * 2)
        return F.relu(self.convolution(z))


class Inside(nn.Module):
    """A container that is called whole, for its hook, and whose layers are called by others too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1))
        self.inner.register_forward_hook(lambda *_: None)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return self.inner[3](F.relu(self.norm(self.inner[0](y))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Twice, Inside])
@pytest.mark.parametrize("level", ["rcf", "mvf", "bnff", "icf"])
def test_a_layer_may_be_fused_in_one_call_and_left_in_another(kind: type[nn.Module], level: Any) -> None:
    torch.manual_seed(0)
    net = kind().double()
    under = copy.deepcopy(net)
    kinds = [type(module) for module in under.modules()]
    fused = shoal.fuse_batchnorm(under, level, when="always")
    _same(net, fused, _images())
    assert [type(module) for module in under.modules()] == kinds
