"""What the forms of a step cost, and their plans: what `shoal.plan`, `shoal.frontier` and `shoal.fit` choose from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal import planners
from shoal.capture.capture_step import InputPlaces, joint_step
from shoal.capture.captured import Captured
from shoal.core import arguments, presets
from shoal.core.hardware import Hardware, Link
from shoal.core.plan import Plan
from shoal.core.sizes import MAX_BYTES
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_own_plan
from shoal.cost.measure import measure
from shoal.cost.measure_links import link_to
from shoal.cost.profile import profile_step
from shoal.cost.roofline import roofline
from shoal.engine.compile_options import CompileOptions
from shoal.engine.compiled_regions import in_unmeasured_regions
from shoal.engine.launched_step import as_launched
from shoal.engine.options import Options, name_of, options_of
from shoal.engine.search.choose_encoded import bounding_step, choose_encoded
from shoal.engine.search.encoded_steps import EncodedSteps
from shoal.engine.search.encoding import EncodeBelow, EncodeIfFaster
from shoal.engine.search.priced import Encodable, InVariant, Priced, Prices
from shoal.engine.search.variants import Variants
from shoal.engine.search.without_effect import without_effect
from shoal.engine.step_planning import allowed, limited_step
from shoal.errors import InputError
from shoal.kernels.generator import state_bytes
from shoal.memory.budget import budget_bytes as allowed_bytes
from shoal.memory.optimizer_state import Declared, declared_optimizer
from shoal.memory.static_memory import StaticMemory
from shoal.planners.limits import DEFAULT
from shoal.planners.smallest_plan import smallest_inside

log = logging.getLogger("shoal")
_OF_A_TRAINED_MODEL = ("plan", "budget_of", "cuda_graphs")  # options of shoal.compile only


@dataclass(frozen=True)
class Counted:
    """A step without times, and the same shrunk in the backward pass; None where nothing of it can be."""

    graph: StepGraph
    shrunk: StepGraph | None


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

    def prices(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[fx.GraphModule], Priced[None]]:
        """What prices a form of a step.

        Args:
            gm, inputs: as Dynamo hands them to a backend.

        Returns:
            A function of a graph that is called as `gm` is. Plans inside 0 bytes keep everything.
        """
        places = InputPlaces.of(gm)
        runs_here = self.target is None
        prices = Prices(self.options.form_means, self._in_regions, self._timed, self._costs, runs_here)

        def price(graph: fx.GraphModule) -> Priced[None]:
            is_own = graph is gm
            captured = joint_step(graph, inputs, places, name=self.name, runs_here=runs_here, keeps_as_written=is_own)
            return prices.price(InVariant(captured))

        return price

    def _in_regions(self, captured: Captured) -> Captured:
        if self.target is None:
            return as_launched(captured, self.options)
        return in_unmeasured_regions(captured) if self.options.kernels == "compiled" else captured

    def _timed(self, captured: Captured) -> StepGraph:
        device = _device_of(captured)
        if self.target is None:
            return self._complete(profile_step(captured, device), device)
        return self._complete(roofline(captured.graph, self.target), device)

    def _complete(self, timed: StepGraph, device: torch.device) -> StepGraph:
        static_bytes = StaticMemory(self.model, self.optimizer).bytes_beside(timed, runs_here=self.target is None)
        return replace(timed, static_bytes=static_bytes, link=self._link_and_hardware(device)[0])

    @unset_fake_temporarily()
    def _costs(self, steps: Sequence[InVariant]) -> tuple[Priced[None], Sequence[StepGraph]]:
        known = self._timed(steps[0].captured)
        return self._priced(known, steps[0].captured), [known]

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
        """Whether its forms have `Priced.smallest`, and none has storages encoded."""
        return self.options.planner == "joint" and self.options.lossy is None

    def price_of_counts(self, step: Counted) -> Priced[None]:
        """What a step costs that was captured without times, or scaled from such steps, where `is_of_counts`."""
        assert self.target is not None
        device = torch.device("cpu")
        whole, smaller = (
            None if graph is None else self._priced(self._complete(roofline(graph, self.target), device), None)
            for graph in (step.graph, step.shrunk)
        )
        assert whole is not None
        return replace(whole, shrunk=lambda: smaller)

    def _priced(self, known: StepGraph, captured: Captured | None) -> Priced[None]:
        device = torch.device("cpu") if captured is None else _device_of(captured)
        hardware, means, encodable = self._link_and_hardware(device)[1], self.options.means, None
        each_state_bytes = 0 if self.target else state_bytes(device)
        planner = allowed(means, self.options.planner, each_state_bytes)

        @unset_fake_temporarily()
        def made(
            budget_bytes: int,
            find: Callable[[Callable[[StepGraph], Plan]], Plan] = lambda planned: planned(known),
            planner: planners.Planner = planner,
        ) -> tuple[None, Plan]:
            planner = planner if budget_bytes else planners.get("keep_all")
            found = find(lambda graph: planner(graph, hardware, budget_bytes))
            check_own_plan(found.captured_graph, found.graph, found.residences, budget_bytes)
            return None, found if captured is None else replace(found, compiled=captured.read_with.compiled)

        def smallest(budget_bytes: int) -> tuple[None, Plan]:
            limits = replace(DEFAULT, order="order" in means)
            inside = allowed(means, partial(smallest_inside, limits=limits), each_state_bytes)
            return made(budget_bytes, planner=inside)

        if captured is not None and self.options.lossy is not None:
            steps = EncodedSteps({"": captured}, self.options.lossy, lambda graphs: self._timed(graphs[""]))

            @cache
            @unset_fake_temporarily()
            def bound(share: float) -> StepGraph:
                return limited_step(means, bounding_step(steps, share))

            def plan_encoded(budget_bytes: int, encoding: EncodeIfFaster | EncodeBelow) -> tuple[None, Plan]:
                return made(
                    budget_bytes, lambda planned: choose_encoded(steps, budget_bytes, planned, encoding=encoding)[1]
                )

            encodable = Encodable(bound, plan_encoded)
        is_joint = self.options.planner == "joint"
        return Priced(limited_step(means, known), made, encodable, smallest=smallest if is_joint else None)

    def _link_and_hardware(self, device: torch.device) -> tuple[Link | None, Hardware]:
        offload = self.options.offload
        if self.target is not None:
            room_bytes = offload.host_budget_bytes or 0
            return (None if offload.to is None else replace(self.target.link, host_bytes=room_bytes)), self.target
        leaves = self.options.offloading(device.type)
        here = measure(device)
        return (link_to(leaves, device) if leaves is not None else None), here


def _device_of(captured: Captured) -> torch.device:
    """Where its ops are timed."""
    return torch.device("cpu") if captured.device.type == "meta" else captured.device
