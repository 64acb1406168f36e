"""In which variant a captured step is compiled: chosen at the first step of each shape, then remembered."""

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
from shoal.engine import variant_cache
from shoal.engine.plan_kernels import check_kernels
from shoal.engine.search.variants import OwnVariant, Variants
from shoal.engine.search.without_effect import without_effect
from shoal.engine.session import Session
from shoal.engine.step_planning import UNMODIFIED, CompiledVariant
from shoal.engine.variant_of_step import variant_of_step
from shoal.errors import BudgetError, PlanError
from shoal.lowlevel.torch_state import autocast_state, autocasting
from shoal.memory.limit import no_memory_limit

_WORTH_SECONDS = 0.5  # a variant that is found faster is searched for again

log = logging.getLogger("shoal")
Compiled = Callable[..., Any]
Choose = Callable[[Captured], tuple[CompiledVariant, Captured]]
CompileVariant = Callable[[fx.GraphModule, CompiledVariant | Choose], Compiled]


def compile_chosen(
    session: Session,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    capture: Callable[[fx.GraphModule], Captured],
    compile_variant: CompileVariant,
) -> Compiled:
    """Compile a graph of Dynamo's in the variant that trains fastest inside the budget.

    Args:
        session: of the model.
        gm, example_inputs: as Dynamo hands them to a backend.
        capture: a graph → its training step, captured and not run.
        compile_variant: compiles a graph in one variant; or in the one that a function chooses once the step is
            captured, which returns the step in that variant too.

    Raises:
        BudgetError: no variant fits.
        PlanError: the given plan is for a variant that the step does not have.
    """
    variants = Variants(gm, session.options.variant_means)
    devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
    if session.ready_plan is not None:
        check_kernels(session.ready_plan, "cuda" if "cuda" in devices else "cpu")
        return _compile_as_planned(session.ready_plan, variants, compile_variant)
    if session.options.budget_bytes is None or not _trains(example_inputs):
        return compile_variant(gm, UNMODIFIED)
    leaves = session.offloading is not None
    session.sizes.has_variants |= variants.has_others
    session.say_without_effect(without_effect(variants, session.options, leaves=leaves, runs_here=True))
    key = _inputs(gm)
    known = session.status.variants.get(key)
    if known is not None:
        try:
            return compile_variant(
                variants.graph(known), session.compiled_variants.get((key, known), CompiledVariant(known))
            )
        except (BudgetError, PlanError, Refused):
            pass  # there may be another that fits
    if not variants.has_other_graphs:  # chosen while AOTAutograd waits for it, and nothing is traced twice

        def choose(whole: Captured) -> tuple[CompiledVariant, Captured]:
            _, compiled_as, in_it = variant_of_step(session, variants, lambda own: whole, session.options.variant_means)
            session.remember_variant(key, compiled_as)
            return compiled_as, in_it

        return compile_variant(gm, choose)
    return _compile_best(session, variants, key, example_inputs, capture, compile_variant)


def own_variant(session: Session, gm: fx.GraphModule) -> CompiledVariant | Choose:
    """The step as its author wrote it, shrunk in the backward pass if it takes that; no other variant is looked for."""
    if session.options.budget_bytes is None:
        return UNMODIFIED
    return lambda whole: variant_of_step(session, OwnVariant(gm), lambda own: whole, frozenset())[1:]


def in_variant(session: Session, captured: Captured, variant: Variant) -> Captured:
    """A step, captured from the graph of a variant, as it runs in that variant; shrunk where anything of it can be.

    Raises:
        PlanError: the variant has pieces of ops that this step does not have.
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
    compile_variant: CompileVariant,
) -> Compiled:
    """Trace all variants of the step for the one that trains fastest, or only that one if an earlier run chose it."""
    with unset_fake_temporarily():
        digest = variant_cache.digest(session, variants.own, example_inputs)
    if (compiled_as := variant_cache.recall(digest)) is not None:
        try:
            compiled = compile_variant(variants.graph(compiled_as.variant), compiled_as)
        except (BudgetError, PlanError, Refused) as reason:
            log.debug("%s: %s does not fit any more (%s)", session.name, compiled_as.variant, reason)
        else:
            session.remember_variant(key, compiled_as)
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
            graph, compiled_as, in_it = variant_of_step(session, variants, captured, session.options.variant_means)
        session.remember_variant(key, compiled_as)
        if compiled_as.seconds > _WORTH_SECONDS:
            variant_cache.remember(digest, compiled_as)
        if graph is not variants.own and not in_it.can_replace(whole):
            raise _Other(graph, compiled_as)
        return compiled_as, in_it

    try:
        return compile_variant(variants.own, choose)
    except _Other as other:
        return compile_variant(other.graph, other.compiled_as)


class _Other(Exception):
    """Ends the compilation of an unmodified step: it trains faster in another variant, which has to be traced."""

    def __init__(self, graph: fx.GraphModule, compiled_as: CompiledVariant) -> None:
        self.graph, self.compiled_as = graph, compiled_as


def _compile_as_planned(plan: Plan, variants: Variants, compile_variant: CompileVariant) -> Compiled:
    try:
        graph = variants.graph(plan.variant)
    except Refused as reason:
        raise PlanError(f"the plan is for a step with {plan.variant}; here {reason}; plan it again") from None
    return compile_variant(graph, CompiledVariant(plan.variant, plan.candidates))


def _trains(example_inputs: Sequence[Any]) -> bool:
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(value.requires_grad for value in tensors)


def _inputs(gm: fx.GraphModule) -> str:
    """What the model is called with, by its shapes."""
    values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder") if not is_of_a_module(node)]
    return ", ".join(f"{value.dtype} {tuple(value.shape)}" for value in values)
