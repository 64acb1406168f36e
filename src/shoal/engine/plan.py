"""`shoal.plan`: the plan of a step, for this machine or for one that is not here, without training."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal import planners
from shoal.capture.capture_step import InputPlaces, in_dynamo, joint_step
from shoal.capture.captured import Captured
from shoal.core import presets
from shoal.core.hardware import Hardware, Link
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_own_plan
from shoal.cost.measure import measure
from shoal.cost.measure_links import link_to
from shoal.cost.profile import profile_step
from shoal.cost.roofline import roofline
from shoal.engine.options import CompileOptions, check_optimizer
from shoal.engine.search.best_variant import Priced, best_variant
from shoal.engine.search.choose_encoded import choose_encoded
from shoal.engine.search.variants import Variants
from shoal.engine.step_planning import allowed
from shoal.errors import InputError
from shoal.memory.budget import budget_bytes as allowed_bytes
from shoal.memory.static_memory import StaticMemory
from shoal.offload.policy import AUTO


def plan(
    model: nn.Module,
    example: torch.Tensor | Sequence[Any],
    budget: int | str | None = None,
    *,
    hardware: str | Hardware | None = None,
    planner: str | planners.Planner = "joint",
    optimizer: torch.optim.Optimizer | None = None,
    offload_to: str | Path | None = AUTO,
    host_budget: int | str | None = None,
    lossy: str | Mapping[str, Any] | None = None,
    allow: str | Collection[str] | None = None,
    name: str | None = None,
) -> Plan:
    """Plan one training step without taking it.

    Nothing of the model is run: it and `example` may live on the "meta" device, where a network of any size takes no
    memory. The step alone is counted; under `shoal.compile`, what the training loop holds besides counts too: at least
    512 bytes for the loss and other small tensors, and the outputs of the step before where they are still held.

    Args:
        model: the network; it is planned as if in training mode and left as it is.
        example: the forward pass's argument, or a tuple of its arguments. Only shapes and dtypes matter.
        budget: device bytes at the peak of the step, an int or a text such as "2GiB"; "auto" and "80%" as for
            `shoal.compile`, of the memory of `hardware` where that is given. None keeps everything.
        hardware: a preset's name ("p100-nvlink", see `shoal hardware`) or a `Hardware`: times come from its rates
            (roofline), and kernels that are for the CPU alone are left out. None: the ops are profiled on this machine.
        planner: as for `shoal.compile`.
        optimizer: the optimizer whose state counts.
        offload_to: as for `shoal.compile`; "auto" allows host memory where `hardware` is given or the model is on CUDA.
        host_budget: most bytes there; None for no limit where `hardware` is given, else as for `shoal.compile`.
        lossy, allow: as for `shoal.compile`.
        name: the model's name in tables and errors; by default its class.

    Returns:
        A `Plan`: `explain()` for people, `save(path)` for later, `timeline` for the simulated step. One made for this
        machine can be given to `shoal.compile(model, plan=...)` to run as it is.

    Raises:
        InputError: an argument is none of what is listed above.
        CodecError: `lossy` names no codec for activations.
        BudgetError: no plan fits the budget.
        CaptureError: the model is not one graph.
        PlanError: a planner of your own returned no plan, or one that breaks a rule of `shoal.core.validate`.

    Example:
        >>> import shoal
        >>> block = lambda channels: [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*block(3), *block(8), *block(8), nn.Flatten())
        ...     images = torch.empty(4, 3, 32, 32)
        >>> shoal.plan(model, images, hardware="p100-nvlink").predicted_peak_bytes
        1235248
        >>> plan = shoal.plan(model, images, "700KiB", hardware="p100-nvlink", offload_to=None)
        >>> plan.predicted_peak_bytes, len(plan.kept), len(plan.residences) - len(plan.kept)
        (715632, 8, 6)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    target = presets.get(hardware) if isinstance(hardware, str) else hardware
    here = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    whole = here if target is None else target.device.memory_bytes
    options = CompileOptions.of(
        budget=allowed_bytes(budget, whole, of_environment=False),
        planner=planner,
        offload_to=offload_to,
        host_budget=host_budget,
        lossy=lossy,
        allow=allow,
    )
    check_optimizer(optimizer)
    budget_bytes, name = options.budget_bytes or 0, name or type(model).__name__
    planner_function = allowed(options.means, planner) if budget_bytes else planners.get("keep_all")
    started = time.perf_counter()

    def read(gm: fx.GraphModule, inputs: Sequence[Any]) -> Plan:
        def price(graph: fx.GraphModule) -> Priced[None]:
            captured = joint_step(graph, inputs, places, name=name, runs_here=target is None)
            device = torch.device("cpu") if captured.device.type == "meta" else captured.device
            with unset_fake_temporarily():
                return _priced(captured, device)

        places = InputPlaces.of(gm)
        if not budget_bytes:
            return price(gm).plan()[1]
        return best_variant(Variants(gm, options.means), price, budget_bytes, name).plan

    def _priced(captured: Captured, device: torch.device) -> Priced[None]:
        static_bytes = StaticMemory(model, optimizer).bytes_beside(captured.graph)
        link, hardware = _link_and_hardware(target, device, options)

        def costed(step: Captured) -> StepGraph:
            graph = profile_step(step, device) if target is None else roofline(step.graph, target)
            return replace(graph, static_bytes=static_bytes, link=link)

        def made(graph: StepGraph) -> Plan:
            return planner_function(graph, hardware, budget_bytes)

        def plan_it() -> tuple[None, Plan]:
            with unset_fake_temporarily():
                if options.lossy is None:
                    found = made(costed(captured))
                else:
                    _, found = choose_encoded(captured, options.lossy, budget_bytes, costed, made)
                check_own_plan(found.captured_graph, found.graph, found.residences, budget_bytes)
            return None, found

        return Priced(costed(captured), plan_it, encodes=options.lossy is not None)

    found = in_dynamo(model, example, read, name=name)
    return replace(found, planning_seconds=time.perf_counter() - started, options=options.to_json())


def _link_and_hardware(
    target: Hardware | None, device: torch.device, options: CompileOptions
) -> tuple[Link | None, Hardware]:
    offload = options.offload
    if target is not None:
        room_bytes = offload.host_budget_bytes or 0
        return (None if offload.to is None else replace(target.link, host_bytes=room_bytes)), target
    leaves = options.offloading(device.type)
    here = measure(device)
    return (link_to(leaves, device) if leaves is not None else None), here
