"""The variants of an iteration: its graphs as their author wrote them, fused, on slices, in pieces; and the fastest.

A variant of the iteration is one of each graph that has it; the others stay unmodified. What eager code between the
graphs uses was measured once and does not depend on how they are computed. The search is that of a step of one graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.capture.captured import Captured
from shoal.capture.layered import Refused
from shoal.core.joined_step import Part, label
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Pieces, Variant
from shoal.cost.measure import measure
from shoal.engine.iteration.first import in_first_run
from shoal.engine.iteration.graphs import DynamoGraph, GraphSequence
from shoal.engine.iteration.plan import GraphVariant, PlannedParts, VariantPlanning
from shoal.engine.iteration.record import Ports
from shoal.engine.search.any_variant import smallest_variant
from shoal.engine.search.best_variant import best_variant
from shoal.engine.search.choose_encoded import bounding_step, choose_encoded
from shoal.engine.search.combinations import without_norms
from shoal.engine.search.encoded_steps import EncodedSteps
from shoal.engine.search.encoding import EncodeBelow, EncodeIfFaster
from shoal.engine.search.priced import Encodable, InVariant, Priced, Prices
from shoal.engine.search.split_variants import PatchWork
from shoal.engine.search.variants import variants_up_to
from shoal.engine.step_planning import allowed
from shoal.kernels.generator import state_bytes
from shoal.memory.limit import no_memory_limit
from shoal.planners import Planner
from shoal.planners.limits import DEFAULT, forget_searches
from shoal.planners.smallest_plan import refuse_in_a_moment, smallest_inside

_Changed = Mapping[DynamoGraph, tuple[fx.GraphModule, Variant]]  # graphs that are not as their author wrote them


class IterationVariants:
    """See `shoal.engine.search.variants.Variants`.

    Args:
        graphs: those of the iteration.
    """

    def __init__(self, graphs: Iterable[DynamoGraph]) -> None:
        self._graphs = tuple(dict.fromkeys(graphs))

    def of_norms(self) -> Iterator[Variant]:
        return iter(dict.fromkeys(variant for one in self._graphs for variant in one.variants.of_norms()))

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        return variants_up_to(fused, [elems for one in self._graphs for elems in one.variants.norm_elems])

    def split(self) -> Iterator[Variant]:
        found: dict[Variant, Variant] = {}
        for own in (own for one in self._graphs for own in one.variants.split()):
            found[_of_any_depth(own)] = max(own, found.get(_of_any_depth(own), own), key=lambda variant: variant.depth)
        return iter(found.values())

    def of_fewer_layers(self, sliced: Variant) -> Iterator[Variant]:
        own = self._own(sliced.parts).items()
        shares = {fewer.depth / full.depth for one, full in own for fewer in one.variants.of_fewer_layers(full)}
        return (replace(sliced, depth=share * sliced.depth) for share in sorted(shares, reverse=True))

    def work(self, variant: Variant) -> PatchWork:
        found = [one.variants.work(own) for one, own in self._own(variant.parts).items()]
        return PatchWork(max(work.more_share for work in found), sum(work.n_calls for work in found))

    def graph(self, variant: Variant) -> _Changed:
        if replace(variant, pieces=(), shrunk=False) == WHOLE:
            return {}
        found: dict[DynamoGraph, tuple[fx.GraphModule, Variant]] = {}
        reason = ""
        for one, own in self._own(variant).items():
            for each in (own, *without_norms(own)):
                try:
                    found[one] = one.variants.graph(each), each
                    break
                except Refused as refused:
                    reason = str(refused)
        if not found:
            raise Refused(reason)
        return found

    def _own(self, variant: Variant) -> dict[DynamoGraph, Variant]:
        """The same variant of each graph that has it; of a graph that cannot run in these parts, with these norms."""
        norms = variant.norms
        if variant.parts == WHOLE:
            return dict.fromkeys(self._graphs, norms)
        pairs = ((one, own) for one in self._graphs for own in one.variants.split())
        found = {one: own for one, own in pairs if _of_any_depth(own) == _of_any_depth(variant.parts)}
        if not found:
            raise Refused("no graph of it can run part by part in this way")
        if variant.slices and (share := variant.depth / max(own.depth for own in found.values())) < 1:
            found = {one: _of_about(share, own, one) for one, own in found.items()}
        if norms == WHOLE:
            return found
        return {one: found[one].with_norms(norms) if one in found else norms for one in self._graphs}


def _of_about(share: float, full: Variant, graph: DynamoGraph) -> Variant:
    """The graph on slices of about that share of the layers that can be cut."""
    each = (full, *graph.variants.of_fewer_layers(full))
    return min(each, key=lambda one: abs(one.depth - share * full.depth))


def _of_any_depth(variant: Variant) -> Variant:
    """Slices are as deep as each graph takes; the variant of the iteration has the depth of the deepest."""
    return replace(variant, depth=1.0) if variant.slices else variant


def plan_best_variant(
    planning: VariantPlanning, graphs: Sequence[DynamoGraph], sequence: GraphSequence, budget_bytes: int
) -> PlannedParts:
    """Plan an iteration in the variant in which it is expected to run fastest.

    Args:
        planning: how it is planned.
        graphs: Dynamo's, of its runs in order.
        sequence: captures them.
        budget_bytes: device bytes.

    Raises:
        BudgetError: no variant fits.
    """
    session, own = sequence.session, tuple(dict.fromkeys(graphs))
    trained = {run: own.index(one) for run, one in enumerate(graphs) if run in planning.trained}

    def price(changed: _Changed) -> Priced[PlannedParts]:
        return prices.price(*(_captured(one, changed.get(one), sequence) for one in own))

    def timed(captured: Captured) -> StepGraph:
        return sequence.costed(session.in_traced_layouts(captured))

    def pieces(steps: Sequence[InVariant]) -> tuple[Pieces, ...]:
        named = ((label(run), cut) for run, place in trained.items() for cut in steps[place].variant.pieces)
        return tuple(replace(cut, op=prefix + cut.op) for prefix, cut in named)

    def costs(steps: Sequence[InVariant]) -> tuple[Priced[PlannedParts], Sequence[StepGraph]]:
        laid_out = [session.in_traced_layouts(step.captured) for step in steps]
        with no_memory_limit(), unset_fake_temporarily():
            costed = [sequence.costed(captured) for captured in laid_out]
        exact = {label(run): laid_out[place] for run, place in trained.items()}

        def costed_runs(graphs: Mapping[str, Captured]) -> dict[int, StepGraph]:
            found = {run: graphs[label(run)] for run in trained}
            places = trained.items()
            return {n: costed[at] if found[n] is laid_out[at] else sequence.costed(found[n]) for n, at in places}

        def combined(graphs: Mapping[str, Captured]) -> StepGraph:
            ports = {run: Ports.of(graphs[label(run)]) for run in trained}
            return planning.graph(_moved(planning.parts, planning.ports, costed_runs(graphs), ports))

        def made(plan: Plan, graphs: Mapping[str, Captured] = exact) -> tuple[PlannedParts, Plan]:
            runs = costed_runs(graphs)
            variants = {n: GraphVariant(steps[at].variant, runs[n].fingerprint) for n, at in trained.items()}
            computed = tuple(map(variants.get, range(len(planning.parts))))
            return PlannedParts(plan, planning.shares(plan), computed), plan

        @unset_fake_temporarily()
        def planned(planner: Planner | None = None) -> tuple[PlannedParts, Plan]:
            return made(planning.plan(whole, planner))

        def encodable(lossy: LossyOptions) -> Encodable[PlannedParts]:
            encoded, known = EncodedSteps(exact, lossy, combined), session.status.encoded

            @cache
            @no_memory_limit()
            @unset_fake_temporarily()
            def bound(share: float) -> StepGraph:
                return bounding_step(encoded, share)

            @unset_fake_temporarily()
            def plan(budget_bytes: int, encoding: EncodeIfFaster | EncodeBelow) -> tuple[PlannedParts, Plan]:
                step = f"{whole.fingerprint}, {whole.static_bytes} bytes in addition"
                found, plan = choose_encoded(
                    encoded, budget_bytes, lambda graph: planning.plan(graph, None), known.get(step), encoding
                )
                known[step] = tuple(storage.name for storage in plan.encoded)
                return made(plan, found)

            return Encodable(bound, plan)

        whole, lossy, is_joint = combined(exact), session.options.lossy, session.options.planner == "joint"
        priced = Priced(
            whole,
            lambda budget_bytes: planned(),
            None if lossy is None else encodable(lossy),
            refuse=(lambda budget_bytes: planned(refuse_in_a_moment)) if is_joint else None,
        )
        return priced, costed

    prices = Prices(session.options.variant_means, session.in_regions, timed, costs, pieces=pieces)
    try:
        best = best_variant(IterationVariants(graphs), price, budget_bytes, session.name)
    finally:
        forget_searches()
    return replace(best.made, plan=best.plan)


def first_variant(
    one: DynamoGraph, sequence: GraphSequence, device: torch.device, in_use_bytes: int, budget_bytes: int
) -> GraphVariant:
    """The variant in which a graph fits before its iteration is known, or needs the fewest bytes.

    Args:
        one: of Dynamo.
        sequence: captures it.
        device: where it runs.
        in_use_bytes: device bytes in use when it runs; parameters and its inputs are among them.
        budget_bytes: of the iteration.
    """
    session, hardware = sequence.session, measure(device)
    inside = partial(smallest_inside, limits=replace(DEFAULT, order=False))
    planner = allowed(session.options.means, inside, state_bytes(device))

    def timed(captured: Captured) -> StepGraph:
        return sequence.costed(session.in_traced_layouts(captured))

    def costs(steps: Sequence[InVariant]) -> tuple[Priced[None], Sequence[StepGraph]]:
        with no_memory_limit(), unset_fake_temporarily():
            graph = timed(steps[0].captured)
        first = in_first_run(graph, in_use_bytes)

        @unset_fake_temporarily()
        def smallest(budget_bytes: int) -> tuple[None, Plan]:
            return None, planner(first, hardware, budget_bytes)

        return Priced(first, smallest, smallest=smallest), [graph]

    prices = Prices(session.options.variant_means, session.in_regions, timed, costs)

    def price(graph: fx.GraphModule) -> Priced[None]:
        return prices.price(InVariant(sequence.captured(one, graph)))

    return GraphVariant(smallest_variant(one.variants, price, budget_bytes), "")


def _captured(one: DynamoGraph, changed: tuple[fx.GraphModule, Variant] | None, sequence: GraphSequence) -> InVariant:
    if changed is not None:
        return InVariant(sequence.captured(one, changed[0]), changed[1])
    if one.unmodified is None:  # it has run in another variant
        one.unmodified = sequence.captured(one, one.graph)
    return InVariant(one.unmodified)


def _moved(
    parts: Sequence[Part], before: Sequence[Ports], graphs: Mapping[int, StepGraph], after: Mapping[int, Ports]
) -> tuple[Part, ...]:
    """The runs with other steps in place of those that ran, by number: each is given and returns the same tensors.

    Raises:
        Refused: one does not.
    """
    moves: list[dict[int, int]] = []
    for run, old in enumerate(before):
        new = after.get(run)
        if new is None:
            moves.append({storage.id: storage.id for storage in parts[run].graph.storages})
            continue
        kinds = [(getattr(old, kind), getattr(new, kind)) for kind in ("inputs", "results", "tangents", "gradients")]
        if any(len(one) != len(other) for one, other in kinds):
            raise Refused("it is given or returns other tensors")
        pairs = [pair for one, other in kinds for pair in zip(one, other, strict=True)]
        moves.append({one: other for one, other in reversed(pairs) if one >= 0 and other >= 0})

    def moved(run: int, part: Part) -> Part:
        own = moves[run]

        def of(storages: Iterable[int]) -> frozenset[int]:
            return frozenset(own[storage] for storage in storages if storage in own)

        same = {
            own[storage]: (other, moves[other][origin])
            for storage, (other, origin) in part.same.items()
            if storage in own and origin in moves[other]
        }
        return replace(
            part,
            graph=graphs.get(run, part.graph),
            results=of(part.results),
            same=same,
            fresh=of(part.fresh),
            handed_on=of(part.handed_on),
            held_tangents=of(part.held_tangents),
            held_results=of(part.held_results),
            gathered=of(part.gathered),
        )

    return tuple(moved(run, part) for run, part in enumerate(parts))
