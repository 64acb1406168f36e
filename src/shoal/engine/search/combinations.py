"""Which variants combine: layers in parts, with norms fused or inverted in the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.search_state import GOOD_ENOUGH, WORTH_A_PLAN
from shoal.engine.search.variants import AnyVariants
from shoal.planners.estimates import about_least_bytes


def without_norms(variant: Variant) -> tuple[Variant, ...]:
    """What takes the place of a variant in parts that the step does not have: norms as they are, if all are cut."""
    return () if WHOLE in (variant.norms, variant.parts) else (variant.parts,)


def in_parts(variants: AnyVariants[Any], norms: Variant, *, needs_more: bool) -> Iterator[Variant]:
    """The variants in parts, with norms computed in another way in the layers that are not cut.

    If the step needs more bytes with these, it is asked for on slices with norms as they are too.

    Args:
        variants: of a step.
        norms: how norms are computed.
        needs_more: whether the step needs more bytes with these.
    """
    for one in variants.split():
        if one.slices or not needs_more:
            yield one.with_norms(norms)
        if needs_more:
            yield one


def is_slowed_by_slices(sliced: StepGraph, rest: StepGraph) -> bool:
    """Whether a step on slices takes longer than with no layer cut and the same norms, both with everything kept: if
    not, as on processors whose caches hold a slice, it is of no use to cut fewer layers."""
    return sliced.plain_seconds > (1 + GOOD_ENOUGH) * rest.plain_seconds


def has_room(bound_seconds: float, graph: StepGraph) -> bool:
    """Whether a variant is hardly slowed down for lack of room, by its bound."""
    return bound_seconds <= (1 + WORTH_A_PLAN) * graph.plain_seconds


def norms_of_the_rest(candidates: Iterable[tuple[Variant, StepGraph]]) -> tuple[Variant, bool]:
    """How norms are computed in layers that are not cut, and whether the step needs more bytes so.

    Batch norms are fused if that is faster with everything kept, other norms are inverted if that needs fewer bytes.

    Args:
        candidates: of the whole step, the unmodified one among them, with what they cost.
    """
    graphs = dict(candidates)
    whole, inverted = graphs[WHOLE], Variant(invert=True)
    whole_bytes, found, needs_more = about_least_bytes(whole), WHOLE, False
    fused = [one for one in graphs if one.fuse and one == one.norms and one.up_to == 1]
    fastest = min(fused, key=lambda one: graphs[one].plain_seconds, default=WHOLE)
    if graphs[fastest].plain_seconds < whole.plain_seconds:
        found, needs_more = fastest, about_least_bytes(graphs[fastest]) > whole_bytes
    if inverted in graphs and about_least_bytes(graphs[inverted]) < whole_bytes:
        found = replace(found, invert=True)
    return found, needs_more
