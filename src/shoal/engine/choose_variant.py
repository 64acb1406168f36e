"""In which form a captured step is compiled: chosen at the first step of each shape, then remembered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.capture.captured import Captured
from shoal.capture.layered import Refused, is_of_a_module
from shoal.capture.pieces import in_pieces
from shoal.capture.shrunk import shrunk
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Variant
from shoal.engine import form_cache
from shoal.engine.loop_memory import LoopMemory
from shoal.engine.plan_kernels import check_kernels
from shoal.engine.search.best_variant import best_variant, fitting_variant
from shoal.engine.search.encoding import EncodeNothing, Encoding
from shoal.engine.search.priced import Encodable, InVariant, Priced, Prices
from shoal.engine.search.search_state import Best
from shoal.engine.search.variants import Forms, OwnForm, Variants
from shoal.engine.search.without_effect import without_effect
from shoal.engine.session import Session
from shoal.engine.step_planning import WHOLE_FORM, CompiledVariant, Planned, StepPlanning
from shoal.errors import BudgetError, PlanError
from shoal.lowlevel.torch_state import autocast_state, autocasting
from shoal.memory.limit import no_memory_limit
from shoal.planners.smallest_plan import refuse_in_a_moment

_WORTH_SECONDS = 0.5  # a form that is found faster is searched for again

log = logging.getLogger("shoal")
_Made = tuple[Captured, Captured, Planned, LoopMemory]  # as it runs, and so that results are laid out as traced
Compiled = Callable[..., Any]
Choose = Callable[[Captured], tuple[CompiledVariant, Captured]]
CompileForm = Callable[[fx.GraphModule, CompiledVariant | Choose], Compiled]


def compile_chosen(
    session: Session,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    capture: Callable[[fx.GraphModule], Captured],
    compile_form: CompileForm,
) -> Compiled:
    """Compile a graph of Dynamo's in the form that trains fastest inside the budget.

    Args:
        session: of the model.
        gm, example_inputs: as Dynamo hands them to a backend.
        capture: a graph → its training step, captured and not run.
        compile_form: compiles a graph in one form; or in the one that a function chooses once the step is captured,
            which returns the step in that form too.

    Raises:
        BudgetError: no form fits.
        PlanError: the given plan is for a form that the step does not have.
    """
    variants = Variants(gm, session.options.form_means)
    devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
    if session.ready_plan is not None:
        check_kernels(session.ready_plan, "cuda" if "cuda" in devices else "cpu")
        return _compile_as_planned(session.ready_plan, variants, compile_form)
    if session.options.budget_bytes is None or not _trains(example_inputs):
        return compile_form(gm, WHOLE_FORM)
    leaves = session.offloading is not None
    session.sizes.has_forms |= variants.has_others
    session.say_without_effect(without_effect(variants, session.options, leaves=leaves, runs_here=True))
    key = _inputs(gm)
    known = session.status.variants.get(key)
    if known is not None:
        try:
            return compile_form(variants.graph(known), session.forms.get((key, known), CompiledVariant(known)))
        except (BudgetError, PlanError, Refused):
            pass  # there may be another that fits
    if not variants.has_other_graphs:  # its form is chosen while AOTAutograd waits for it, and nothing is traced twice

        def choose(whole: Captured) -> tuple[CompiledVariant, Captured]:
            return _best_form(session, variants, key, lambda own: whole, session.options.form_means)[1:]

        return compile_form(gm, choose)
    return _compile_best(session, variants, key, example_inputs, capture, compile_form)


def own_form(session: Session, gm: fx.GraphModule) -> CompiledVariant | Choose:
    """The step as its author wrote it, shrunk in the backward pass if it takes that; no other form is looked for."""
    if session.options.budget_bytes is None:
        return WHOLE_FORM
    return lambda whole: _best_form(session, OwnForm(gm), "", lambda own: whole, frozenset())[1:]


def in_form(session: Session, captured: Captured, variant: Variant) -> Captured:
    """A step, captured from the graph of a form, as it runs in that form; shrunk where anything of it can be.

    Raises:
        PlanError: the form has pieces of ops that this step does not have.
    """
    if variant.shrunk:
        captured = shrunk(captured) or captured
    captured = session.in_regions(captured)
    with no_memory_limit():
        return in_pieces(captured, variant.pieces)


def _compile_best(
    session: Session,
    variants: Variants,
    key: str,
    example_inputs: Sequence[Any],
    capture: Callable[[fx.GraphModule], Captured],
    compile_form: CompileForm,
) -> Compiled:
    """Trace all forms of the step for the one that trains fastest, or only that one if an earlier run chose it."""
    with unset_fake_temporarily():
        digest = form_cache.digest(session, variants.own, example_inputs)
    if (form := form_cache.recall(digest)) is not None:
        try:
            compiled = compile_form(variants.graph(form.variant), form)
        except (BudgetError, PlanError, Refused) as reason:
            log.debug("%s: %s does not fit any more (%s)", session.name, form.variant, reason)
        else:
            session.remember_form(key, form)
            return compiled

    autocast = autocast_state(example_inputs)

    def choose(whole: Captured) -> tuple[CompiledVariant, Captured]:
        around = TracingContext.try_get()
        context = TracingContext(around.fake_mode) if around is not None else None  # AOTAutograd writes into its own

        def captured(graph: fx.GraphModule) -> Captured:
            if graph is variants.own:
                return whole
            with no_memory_limit(), torch.enable_grad(), tracing(context), autocasting(autocast):
                return capture(graph)

        with unset_fake_temporarily():
            graph, form, in_it = _best_form(session, variants, key, captured, session.options.form_means)
        if form.seconds > _WORTH_SECONDS:
            form_cache.remember(digest, form)
        if graph is not variants.own and not in_it.can_replace(whole):
            raise _Other(graph, form)
        return form, in_it

    try:
        return compile_form(variants.own, choose)
    except _Other as chosen_form:
        return compile_form(chosen_form.graph, chosen_form.form)


class _Other(Exception):
    """Ends the compilation of a step in its own form: it trains faster in another one, which has to be traced again."""

    def __init__(self, graph: fx.GraphModule, form: CompiledVariant) -> None:
        self.graph, self.form = graph, form


def _best_form(
    session: Session,
    variants: Forms[fx.GraphModule],
    key: str,
    capture: Callable[[fx.GraphModule], Captured],
    means: frozenset[str],
) -> tuple[fx.GraphModule, CompiledVariant, Captured]:
    """The graph of the form that trains fastest, its plan, and the step in that form."""
    started = time.perf_counter()

    def planning_of(laid_out: Captured) -> StepPlanning:
        with unset_fake_temporarily():
            return session.planning(laid_out, laid_out.device)

    def timed(planning: StepPlanning) -> StepGraph:
        return planning.priced(session.least_loop(planning))

    def costs(steps: Sequence[InVariant]) -> tuple[Priced[_Made], Sequence[StepGraph]]:
        captured = steps[0].captured
        laid_out = session.in_traced_layouts(captured)
        planning = planning_of(laid_out)
        plannings[planning.fingerprint] = planning
        known = timed(planning)

        @unset_fake_temporarily()
        def made(encoding: Encoding) -> tuple[_Made, Plan]:
            planned, loop = session.try_to_plan(planning, encoding)
            return (captured, laid_out, planned, loop), planned.plan

        @unset_fake_temporarily()
        def refuse(budget_bytes: int) -> None:
            session.try_to_plan(planning.by(refuse_in_a_moment), EncodeNothing())

        @cache
        @no_memory_limit()
        @unset_fake_temporarily()
        def with_share_encoded(share: float) -> StepGraph:
            return planning.bounding_step(session.least_loop(planning), share)

        priced = Priced(
            known,
            lambda budget_bytes: made(EncodeNothing()),  # the session's own
            None if session.options.lossy is None else Encodable(with_share_encoded, lambda _, how: made(how)),
            refuse=refuse if session.options.planner == "joint" else None,
        )
        return priced, [known]

    def other(captured: Captured) -> StepGraph:
        return timed(planning_of(session.in_traced_layouts(captured)))

    traced: dict[fx.GraphModule, Captured] = {}
    plannings: dict[str, StepPlanning] = {}
    prices = Prices(means, session.in_regions, other, costs)
    budget_bytes = session.options.budget_bytes or 0

    def price(graph: fx.GraphModule) -> Priced[_Made]:
        if graph not in traced:
            traced[graph] = capture(graph)
        return prices.price(InVariant(traced[graph]))

    best: Best[fx.GraphModule, _Made] | None = None
    if session.may_hope:
        with session.for_the_worst_loop(), suppress(BudgetError):  # a hopeless budget is refused for both loops
            best = fitting_variant(variants, price, budget_bytes, session.name)
    if best is None:
        best = best_variant(variants, price, budget_bytes, session.name)
    in_it, laid_out, planned, loop = best.made
    candidates = best.plan.candidates if len(best.plan.candidates) > 1 else ()  # else there was no choice
    written = None
    if best.variant != WHOLE and (whole := traced.get(variants.graph(WHOLE))) is not None:
        as_written = plannings.get(session.in_traced_layouts(whole).graph.fingerprint)
        if as_written is not None:
            written = as_written.unplanned.with_static(-planned.basis.graph.static_bytes)
    form = CompiledVariant(best.variant, candidates, time.perf_counter() - started, written)
    if key:
        session.remember_form(key, form)
    form = replace(form, found=(laid_out, planned, loop))
    return best.graph, form, in_it


def _compile_as_planned(plan: Plan, variants: Variants, compile_form: CompileForm) -> Compiled:
    try:
        graph = variants.graph(plan.variant)
    except Refused as reason:
        raise PlanError(f"the plan is for a step with {plan.variant}; here {reason}; plan it again") from None
    return compile_form(graph, CompiledVariant(plan.variant, plan.candidates))


def _trains(example_inputs: Sequence[Any]) -> bool:
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(value.requires_grad for value in tensors)


def _inputs(gm: fx.GraphModule) -> str:
    """What the model is called with, by its shapes."""
    values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder") if not is_of_a_module(node)]
    return ", ".join(f"{value.dtype} {tuple(value.shape)}" for value in values)
