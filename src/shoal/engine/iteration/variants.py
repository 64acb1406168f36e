"""The variants of an iteration: its graphs as their author wrote them, fused, on slices, in pieces; and the fastest.

A variant of the iteration is one of each graph that has it; the others stay unmodified. What eager code between the
graphs uses was measured once and does not depend on how they are computed. The search is that of a step of one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.capture.captured import Captured
from shoal.capture.layered import Refused
from shoal.capture.pieces import choose_faster, choose_pieces, in_pieces
from shoal.capture.shrunk import shrunk
from shoal.core.joined_step import Part, label
from shoal.core.means import KERNEL_MEANS
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Pieces, Variant
from shoal.cost.profile import profile_step
from shoal.engine.iteration.graphs import DynamoGraph, GraphSequence
from shoal.engine.iteration.plan import GraphVariant, PlannedParts, VariantPlanning
from shoal.engine.iteration.record import Ports
from shoal.engine.search.best_variant import best_variant
from shoal.engine.search.priced import Priced
from shoal.engine.search.split_forms import PatchWork
from shoal.engine.search.variants import forms_up_to
from shoal.memory.limit import no_memory_limit
from shoal.planners import Planner
from shoal.planners.smallest_plan import refuse_in_a_moment

_Changed = Mapping[DynamoGraph, tuple[fx.GraphModule, Variant]]  # graphs that are not as their author wrote them


class IterationVariants:
    """See `shoal.engine.search.variants.Forms`.

    Args:
        graphs: those of the iteration.
    """

    def __init__(self, graphs: Iterable[DynamoGraph]) -> None:
        self._graphs = tuple(dict.fromkeys(graphs))

    def of_norms(self) -> Iterator[Variant]:
        return iter(dict.fromkeys(variant for one in self._graphs for variant in one.variants.of_norms()))

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        return forms_up_to(fused, [elems for one in self._graphs for elems in one.variants.norm_elems])

    def split(self) -> Iterator[Variant]:
        found: dict[Variant, Variant] = {}
        for own in (own for one in self._graphs for own in one.variants.split()):
            found[_of_any_depth(own)] = max(own, found.get(_of_any_depth(own), own), key=lambda variant: variant.depth)
        return iter(found.values())

    def work(self, variant: Variant) -> PatchWork:
        found = [one.variants.work(own) for one, own in self._own(variant).items()]
        return PatchWork(max(work.more_share for work in found), sum(work.n_calls for work in found))

    def graph(self, variant: Variant) -> _Changed:
        if replace(variant, pieces=(), shrunk=False) == WHOLE:
            return {}
        found: dict[DynamoGraph, tuple[fx.GraphModule, Variant]] = {}
        reason = ""
        for one, own in self._own(variant).items():
            try:
                found[one] = one.variants.graph(own), own
            except Refused as refused:
                reason = str(refused)
        if not found:
            raise Refused(reason)
        return found

    def _own(self, variant: Variant) -> dict[DynamoGraph, Variant]:
        """The same variant of each graph that has it."""
        if not (variant.depth or variant.slabs):
            return dict.fromkeys(self._graphs, variant)
        pairs = ((one, own) for one in self._graphs for own in one.variants.split())
        found = {one: own for one, own in pairs if _of_any_depth(own) == _of_any_depth(variant)}
        if not found:
            raise Refused("no graph of it can run part by part in this way")
        return found


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
    prices = _Prices(planning, graphs, sequence)
    best = best_variant(IterationVariants(graphs), prices.of, budget_bytes, sequence.session.name)
    return replace(best.made, plan=best.plan)


@dataclass(frozen=True)
class _InVariant:
    """A graph in one variant."""

    captured: Captured
    variant: Variant


class _Prices:
    """Captures and prices variants of an iteration."""

    def __init__(self, planning: VariantPlanning, graphs: Sequence[DynamoGraph], sequence: GraphSequence) -> None:
        self._planning, self._graphs, self._sequence = planning, graphs, sequence
        self._means = sequence.session.options.form_means

    def of(self, changed: _Changed) -> Priced[PlannedParts]:
        """What a variant costs."""
        return self._launched({one: self._captured(one, changed) for one in self._graphs}, shrinks=True)

    def _captured(self, one: DynamoGraph, changed: _Changed) -> _InVariant:
        if one in changed:
            graph, variant = changed[one]
            return _InVariant(self._sequence.captured(one, graph), variant)
        assert one.unmodified is not None  # it has run
        return _InVariant(one.unmodified, WHOLE)

    def _launched(self, steps: Mapping[DynamoGraph, _InVariant], *, shrinks: bool) -> Priced[PlannedParts]:
        def smaller() -> Priced[PlannedParts] | None:
            with no_memory_limit():
                found = {one: shrunk(step.captured) for one, step in steps.items()}
            if not any(found.values()):
                return None
            changed = {
                one: step if (less := found[one]) is None else _InVariant(less, replace(step.variant, shrunk=True))
                for one, step in steps.items()
            }
            return self._launched(changed, shrinks=False)

        in_regions = self._sequence.session.in_regions
        priced = self._priced({one: replace(step, captured=in_regions(step.captured)) for one, step in steps.items()})
        return replace(priced, shrunk=smaller) if shrinks else priced

    def _priced(self, steps: Mapping[DynamoGraph, _InVariant]) -> Priced[PlannedParts]:
        planning, graphs, session = self._planning, self._graphs, self._sequence.session
        laid_out = {one: session.in_traced_layouts(step.captured) for one, step in steps.items()}
        with no_memory_limit(), unset_fake_temporarily():
            costed = {one: self._sequence.costed(captured) for one, captured in laid_out.items()}
        trained = {run: one for run, one in enumerate(graphs) if run in planning.trained}
        ports = {run: Ports.of(laid_out[one]) for run, one in trained.items()}
        parts = _moved(planning.parts, planning.ports, {run: costed[one] for run, one in trained.items()}, ports)
        variants = tuple(
            GraphVariant(steps[one].variant, costed[one].fingerprint) if run in trained else None
            for run, one in enumerate(graphs)
        )

        def made(planner: Planner | None = None) -> tuple[PlannedParts, Plan]:
            with unset_fake_temporarily():
                planned = replace(planning.plan(parts, planner), variants=variants)
            return planned, planned.plan

        def changed(
            choose: Callable[..., tuple[Pieces, ...]],
        ) -> tuple[tuple[Pieces, ...], Priced[PlannedParts]] | None:
            if not KERNEL_MEANS & self._means:
                return None
            found: dict[DynamoGraph, _InVariant] = {}
            with no_memory_limit(), unset_fake_temporarily():
                for one, step in steps.items():
                    pieces = choose(
                        step.captured, costed[one], self._means, lambda other: profile_step(other, other.device)
                    )
                    found[one] = _InVariant(in_pieces(step.captured, pieces), replace(step.variant, pieces=pieces))
            named = [(label(run) + cut.op, cut) for run, one in trained.items() for cut in found[one].variant.pieces]
            return (tuple(replace(cut, op=op) for op, cut in named), self._priced(found)) if named else None

        is_joint = session.options.planner == "joint"
        return Priced(
            planning.graph(parts),
            lambda budget_bytes: made(),
            cut=lambda: changed(choose_pieces),
            faster=lambda: changed(choose_faster),
            refuse=(lambda budget_bytes: made(refuse_in_a_moment)) if is_joint else None,
        )


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
