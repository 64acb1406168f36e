"""The times of ops on a device whose kernels take as long as the test says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.cost import device_clock, measure, measurement_cache
from shoal.cost.device_clock import DeviceClock
from shoal.cost.profile import profile
from shoal.graph.op_counts import signature
from tests.cuda_standin.counts import device_counts

KERNEL_SECONDS = 3e-6  # less than any launch takes from Python


def kernels_take(seconds: float) -> None:
    """Each kernel from here on."""
    ctypes.CDLL(None).standin_set_kernel_seconds(ctypes.c_double(seconds))


@pytest.fixture(autouse=True)
def waiting_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that only waits takes its cycles, at 2 GHz; all others take `KERNEL_SECONDS`."""

    def spin(device: torch.device, cycles: int) -> None:
        kernels_take(cycles / 2e9)
        torch.cuda._sleep(cycles)
        kernels_take(KERNEL_SECONDS)

    monkeypatch.setattr(device_clock, "spin", spin)
    kernels_take(KERNEL_SECONDS)
    yield
    kernels_take(0.0)


def one_kernel(x: torch.Tensor) -> Any:
    return lambda: torch.relu(x)


def five_kernels(x: torch.Tensor) -> Any:
    return lambda: [torch.relu(x) for _ in range(5)]


@pytest.mark.parametrize(("op", "n_kernels"), [(one_kernel, 1), (five_kernels, 5)])
def test_a_kernel_is_timed_without_its_launch(op: Callable[..., Any], n_kernels: int) -> None:
    x = torch.zeros(1, device="cuda")
    clock = DeviceClock(x.device)
    found = clock.time(op(x))
    assert found.kernel_seconds == pytest.approx(n_kernels * KERNEL_SECONDS, rel=0.05)
    assert found.launch_seconds > 0


@pytest.mark.usefixtures("real_machine")
def test_a_step_has_the_launch_beside_the_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    graph = make_fx(torch.relu, tracing_mode="fake")(torch.empty(100)).graph
    nodes = {signature(node): node for node in graph.nodes if node.op == "call_function"}
    for costs in (profile(nodes, device="cuda"), profile(nodes, device="cuda")):  # measured, and from the cache
        (key,) = nodes
        assert 0 < costs.seconds[key] < 1.05 * KERNEL_SECONDS
        assert costs.launch_seconds[key] > 0


def test_an_op_is_timed_where_the_clock_leaves_it_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    x = torch.empty(60 << 18)  # 60 MiB; the clock holds 100
    graph = make_fx(torch.relu, tracing_mode="fake")(x).graph
    nodes = {signature(node): node for node in graph.nodes if node.op == "call_function"}
    torch.cuda.empty_cache()
    left_bytes = torch.cuda.memory_reserved() + (160 << 20)
    torch.cuda.set_per_process_memory_fraction(left_bytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        costs = profile(nodes, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert costs.seconds.keys() == nodes.keys()
    assert not [warning for warning in recwarn if "cannot time" in str(warning.message)]


def conv_nodes(model: torch.nn.Conv2d, x: torch.Tensor) -> dict[str, Any]:
    """The convolutions of a step, forward and backward, by signature."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(torch.conv2d(x, weight).sum(), [weight]))

    graph = make_fx(step, tracing_mode="fake")(x, model.weight).graph
    return {signature(node): node for node in graph.nodes if "convolution" in str(node.target)}


def test_cudnn_searches_for_kernels_before_the_step_also_where_times_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    kernels_take(0.0)
    model, x = torch.nn.Conv2d(3, 8, 3, bias=False).cuda(), torch.zeros(4, 3, 16, 16, device="cuda")
    nodes = conv_nodes(model, x)
    assert len(nodes) == 2
    measurement_cache.remember("costs", x.device, {key: [1e-6, 0, 1e-6] for key in nodes})
    profile(nodes, device="cuda")
    launches = []
    for _ in range(2):  # the first step launches no more than the next
        before = device_counts().launches
        model(x).sum().backward()
        launches.append(device_counts().launches - before)
        model.zero_grad()
    assert launches[0] == launches[1]


@pytest.mark.usefixtures("real_machine")
def test_to_measure_a_machine_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_take(0.0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    device = measure.measure("cuda", cache=False).device
    assert device.memory_bytes == 80 << 30
    assert device.host_launch_seconds > 0
    assert torch.cuda.max_memory_allocated() - before_bytes <= 300 << 20
