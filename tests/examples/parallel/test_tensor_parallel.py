"""Tensor-parallel layers compute what whole ones do: up to the order of sums, or within the errors of a codec."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from examples.parallel.activation_exchange import ActivationExchange
from examples.parallel.local_convolution import LocalConv2d
from shoal.distributed.comm.exchange import Exchange
from shoal.errors import InputError
from tests.ranks import run_on_ranks

# Each network with the style and the layouts of its layers: (style, shards its input, shards its output).
NETWORKS: dict[str, tuple[Any, tuple[int, ...], dict[str, tuple[str, bool, bool]]]] = {
    "column": (lambda: [nn.Linear(6, 7)], (5, 6), {"0": ("column", False, False)}),
    "columns": (
        lambda: [nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)],
        (5, 6),
        {"0": ("column", False, True), "2": ("column", True, True), "4": ("column", True, False)},
    ),
    "megatron": (
        lambda: [nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5)],
        (5, 6),
        {"0": ("column", False, True), "2": ("row", True, False)},
    ),
    "rows": (
        lambda: [nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)],
        (2, 4, 6),  # dimensions of a sequence
        {"0": ("row", False, True), "2": ("row", True, True), "4": ("column", True, False)},
    ),
    "local": (
        lambda: [LocalConv2d(3, 5, (6, 6), 3, padding=1), nn.ReLU(), LocalConv2d(5, 4, (6, 6), 3)],
        (2, 3, 6, 6),
        {"0": ("column", False, True), "2": ("column", True, False)},
    ),
    "space": (
        lambda: [LocalConv2d(3, 4, (6, 6), 3, padding=1), nn.ReLU(), LocalConv2d(4, 4, (6, 6), 3, padding=1)],
        (2, 3, 6, 6),
        {"0": ("space", False, True), "2": ("space", True, False)},
    ),
    "few rows": (  # bands that read padding alone, then more ranks than rows
        lambda: [LocalConv2d(3, 4, (3, 3), 1, padding=1), nn.ReLU(), LocalConv2d(4, 4, (5, 5), 4, stride=2)],
        (2, 3, 3, 3),
        {"0": ("space", False, True), "2": ("space", True, False)},
    ),
}


def _network(name: str) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*NETWORKS[name][0]())


def _input(name: str) -> torch.Tensor:
    return torch.randn(NETWORKS[name][1], generator=torch.Generator().manual_seed(6))


def _step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **{name: one.grad for name, one in model.named_parameters()}}  # type: ignore[dict-item]


def _parallel(names: list[str], codec: str | None) -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from examples.parallel.tensor_parallel import ColumnParallel, RowParallel, SpaceParallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    activations = ActivationExchange(Exchange(timeout_seconds=200), codec)
    found = []
    for name in names:
        layouts = NETWORKS[name][2]
        model = _network(name)
        plan = {}
        for layer, (style, into, out) in layouts.items():
            made = {"column": ColumnParallel, "row": RowParallel, "space": SpaceParallel}[style]
            linear = isinstance(model.get_submodule(layer), nn.Linear)
            shard = Shard(2) if style == "space" else Shard(-1) if linear else Shard(1)
            plan[layer] = made(
                activations,
                input_layouts=shard if into else Replicate(),
                output_layouts=shard if out else Replicate(),
            )
        parallelize_module(model, mesh, plan)
        step = _step(model, _input(name))
        whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in step.items()}
        state = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in model.state_dict().items()}
        found.append({"step": whole, "state": state})
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_a_codec_a_parallel_layer_is_the_whole_layer(ranks: int) -> None:
    names = list(NETWORKS)
    results = run_on_ranks(_parallel, ranks, names, None)

    for place, name in enumerate(names):
        model = _network(name)
        single = _step(copy.deepcopy(model), _input(name))
        exact = _step(model.double(), _input(name).double())
        for of_rank in results:
            state = of_rank[place]["state"]
            assert list(state) == list(model.state_dict())
            assert all(torch.equal(state[key], value.float()) for key, value in model.state_dict().items())
            for key, value in exact.items():
                error = (of_rank[place]["step"][key] - value).abs().max()
                plain = (single[key] - value).abs().max()
                assert error <= plain + 2.0**-22 * value.abs().max(), (name, key)


def test_with_a_codec_it_is_within_a_few_roundings_and_the_same_on_all_ranks() -> None:
    names = list(NETWORKS)
    results = run_on_ranks(_parallel, 2, names, "dynamic_tree")

    for place, name in enumerate(names):
        model = _network(name)
        exact = _step(model.double(), _input(name).double())
        for key, value in exact.items():
            first, second = (of_rank[place]["step"][key] for of_rank in results)
            assert torch.equal(first, second), (name, key)
            # A value is rounded by at most 5 %, and few of them by as much; five times in a row at the most.
            assert (first - value).norm() <= 0.08 * value.norm(), (name, key)


def _refused(style: str, layer: nn.Module, layout: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from examples.parallel import tensor_parallel

    activations = ActivationExchange(Exchange(timeout_seconds=200), None)
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(InputError) as error:
        parallelize_module(layer, mesh, getattr(tensor_parallel, style)(activations, input_layouts=Shard(layout)))
    return str(error.value)


@pytest.mark.parametrize(
    ("style", "layer", "layout", "why"),
    [
        ("ColumnParallel", nn.Conv2d(1, 1, 1), 1, "expected nn.Linear or LocalConv2d"),
        ("RowParallel", LocalConv2d(1, 1, (2, 2), 1), -1, "give it ColumnParallel"),
        ("SpaceParallel", nn.Linear(2, 2), 2, "give it ColumnParallel"),
        ("ColumnParallel", nn.Linear(2, 2), 0, r"expected Replicate\(\) or Shard\(-1\)"),
        ("ColumnParallel", nn.modules.linear.NonDynamicallyQuantizableLinear(2, 2), -1, "a subclass of its own"),
    ],
)
def test_other_layers_and_layouts_are_refused(style: str, layer: nn.Module, layout: int, why: str) -> None:
    (message,) = run_on_ranks(_refused, 1, style, layer, layout)
    assert re.search(why, message)
