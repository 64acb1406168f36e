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
from shoal.capture.pieces import choose_elsewhere, choose_faster, choose_pieces, in_pieces
from shoal.capture.shrunk import shrunk
from shoal.core import presets
from shoal.core.hardware import Hardware, Link
from shoal.core.lossy import LossyOptions
from shoal.core.means import KERNEL_MEANS
from shoal.core.plan import Plan
from shoal.core.sizes import MAX_BYTES
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_own_plan
from shoal.core.variant import Pieces
from shoal.cost.measure import measure
from shoal.cost.measure_links import link_to
from shoal.cost.profile import profile_step
from shoal.cost.roofline import roofline
from shoal.engine.compile_options import CompileOptions
from shoal.engine.compiled_regions import in_unmeasured_regions
from shoal.engine.launched_step import as_launched
from shoal.engine.options import Options, options_of
from shoal.engine.search.choose_encoded import bounding_step, choose_encoded
from shoal.engine.search.encoded_steps import EncodedSteps
from shoal.engine.search.encoding import EncodeBelow, EncodeIfFaster
from shoal.engine.search.priced import Encodable, Priced
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
        if not isinstance(model, nn.Module):
            raise InputError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
        target = presets.get(hardware) if isinstance(hardware, str) else hardware
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
        return cls(model, name or type(model).__name__, resolved, budget_bytes, target, declared)

    def prices(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[fx.GraphModule], Priced[None]]:
        """What prices a form of a step.

        Args:
            gm, inputs: as Dynamo hands them to a backend.

        Returns:
            A function of a graph that is called as `gm` is. Plans inside 0 bytes keep everything.
        """
        places = InputPlaces.of(gm)

        def price(graph: fx.GraphModule) -> Priced[None]:
            runs_here, is_own = self.target is None, graph is gm
            captured = joint_step(graph, inputs, places, name=self.name, runs_here=runs_here, keeps_as_written=is_own)
            return replace(priced(captured), shrunk=lambda: smaller(captured))

        def smaller(captured: Captured) -> Priced[None] | None:
            found = shrunk(captured)
            return None if found is None else priced(found)

        def priced(captured: Captured) -> Priced[None]:
            captured = self._in_regions(captured)
            device = torch.device("cpu") if captured.device.type == "meta" else captured.device
            with unset_fake_temporarily():
                return self._priced(captured.graph, captured, device)

        return price

    def _in_regions(self, captured: Captured) -> Captured:
        if self.target is None:
            return as_launched(captured, self.options)
        return in_unmeasured_regions(captured) if self.options.kernels == "compiled" else captured

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
        whole, smaller = (
            None if graph is None else self._priced(graph, None, torch.device("cpu"))
            for graph in (step.graph, step.shrunk)
        )
        assert whole is not None
        return replace(whole, shrunk=lambda: smaller)

    def _priced(self, graph: StepGraph, captured: Captured | None, device: torch.device) -> Priced[None]:
        static_bytes = StaticMemory(self.model, self.optimizer).bytes_beside(graph, runs_here=self.target is None)
        link, hardware = self._link_and_hardware(device)
        means, lossy = self.options.means, self.options.lossy
        each_state_bytes = 0 if self.target else state_bytes(device)
        planner = allowed(means, self.options.planner, each_state_bytes)

        def completed(timed: StepGraph) -> StepGraph:
            return replace(timed, static_bytes=static_bytes, link=link)

        def costed(step: Captured) -> StepGraph:
            timed = profile_step(step, device) if self.target is None else roofline(step.graph, self.target)
            return completed(timed)

        def made(
            budget_bytes: int,
            find: Callable[[Callable[[StepGraph], Plan]], Plan],
            planner: planners.Planner = planner,
        ) -> tuple[None, Plan]:
            def planned(graph: StepGraph) -> Plan:
                return (planner if budget_bytes else planners.get("keep_all"))(graph, hardware, budget_bytes)

            with unset_fake_temporarily():
                found = find(planned)
                check_own_plan(found.captured_graph, found.graph, found.residences, budget_bytes)
            return None, found if captured is None else replace(found, compiled=captured.read_with.compiled)

        def plan(budget_bytes: int) -> tuple[None, Plan]:
            return made(budget_bytes, lambda planned: planned(known))

        def smallest(budget_bytes: int) -> tuple[None, Plan]:
            limits = replace(DEFAULT, order="order" in means)
            inside = allowed(means, partial(smallest_inside, limits=limits), each_state_bytes)
            return made(budget_bytes, lambda planned: planned(known), inside)

        def with_encoded(step: Captured, how: LossyOptions) -> Encodable[None]:
            steps = EncodedSteps(step, how, costed)

            @cache
            def graph(share: float) -> StepGraph:
                with unset_fake_temporarily():
                    return limited_step(means, bounding_step(steps, share))

            def plan_encoded(budget_bytes: int, encoding: EncodeIfFaster | EncodeBelow) -> tuple[None, Plan]:
                def find(planned: Callable[[StepGraph], Plan]) -> Plan:
                    return choose_encoded(steps, budget_bytes, planned, encoding=encoding)[1]

                return made(budget_bytes, find)

            return Encodable(graph, plan_encoded)

        def changed(choose: Callable[..., tuple[Pieces, ...]]) -> tuple[tuple[Pieces, ...], Priced[None]] | None:
            form_means = self.options.form_means
            if captured is None or not KERNEL_MEANS & form_means:
                return None
            with unset_fake_temporarily():
                pieces = choose(captured, known, form_means, costed)
                if not pieces:
                    return None
                in_them = in_pieces(captured, pieces)
                return pieces, self._priced(in_them.graph, in_them, device)

        if captured is None:
            assert self.target is not None
            known = completed(roofline(graph, self.target))
        else:
            known = costed(captured)
        return Priced(
            limited_step(means, known),
            plan,
            with_encoded(captured, lossy) if captured is not None and lossy is not None else None,
            cut=lambda: changed(choose_pieces if self.target is None else choose_elsewhere),
            faster=lambda: changed(choose_faster) if self.target is None else None,
            smallest=smallest if self.options.planner == "joint" else None,
        )

    def _link_and_hardware(self, device: torch.device) -> tuple[Link | None, Hardware]:
        offload = self.options.offload
        if self.target is not None:
            room_bytes = offload.host_budget_bytes or 0
            return (None if offload.to is None else replace(self.target.link, host_bytes=room_bytes)), self.target
        leaves = self.options.offloading(device.type)
        here = measure(device)
        return (link_to(leaves, device) if leaves is not None else None), here
