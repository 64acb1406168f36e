"""What the variants of a step cost, and their plans, for `shoal.plan`, `shoal.frontier` and `shoal.fit`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from shoal.capture.capture_step import InputPlaces, joint_step
from shoal.capture.captured import Captured
from shoal.core import arguments, presets
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.sizes import MAX_BYTES
from shoal.core.validate_plan import check_own_plan
from shoal.cost.measure import measure
from shoal.cost.measure_links import link_to
from shoal.cost.profile import profile_step
from shoal.cost.roofline import roofline
from shoal.engine.compile_options import CompileOptions
from shoal.engine.compiled_regions import in_unmeasured_regions
from shoal.engine.launched_step import as_launched
from shoal.engine.loop_memory import LoopMemory
from shoal.engine.options import Options, name_of, options_of
from shoal.engine.refusal_hints import with_hint
from shoal.engine.search.encoding import Encoding
from shoal.engine.search.priced import InVariant, Priced
from shoal.engine.search.variants import Variants
from shoal.engine.search.without_effect import without_effect
from shoal.engine.step_planning import CountedStep, Planned, PlannedVariant, StepCosts, StepPlanning
from shoal.engine.variant_of_step import variant_prices
from shoal.errors import BudgetError, InputError
from shoal.kernels.generator import state_bytes
from shoal.memory.budget import budget_bytes as allowed_bytes
from shoal.memory.optimizer_state import Declared, declared_optimizer
from shoal.memory.static_memory import StaticMemory

log = logging.getLogger("shoal")
_OF_A_TRAINED_MODEL = ("plan", "budget_of", "cuda_graphs")  # options of shoal.compile only


@dataclass(frozen=True)
class Counted:
    """The counts of a step, and of the same shrunk in the backward pass; None where nothing of it can be."""

    whole: CountedStep
    shrunk: CountedStep | None


@dataclass(frozen=True)
class Pricing:
    """How a model's step is priced and planned.

    Attributes:
        model: the network.
        name: its name in tables and errors.
        options: what its plans may use.
        budget_bytes: the caller's; None for none.
        target: whose rates give the times; None: ops are profiled on this machine.
        optimizer: whose state counts.
        said: lines of `say_without_effect` that were logged.
    """

    model: nn.Module
    name: str
    options: CompileOptions
    budget_bytes: int | None
    target: Hardware | None
    optimizer: Declared | None
    said: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        budget: int | str | None,
        *,
        hardware: str | Hardware | None,
        optimizer: torch.optim.Optimizer | str | None,
        name: str | None,
        allow: str | Collection[str] | None,
        offload_to: str | Path | None,
        options: Options | None,
        many_budgets: bool = False,
    ) -> Pricing:
        """What the keywords of `shoal.plan` stand for.

        Args:
            many_budgets: whether the step is planned inside other budgets too, so that there need be none here.

        Raises:
            InputError, CodecError: as `shoal.plan`.
        """
        arguments.instance("model", model, nn.Module)
        named = name_of(name, model)
        target = presets.get(hardware) if isinstance(hardware, str) else hardware
        if not isinstance(target, Hardware | None):
            raise InputError(f"hardware is a {type(target).__name__}; type a preset's name such as 'p100-nvlink'")
        here = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
        whole = here if target is None else target.device.memory_bytes
        budget_bytes = allowed_bytes(budget, whole)
        asked = options_of(options)
        for given in (each for each in _OF_A_TRAINED_MODEL if each in asked.given):
            raise InputError(f"shoal.Options({given}=...) is for shoal.compile; leave it out of this call")
        if target is not None and asked.rehearse is not None:
            raise InputError("rehearse= slows down copies on this machine; leave out hardware= or rehearse=")
        resolved = CompileOptions.of(
            budget=MAX_BYTES if many_budgets else budget_bytes, allow=allow, offload_to=offload_to, options=asked
        )
        declared = declared_optimizer(optimizer)
        return cls(model, named, resolved, budget_bytes, target, declared)

    @property
    def runs_here(self) -> bool:
        """Whether the step is planned for this machine."""
        return self.target is None

    def capture(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[fx.GraphModule], Captured]:
        """What captures a variant of a step: a graph that is called as `gm` is → its step.

        Args:
            gm, inputs: as Dynamo hands them to a backend.
        """
        places, here = InputPlaces.of(gm), self.runs_here
        return lambda own: joint_step(own, inputs, places, name=self.name, runs_here=here, keeps_as_written=own is gm)

    def prices(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[fx.GraphModule], Priced[PlannedVariant]]:
        """What prices a variant of a step.

        Args:
            gm, inputs: as of `capture`.

        Returns:
            A function of a graph that is called as `gm` is. Plans inside 0 bytes keep everything.
        """
        capture = self.capture(gm, inputs)
        prices = variant_prices(self, self.options.variant_means, self.loops, {})
        return lambda graph: prices.price(InVariant(capture(graph)))

    def in_regions(self, captured: Captured) -> Captured:
        """The step with the ops that are launched where it runs."""
        if self.runs_here:
            return as_launched(captured, self.options)
        return in_unmeasured_regions(captured) if self.options.kernels == "compiled" else captured

    def in_traced_layouts(self, captured: Captured) -> Captured:
        """The step: whether its results are laid out as they were traced shows when it runs."""
        return captured

    def loops(self, places: Collection[int]) -> tuple[LoopMemory, ...]:
        """The one that holds the most: a plan that is made before any step ran holds whatever the loop does."""
        return (LoopMemory(),)

    def planning(self, captured: Captured | CountedStep) -> StepPlanning:
        """The step, with what it costs and ready to be planned."""
        return StepPlanning(captured, self._costs_on(_device_of(captured)), self.options)

    def try_to_plan(
        self, planning: StepPlanning, loops: Sequence[LoopMemory], encoding: Encoding
    ) -> tuple[Planned, LoopMemory]:
        """See `StepPlanning.plan_in_any`."""
        try:
            made, loop = planning.plan_in_any(loops, encoding)
        except BudgetError as refused:
            raise with_hint(refused, self._static, self._static.state_bytes()) from None
        plan = made.plan
        check_own_plan(plan.captured_graph, plan.graph, plan.residences, plan.budget_bytes)
        return made, loop

    def _costs_on(self, device: torch.device) -> StepCosts:
        target, offload, static = self.target, self.options.offload, self._static
        if target is not None:
            room_bytes = offload.host_budget_bytes or 0
            link = None if offload.to is None else replace(target.link, host_bytes=room_bytes)
            return StepCosts(
                lambda step: roofline(step.graph, target),
                target,
                link,
                lambda graph: static.bytes_beside(graph, runs_here=False),
                state_bytes=0,
            )
        leaves = self.options.offloading(device.type)
        return StepCosts(
            lambda step: profile_step(step, device),
            measure(device),
            link_to(leaves, device) if leaves is not None else None,
            static.bytes_beside,
            state_bytes(device),
        )

    @cached_property
    def _static(self) -> StaticMemory:
        return StaticMemory(self.model, self.optimizer)

    @property
    def device_type(self) -> str:
        """Where ops are profiled: of the model's parameters, the CPU where these are nowhere."""
        return next((p.device.type for p in self.model.parameters() if p.device.type != "meta"), "cpu")

    def say_without_effect(self, variants: Variants) -> tuple[str, ...]:
        """Say once which means were allowed by name and do not apply to the step; the lines."""
        if self.target is not None:
            leaves = self.options.offload.to is not None
        else:
            leaves = self.options.offloading(self.device_type) is not None
        lines = without_effect(variants, self.options, leaves=leaves, runs_here=self.target is None)
        for line in lines:
            if line not in self.said:
                log.warning("%s: allow: %s", self.name, line)
        self.said.update(lines)
        return lines

    @property
    def is_of_counts(self) -> bool:
        """Whether what a step costs, and its plan, follow only from its counts, so that no op of it is needed."""
        return self.target is not None and self.options.lossy is None and self.options.kernels != "compiled"

    @property
    def finds_smallest(self) -> bool:
        """Whether its variants have `Priced.smallest`, and none has storages encoded."""
        return self.options.planner == "joint" and self.options.lossy is None

    def price_of_counts(self, step: Counted) -> Priced[Plan]:
        """What a step costs that was captured without times, or scaled from such steps, where `is_of_counts`."""

        def priced(counted: CountedStep) -> Priced[Plan]:
            planning = self.planning(counted)
            loops = self.loops(planning.outputs)

            def made(one: StepPlanning, how: Encoding) -> tuple[Plan, Plan]:
                plan = self.try_to_plan(one, loops, how)[0].plan
                return plan, plan

            return planning.in_loops(loops, made)

        smaller = None if step.shrunk is None else priced(step.shrunk)
        return replace(priced(step.whole), shrunk=lambda: smaller)


def _device_of(captured: Captured | CountedStep) -> torch.device:
    """Where its ops are timed."""
    device = captured.device if isinstance(captured, Captured) else torch.device("cpu")
    return torch.device("cpu") if device.type == "meta" else device
