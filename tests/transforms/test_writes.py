"""Networks that write over tensors in place, fused and inverted: the same numbers as the networks themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import shoal
from shoal.transforms.fuse.fuse_graph import LEVELS, Level
from shoal.transforms.tracing import trace
from shoal.transforms.writes import Writes, is_told_in_place, write_to_new_memory


def _relu_first(net: Any, y: torch.Tensor) -> torch.Tensor:
    rectified = F.relu_(y)
    return net.second(torch.relu(net.norm(y))) + net.third(rectified)


def _view_of_it(net: Any, y: torch.Tensor) -> torch.Tensor:
    y.view(-1).relu_()
    return net.second(torch.relu(net.norm(y)))


def _some_channels(net: Any, y: torch.Tensor) -> torch.Tensor:
    y[:, :2].mul_(2.0)
    y[:, 3] = 1.0
    return net.second(torch.relu(net.norm(y)))


def _out_argument(net: Any, y: torch.Tensor) -> torch.Tensor:
    z = torch.relu(net.norm(y))
    return net.second(z)


def _sum_over_its_operand(net: Any, y: torch.Tensor) -> torch.Tensor:
    z = net.norm(y)
    both = net.third(y)
    whole = both.view(both.shape)
    both += z
    return net.second(torch.relu(both)) + whole


def _slice_of_another(net: Any, y: torch.Tensor) -> torch.Tensor:
    both = torch.cat([y, y], 1)
    part = both[:, :4]
    return net.second(F.relu_(net.norm(F.relu_(part)))) + both[:, 4:].sum() + both[:, :4].sum()


BODIES: list[Callable[[Any, torch.Tensor], torch.Tensor]] = [
    _relu_first,
    _view_of_it,
    _some_channels,
    _out_argument,
    _sum_over_its_operand,
    _slice_of_another,
]


class _Net(nn.Module):
    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body = body
        self.first, self.second, self.third = (nn.Conv2d(n, 4, 3, padding=1) for n in (3, 4, 4))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.first(x))


def _step(net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    x = torch.randn((2, 3, 5, 5), generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    y = run(x)
    y.square().mean().backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [y.detach(), *gradients, *net.buffers(), *([] if x.grad is None else [x.grad])]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("body", BODIES)
def test_a_fused_network_trains_as_the_network_itself(body: Any, level: Level) -> None:
    net = _Net(body).double()
    fused = shoal.fuse_batchnorm(copy.deepcopy(net), level, when="always")
    for own, other in zip(_step(fused, fused), _step(net, net), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("body", [_relu_first, _sum_over_its_operand])
def test_so_it_does_within_a_budget(body: Any) -> None:
    net = _Net(body).double()
    fused = shoal.fuse_batchnorm(copy.deepcopy(net), when="always")
    compiled = shoal.compile(fused, budget="1GiB")
    for own, other in zip(_step(fused, compiled), _step(net, net), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def test_the_summary_says_who_writes() -> None:
    fused = shoal.fuse_batchnorm(_Net(_relu_first), "bnff", when="always")
    assert {one.layer: one.reason for one in fused.summary.left} == {
        "norm": "what it normalises is written over by relu_"
    }


def test_without_gradients_a_write_behind_the_batch_norm_counts_too() -> None:
    """With gradients the network itself cannot run backward."""

    def body(net: Any, y: torch.Tensor) -> torch.Tensor:
        z = torch.relu(net.norm(y))
        y.zero_()
        return net.second(z)

    net = _Net(body)
    fused = shoal.fuse_batchnorm(copy.deepcopy(net), when="always")
    x = torch.randn(2, 3, 5, 5)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), net(x))


def test_an_input_that_the_network_writes_over_is_written_over() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 5, 5)
    shoal.fuse_batchnorm(net, when="always")(x)
    assert float(x.min()) == 0


@pytest.mark.parametrize("order", ["fused, plain", "plain, fused, plain, fused"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_norm_that_is_called_fused_and_by_itself(order: str, momentum: float | None) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4, momentum=momentum)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for how in order.split(", "):
                x = self.norm(x)
                x = self.second(torch.relu(x)) if how == "fused" else torch.tanh(x)
            return x

    net = Twice().double()
    expected = _step(net, net)
    runs: tuple[Callable[[nn.Module], Any], ...] = (lambda net: net, lambda net: shoal.compile(net, budget="1GiB"))
    for run in runs:
        again = Twice().double()
        again.load_state_dict(net.state_dict())
        for buffer in again.buffers():
            buffer.zero_()
        again.norm.reset_running_stats()
        fused = shoal.fuse_batchnorm(again, "bnff", when="always")
        assert [one.layer for one in fused.summary.fused][-1] == "norm"
        assert {one.layer for one in fused.summary.left} == {"norm"}
        for own, other in zip(_step(fused, run(fused)), expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


class _Body(nn.Module):
    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.body(x, y)


def _writes(body: Callable[..., torch.Tensor]) -> tuple[Writes, dict[str, fx.Node]]:
    graph = trace(_Body(body), fx.Tracer(), training=True)
    return Writes(graph, {}), {node.name: node for node in graph.nodes}


def test_views_and_their_writers_are_found() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y = x * 2
        left, right = y.chunk(2, 1)
        total = left + right
        torch.sub(left, right, out=total)
        right.clamp_(0)
        return total

    writes, nodes = _writes(body)
    assert writes.over(nodes["mul"]) is nodes["clamp_"]
    assert writes.over(nodes["getitem"]) is nodes["clamp_"]
    assert writes.over(nodes["mul"], nodes["clamp_"]) is None
    assert writes.over(nodes["add"]) is nodes["sub"]
    assert writes.over(nodes["x"]) is None


def test_an_addition_in_place_is_one_where_another_name_sees_it() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x * 2
        before = x
        x += y
        x -= 1
        return x.relu_() + before

    writes, nodes = _writes(body)
    assert writes.over(nodes["y"]) is None
    assert writes.over(nodes["mul"]) is nodes["iadd"]
    assert writes.over(nodes["iadd"]) is nodes["isub"]
    assert not writes.can_read_instead(nodes["isub"], nodes["relu_"])

    def alone(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x += y
        return x.relu_() + y

    writes, nodes = _writes(alone)
    assert writes.over(nodes["mul"]) is None
    assert writes.can_read_instead(nodes["add"], nodes["relu_"])


def test_an_input_that_is_added_to_in_place_changes() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += 1
            return self.second(torch.relu(self.norm(self.first(x))))

    x, net = torch.zeros(2, 3, 5, 5), Adds()
    shoal.fuse_batchnorm(net, when="always")(x)
    assert torch.equal(x, torch.ones_like(x))


def test_an_inverted_batch_norm_keeps_its_result() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.leaky_relu(self.norm(self.first(x)), 0.1)
            return self.second(y.mul_(2.0))

    net = Adds().double()
    inverted = shoal.invert_norm(copy.deepcopy(net))
    for own, other in zip(_step(inverted, inverted), _step(net, net), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)
    assert "written over by mul_" in inverted.describe()


def _added_to_after(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.first(x)
    same = y
    y += 1
    return net.second(y) + same.sum()


def _added_to_after_it_was_read_whole(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.first(x)
    whole = y.sum()
    y += 1
    return net.second(y) + whole


def _view_written_between(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.first(x)
    y.flatten(2).relu_()
    return net.second(y)


def _input_written_before(net: Any, x: torch.Tensor) -> torch.Tensor:
    x.narrow(1, 0, 2).mul_(2.0)
    return net.second(net.first(x))


@pytest.mark.parametrize(
    "body", [_added_to_after, _added_to_after_it_was_read_whole, _view_written_between, _input_written_before]
)
def test_patches_see_what_is_written_over_the_whole(body: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(self, x * 1 if body is not _input_written_before else x)

    net = Net().double()
    divided = shoal.split(copy.deepcopy(net), join="auto", halo="exact")
    x = torch.randn(2, 3, 5, 5).double()
    torch.testing.assert_close(divided(x.clone()), net(x.clone()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(F.relu, (True,)), (F.leaky_relu, (0.01, True)), (F.hardtanh, (-1.0, 1.0, True)), (F.dropout, (0.5, True, True))],
)
def test_inplace_given_by_place_is_seen_and_taken_back(function: Any, arguments: tuple[Any, ...]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.neg, (x,))
    written = graph.call_function(function, (y, *arguments))
    graph.output((written, graph.call_function(torch.neg, (y,))))
    assert is_told_in_place(written) and Writes(graph, {}).over(y) is written
    assert not Writes(graph, {}).is_unnoticed(written)
    write_to_new_memory(written)
    assert not is_told_in_place(written) and Writes(graph, {}).over(y) is None
