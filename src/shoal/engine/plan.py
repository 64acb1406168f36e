"""`shoal.plan`: the plan of a step, for this machine or for one that is not here, without training."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx, nn

from shoal.capture.call_arguments import Example
from shoal.capture.capture_step import InputRefused, in_dynamo
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.engine.forward_on_meta import sizes_that_would_do
from shoal.engine.options import Options
from shoal.engine.plan_kernels import kernels_of
from shoal.engine.pricing import Pricing
from shoal.engine.search.any_variant import Fitting, any_variant
from shoal.engine.search.variants import Variants
from shoal.engine.step_planning import UNMODIFIED
from shoal.engine.variant_of_step import variant_of_step
from shoal.errors import CaptureError, InputError
from shoal.offload.policy import AUTO

_Read = TypeVar("_Read")


def plan(
    model: nn.Module,
    example: Example,
    budget: int | str | None = None,
    *,
    hardware: str | Hardware | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    allow: str | Collection[str] | None = None,
    offload_to: str | Path | None = AUTO,
    options: Options | None = None,
    name: str | None = None,
) -> Plan:
    """Plan one training step without taking it.

    Nothing of the model is run: it and `example` may live on the "meta" device, where a network of any size takes no
    memory. What the training loop holds counts as it does in the first step under `shoal.compile`: as much as a loop
    may hold, for nothing is known of it yet. So the plan fits whatever the loop does, and the minimum that an error
    names is that of `shoal.compile`, which in addition tries budgets for loops that hold less.

    Args:
        model: the network; it is planned as if in training mode and left as it is.
        example: what the model is called with: its only argument, a tuple of its arguments, or a dict of its keyword
            arguments (a model of Hugging Face's kind). Only shapes and dtypes matter.
        budget: device bytes at the peak of the step, an int or a text such as "2GiB"; "auto" and "80%" as for
            `shoal.compile`, of the memory of `hardware` where that is given. None: SHOAL_BUDGET of the environment;
            where that is not set, everything is kept.
        hardware: a preset's name ("p100-nvlink", see `shoal hardware`) or a `Hardware`: times come from its rates
            (roofline), and kernels that are only for the CPU are left out. None: the ops are profiled on this machine.
        optimizer: the optimizer whose state counts, or its name, as for `shoal.compile`.
        allow: as for `shoal.compile`.
        offload_to: as for `shoal.compile`; "auto" allows host memory if `hardware` is given or the model is on CUDA.
        options: as for `shoal.compile`, without `plan`, `budget_of` and `cuda_graphs`. With `hardware`, `host_budget`
            None is no limit, and `kernels` "auto" is "eager"; "compiled" has all regions that there may be, with times
            by its rates: which of them are faster compiled cannot be measured.
        name: the model's name in tables and errors; by default its class.

    Returns:
        A `Plan`: `explain()` for people, `save(path)` for later, `timeline` for the simulated step. One made for this
        machine runs unchanged with `shoal.compile(model, options=shoal.Options(plan=plan))`.

    Raises:
        InputError: an argument is none of what is listed above.
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
        1667224
        >>> plan = shoal.plan(model, images, "1000KiB", hardware="p100-nvlink", offload_to=None)
        >>> plan.predicted_peak_bytes, len(plan.kept), len(plan.residences) - len(plan.kept)
        (1012152, 10, 19)
    """
    pricing = Pricing.of(
        model,
        budget,
        hardware=hardware,
        optimizer=optimizer,
        name=name,
        offload_to=offload_to,
        allow=allow,
        options=options,
    )
    return plan_of(pricing, example)


def plan_of(pricing: Pricing, example: Example) -> Plan:
    """`plan` of a step that is priced in one way, inside the budget of `pricing`."""
    started = time.perf_counter()

    def read(gm: fx.GraphModule, inputs: Sequence[Any]) -> Plan:
        options, compiled_as = pricing.options, UNMODIFIED
        if pricing.budget_bytes is None:
            made = pricing.prices(gm, inputs)(gm).plan(0)[0]
            return compiled_as.described(made.planned, made.loop, options)
        variants = Variants(gm, options.means)
        lines = pricing.say_without_effect(variants)
        _, compiled_as, _ = variant_of_step(pricing, variants, pricing.capture(gm, inputs), options.variant_means)
        assert compiled_as.found is not None
        return replace(
            compiled_as.described(compiled_as.found.planned, compiled_as.found.loop, options), without_effect=lines
        )

    found = _captured(pricing, example, read)
    if pricing.target is None:
        found = replace(found, kernels=kernels_of(found, pricing.device_type))
    return replace(found, planning_seconds=time.perf_counter() - started)


def any_plan_of(pricing: Pricing, example: Example, likely: int) -> Fitting:
    """A plan that fits, however slow: see `any_variant`."""

    def read(gm: fx.GraphModule, inputs: Sequence[Any]) -> Fitting:
        variants = Variants(gm, pricing.options.means)
        return any_variant(variants, pricing.prices(gm, inputs), required_budget(pricing), pricing.name, likely)

    return _captured(pricing, example, read)


def required_budget(pricing: Pricing) -> int:
    """The budget that a search is inside.

    Raises:
        InputError: there is none.
    """
    if pricing.budget_bytes is None:
        raise InputError("no budget was given; say how many bytes a step may use, such as budget='2GiB'")
    return pricing.budget_bytes


def _captured(pricing: Pricing, example: Example, read: Callable[[fx.GraphModule, Sequence[Any]], _Read]) -> _Read:
    """What is read of the step."""
    try:
        return in_dynamo(pricing.model, example, read, name=pricing.name)
    except InputRefused as refused:
        would_do = sizes_that_would_do(pricing.model, example)
        hint = f"; {would_do}" if would_do else ""
        raise CaptureError(refused.message + hint, details=refused.details) from None
