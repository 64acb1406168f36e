"""The variant in which a step trains fastest inside the budget: one search for `shoal.compile` and for `shoal.plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Protocol, TypeVar

from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.capture.captured import Captured
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE
from shoal.engine.compile_options import CompileOptions
from shoal.engine.loop_memory import LoopMemory
from shoal.engine.refusal_hints import with_optimistic
from shoal.engine.search.best_variant import best_variant, fitting_variant
from shoal.engine.search.encoding import Encoding
from shoal.engine.search.priced import InVariant, Priced, Prices
from shoal.engine.search.search_state import Best
from shoal.engine.search.variants import AnyVariants
from shoal.engine.step_planning import CompiledVariant, Planned, PlannedVariant, StepPlanning
from shoal.errors import BudgetError
from shoal.planners.limits import forget_searches

_Graph = TypeVar("_Graph", bound=Hashable)
_Loops = Callable[[Collection[int]], Sequence[LoopMemory]]


class ModelPlanning(Protocol):
    """Whose steps are planned, and for what.

    Attributes:
        options: what the plans are to be.
        name: the model's.
        runs_here: whether they run on this machine.
    """

    @property
    def options(self) -> CompileOptions: ...

    @property
    def name(self) -> str: ...

    @property
    def runs_here(self) -> bool: ...

    def in_regions(self, captured: Captured) -> Captured:
        """A step with the ops that are launched where it runs."""

    def in_traced_layouts(self, captured: Captured) -> Captured:
        """A step whose results are laid out as they were traced."""

    def planning(self, captured: Captured) -> StepPlanning:
        """A step, with what it costs and ready to be planned."""

    def loops(self, places: Collection[int]) -> tuple[LoopMemory, ...]:
        """What the training loop of a step with outputs at these places may hold, from the most to the least."""

    def try_to_plan(
        self, planning: StepPlanning, loops: Sequence[LoopMemory], encoding: Encoding
    ) -> tuple[Planned, LoopMemory]:
        """See `StepPlanning.plan_in_any`."""


def variant_of_step(
    model: ModelPlanning, variants: AnyVariants[_Graph], capture: Callable[[_Graph], Captured], means: frozenset[str]
) -> tuple[_Graph, CompiledVariant, Captured]:
    """The variant in which a step trains fastest: its graph, its plan, and the step in it.

    A variant in which the step fits whatever the loop holds is taken before a faster one that only may.

    Args:
        model: whose step it is.
        variants: its variants.
        capture: a graph → its training step, captured and not run.
        means: techniques that change its ops.

    Raises:
        BudgetError: no variant fits.
    """
    started = time.perf_counter()
    plannings: dict[str, StepPlanning] = {}
    budget_bytes = model.options.budget_bytes or 0
    captured = cache(capture)

    def price(loops: _Loops) -> Callable[[_Graph], Priced[PlannedVariant]]:
        prices = variant_prices(model, means, loops, plannings)
        return lambda graph: prices.price(InVariant(captured(graph)))

    try:
        found = _found(model, variants, price, budget_bytes)
    finally:
        forget_searches()  # what one search has found serves the next ones of this step
    made = found.made
    candidates = found.plan.candidates if len(found.plan.candidates) > 1 else ()  # else there was no choice
    written = None
    if found.variant != WHOLE:
        whole = model.in_traced_layouts(captured(variants.graph(WHOLE))).graph.fingerprint
        if whole in plannings:
            written = plannings[whole].unplanned.with_static(-made.planned.basis.graph.static_bytes)
    compiled_as = CompiledVariant(found.variant, candidates, time.perf_counter() - started, written)
    return found.graph, replace(compiled_as, found=made), made.captured


def _found(
    model: ModelPlanning,
    variants: AnyVariants[_Graph],
    price: Callable[[_Loops], Callable[[_Graph], Priced[PlannedVariant]]],
    budget_bytes: int,
) -> Best[_Graph, PlannedVariant]:
    """The variant that fits whatever the loop holds; else one that fits if the loop holds less; else what they need."""

    def in_some(part: slice) -> Callable[[_Graph], Priced[PlannedVariant]]:
        return price(lambda places: model.loops(places)[part])

    most, less, least = in_some(slice(1)), in_some(slice(1, None)), in_some(slice(-1, None))
    if len(model.loops(())) == 1:
        return best_variant(variants, most, budget_bytes, model.name)
    for loops in (most, less):
        with suppress(BudgetError):  # a hopeless budget is refused for all loops
            if (found := fitting_variant(variants, loops, budget_bytes, model.name)) is not None:
                return found
    try:
        return best_variant(variants, most, budget_bytes, model.name)
    except BudgetError as refused:
        try:
            return best_variant(variants, least, budget_bytes, model.name)
        except BudgetError as optimistic:
            raise with_optimistic(refused, optimistic) from None


def variant_prices(
    model: ModelPlanning, means: frozenset[str], loops: _Loops, plannings: dict[str, StepPlanning]
) -> Prices[PlannedVariant]:
    """What the variants of a step cost in whichever of some loops.

    Args:
        model, means: as of `variant_of_step`.
        loops: of a step, by the places of its outputs.
        plannings: by fingerprint, the steps that were priced; filled in.
    """

    def planning_of(laid_out: Captured) -> StepPlanning:
        with unset_fake_temporarily():
            return model.planning(laid_out)

    def timed(captured: Captured) -> StepGraph:
        planning = planning_of(model.in_traced_layouts(captured))
        return planning.priced(loops(planning.outputs)[-1])

    def costs(steps: Sequence[InVariant]) -> tuple[Priced[PlannedVariant], Sequence[StepGraph]]:
        captured, laid_out = steps[0].captured, model.in_traced_layouts(steps[0].captured)
        planning = planning_of(laid_out)

        def made(one: StepPlanning, how: Encoding) -> tuple[PlannedVariant, Plan]:
            asked = loops(one.outputs)
            if len(asked) > 1:  # what the step needs in the others is asked for only if no variant fits
                asked = tuple(loop for loop in asked if one.may_fit(loop)) or asked[-1:]
            planned, loop = model.try_to_plan(one, asked, how)
            return PlannedVariant(captured, laid_out, planned, loop), planned.plan

        plannings[planning.fingerprint] = planning
        priced = planning.in_loops(loops(planning.outputs), made)
        return priced, [priced.graph]

    return Prices(means, model.in_regions, timed, costs, model.runs_here)
