"""Steps whose instance and group norms are inverted: which pairs are found, and that they train as plain PyTorch's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import shoal
from shoal.capture.inverted_norms import with_inverted_norms
from shoal.kernels.invertible_norm.inverted_norms import inverted_norm_in


def block(before: int, after: int, norm: nn.Module, activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(before, after, 3, padding=1), norm, activation or nn.LeakyReLU(0.01, inplace=True))


def network() -> nn.Sequential:
    return nn.Sequential(
        block(1, 8, nn.InstanceNorm3d(8, affine=True)),
        block(8, 8, nn.InstanceNorm3d(8)),
        block(8, 8, nn.GroupNorm(2, 8), nn.ELU()),
        block(8, 8, nn.GroupNorm(4, 8)),
        nn.Conv3d(8, 2, 1),
    )


def inverted_ops(net: nn.Module, *inputs: torch.Tensor) -> list[Any]:
    """What the inverted norms of Dynamo's graph are called with, but for tensors; the graph runs as the network."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, example: Any) -> Any:
        changed = with_inverted_norms(gm)
        found.extend(node.args[3:] for node in changed.graph.nodes if node.target is inverted_norm_in)
        return changed

    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(net, backend=backend, fullgraph=True)(*inputs), net(*inputs))
    return found


def test_norms_with_an_activation_that_has_an_inverse_are_found() -> None:
    assert inverted_ops(network(), torch.randn(2, 1, 4, 4, 4)) == [
        (8, 1e-5, "leaky_relu", 0.01, torch.float32),
        (8, 1e-5, "leaky_relu", 0.01, torch.float32),
        (2, 1e-5, "elu", 1.0, torch.float32),
        (4, 1e-5, "leaky_relu", 0.01, torch.float32),
    ]


class Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.elu(F.group_norm(x, num_groups=2), alpha=0.5)
        y = F.instance_norm(x)
        return F.leaky_relu(F.instance_norm(x), negative_slope=0.2) + y + F.leaky_relu(y)


def test_calls_of_functions_are_found_and_a_norm_with_other_readers_is_left() -> None:
    assert [call[2:4] for call in inverted_ops(Functional(), torch.randn(2, 4, 5, 5))] == [
        ("elu", 0.5),
        ("leaky_relu", 0.2),
    ]


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (nn.Sequential(nn.InstanceNorm2d(4), nn.PReLU()), "1 x instance norm with prelu after it"),
        (nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU()), "1 x group norm with relu after it"),
        (nn.Sequential(nn.GroupNorm(2, 4)), "1 x group norm with the network's result after it"),
        (nn.Sequential(nn.GroupNorm(2, 4), nn.LeakyReLU(0.0)), "of slope 0.0, which has no inverse"),
        (nn.Sequential(nn.InstanceNorm2d(4, track_running_stats=True), nn.ELU()), "with running statistics"),
        (nn.Sequential(nn.BatchNorm2d(4), nn.ELU()), "there is no instance or group norm"),
    ],
)
def test_where_nothing_can_be_inverted_what_is_in_the_way_is_told(net: nn.Module, reason: str) -> None:
    with pytest.raises(Exception) as told:
        inverted_ops(net, torch.randn(2, 4, 5, 5))
    assert "Refused" in repr(told.value) + str(told.value) and reason in str(told.value)


def step(model: Any, x: torch.Tensor, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Gradients; under autocast where a dtype is given."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(x).float().square().mean()
    loss.backward()
    return gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    named = ((name.removeprefix("_orig_mod."), p.grad) for name, p in model.named_parameters())
    return {name: gradient for name, gradient in named if not _is_lost(name)}


def _is_lost(name: str) -> bool:
    """Of a convolution's bias whose mean an instance norm takes off: zero but for rounding."""
    return name in ("0.0.bias", "1.0.bias")


def assert_as_close(found: dict[str, torch.Tensor], plain: Any, exact: Any, relative: float) -> None:
    for name, right in exact.items():
        ours, theirs = (float((one[name].double() - right).abs().max()) for one in (found, plain))
        assert ours <= 2 * theirs + relative * right.abs().max(), name


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_a_planned_step_is_as_close_to_float64_as_pytorch_s(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    net, x = network().to(memory_format=layout), torch.randn(2, 1, 8, 8, 8).to(memory_format=layout)
    exact, plain = step(copy.deepcopy(net).double(), x.double()), step(copy.deepcopy(net), x)
    budget = int(0.85 * shoal.plan(net, x).predicted_peak_bytes)
    model = shoal.compile(net, budget=budget, allow="recompute, pieces, direct, invert")
    loss = model(x).square().mean()
    plan = model.shoal.plan  # where the loop turns out to leave room, the next step has another one
    loss.backward()
    assert_as_close(gradients(model), plain, exact, 1e-5)
    assert plan.variant.invert, plan.explain()
    assert sum(op.target == "shoal.inverted_norm.default" for op in plan.graph.ops) == 4
    assert (model.shoal.measured_peak_bytes or 0) <= budget


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_under_autocast_the_dtypes_are_those_of_the_network(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    net, x = network().to(memory_format=layout), torch.randn(2, 1, 8, 8, 8).to(memory_format=layout)
    exact = step(copy.deepcopy(net).double(), x.double())
    plain = step(copy.deepcopy(net), x, torch.bfloat16)
    compiled = torch.compile(net, backend=lambda gm, example: with_inverted_norms(gm), fullgraph=True)
    assert_as_close(step(compiled, x, torch.bfloat16), plain, exact, 1e-2)


def test_the_model_stays_what_it_is() -> None:
    net = network()
    model = shoal.compile(net, budget="10MiB", allow="exact, invert")
    x = torch.randn(1, 1, 6, 6, 6)
    model(x).sum().backward()
    assert list(model.state_dict()) == list(net.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(x), net.eval()(x))


def test_a_step_without_such_norms_says_so_in_its_plan() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    plan = shoal.plan(net, torch.randn(2, 3, 12, 12), "10MiB", allow="recompute, invert")
    assert "no norm can be inverted: there is no instance or group norm" in plan.explain()


def test_a_plan_of_it_is_saved_loaded_and_run(tmp_path: Path) -> None:
    net, x = network(), torch.randn(2, 1, 8, 8, 8)
    budget = int(0.85 * shoal.plan(net, x).predicted_peak_bytes)
    plan = shoal.plan(net, x, budget, allow="recompute, pieces, direct, invert")
    plan.save(tmp_path / "plan.json")
    loaded = shoal.Plan.load(tmp_path / "plan.json")
    assert loaded.variant.invert and str(loaded.variant).startswith("instance and group norms inverted")
    model = shoal.compile(net, options=shoal.Options(plan=loaded))
    model(x).sum().backward()
    assert model.shoal.plan.variant == plan.variant
    assert model.shoal.measured_peak_bytes <= budget
