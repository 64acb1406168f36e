"""What `bench.gpu` trains on one GPU: networks, and the ways to run their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

import shoal
from bench.compiled_contenders import workload_of as network_on
from bench.frame import Run
from bench.network import Setting
from bench.workload import Forward, Workload, make_workload


@dataclass(frozen=True)
class Contender:
    """A way to run the step of `speed`."""

    name: str
    forward: Forward
    model: nn.Module | None = None  # Shoal's
    activation_memory_budget: float | None = None

    @property
    def graph_bytes(self) -> int:
        """What CUDA graphs of Shoal's keep, which a replay does not allocate anew."""
        return 0 if self.model is None else int(self.model.shoal.graph_bytes or 0)


def workload_of(run: Run, name: str, batch: int, image: int = 224) -> Workload:
    """The network on the device; with --quick a few small layers, most of whose step is activations."""
    if not run.asked.quick:
        return network_on(name, Setting(batch, image), seed=0, device=str(run.device))
    layers: list[nn.Module] = []
    for place in range(6):
        layers += [nn.Conv2d(32 if place else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    small = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return make_workload(name, 32, 64, device=str(run.device), model=small.to(run.device))


def in_bfloat16(model: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    """A forward pass under autocast."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(x).float()

    return forward


def planned_copy(workload: Workload, plain_bytes: int, share: float, **chosen: Any) -> Any:
    """The network compiled by Shoal for a share of what plain PyTorch takes; `chosen` as of shoal.compile."""
    return shoal.compile(workload.shared_copy(), budget=int(share * plain_bytes), **chosen)


def contenders(run: Run, workload: Workload, plain_bytes: int) -> dict[str, Callable[[], Contender]]:
    """First what the others are held against."""

    def shoal_at(share: float, name: str, **chosen: Any) -> Callable[[], Contender]:
        def make() -> Contender:
            model = planned_copy(workload, plain_bytes, share, **({"allow": "bitwise"} | chosen))
            return Contender(name, in_bfloat16(model), model)

        return make

    def compiled(name: str, value: float | None) -> Callable[[], Contender]:
        def make() -> Contender:
            model = workload.shared_copy()

            def call(x: torch.Tensor) -> torch.Tensor:
                return model(x)

            # Dynamo keeps its graphs by code object: one of its own for every value.
            own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
            return Contender(name, in_bfloat16(torch.compile(own)), None, value)

        return make

    shares, values = run.pick(((1.0, 0.6, 0.4, 0.3), (0.7, 0.5, 0.3)), ((0.75,), (0.5,)))
    graphs = f"Shoal at {shares[0]:.0%} in CUDA graphs"
    return {
        "plain PyTorch": lambda: Contender("plain PyTorch", in_bfloat16(workload.model)),
        "torch.compile": compiled("torch.compile", None),
        **{(name := f"Shoal at {share:.0%}"): shoal_at(share, name) for share in shares},
        graphs: shoal_at(
            shares[0], graphs, options=shoal.Options(cuda_graphs=True)
        ),  # after those whose peaks its pool would be in
        **{(name := f"activation_memory_budget={value:g}"): compiled(name, value) for value in values},
    }


def warm_up(workload: Workload, contender: Contender, steps: int) -> None:
    """Run so many steps, with the settings that the contender is compiled under."""
    value = contender.activation_memory_budget
    with functorch_config.patch(**({} if value is None else {"activation_memory_budget": value})):
        for _ in range(steps):
            workload.reset()
            workload.step(contender.forward)
    torch.cuda.synchronize()


def kernels_of(workload: Workload, forward: Forward) -> dict[str, tuple[int, float]]:
    """Launches and milliseconds of each kernel of one step, by name, the slowest first."""
    workload.reset()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        workload.step(forward)
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            launches, milliseconds = found.get(event.name, (0, 0.0))
            found[event.name] = launches + 1, milliseconds + 1e-3 * event.time_range.elapsed_us()
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def host_seconds(workload: Workload, forward: Forward) -> float:
    """Until the host has asked for one step, the device being idle at its start."""
    workload.reset()
    torch.cuda.synchronize()
    began = time.perf_counter()
    workload.step(forward)
    asked_seconds = time.perf_counter() - began
    torch.cuda.synchronize()
    return asked_seconds


def plan_row(model: Any) -> dict[str, Any]:
    """What a row tells of the plan, where there is one."""
    if model is None:
        return {}
    status = model.shoal
    return {
        "budget_bytes": status.budget_bytes,
        "predicted_bytes": status.predicted_peak_bytes,
        "predicted_ms": 1e3 * status.plan.predicted_seconds,
        "planning_seconds": status.planning_seconds,
        "repairs": status.repairs,
    }


def gradients_of(workload: Workload, forward: Forward, start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of one step that begins with these buffers; on the host, since what is held on the device counts in its peaks."""
    workload.restore(start)
    workload.reset()
    workload.step(forward)
    return {name: gradient.cpu() for name, gradient in workload.gradients().items()}


def compared(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Whether they are equal, bit for bit, and the largest difference beside the largest value."""
    pairs = [(ours[name], theirs[name]) for name in theirs]
    off = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)
    return {"equal": all(torch.equal(a, b) for a, b in pairs), "largest_difference": off}
