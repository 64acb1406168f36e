"""In which form a captured step is compiled: chosen at the first step of each shape, then remembered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.capture.captured import Captured
from shoal.capture.layered import Refused, is_of_a_module
from shoal.capture.pieces import in_pieces
from shoal.capture.step_writer import shrunk
from shoal.core.plan import Plan
from shoal.core.variant import Variant
from shoal.engine import form_cache
from shoal.engine.best_form import best_form
from shoal.engine.plan_kernels import check_kernels
from shoal.engine.search.variants import OwnForm, Variants
from shoal.engine.search.without_effect import without_effect
from shoal.engine.session import Session
from shoal.engine.step_planning import WHOLE_FORM, CompiledVariant
from shoal.errors import BudgetError, PlanError
from shoal.lowlevel.torch_state import autocast_state, autocasting
from shoal.memory.limit import no_memory_limit

_WORTH_SECONDS = 0.5  # a form that is found faster is searched for again

log = logging.getLogger("shoal")
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
            _, form, in_it = best_form(session, variants, lambda own: whole, session.options.form_means)
            session.remember_form(key, form)
            return form, in_it

        return compile_form(gm, choose)
    return _compile_best(session, variants, key, example_inputs, capture, compile_form)


def own_form(session: Session, gm: fx.GraphModule) -> CompiledVariant | Choose:
    """The step as its author wrote it, shrunk in the backward pass if it takes that; no other form is looked for."""
    if session.options.budget_bytes is None:
        return WHOLE_FORM
    return lambda whole: best_form(session, OwnForm(gm), lambda own: whole, frozenset())[1:]


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
            graph, form, in_it = best_form(session, variants, captured, session.options.form_means)
        session.remember_form(key, form)
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
