"""A variant of the step, captured and priced, and whether it is small enough to be.

`Prices` makes what a captured step costs of how it is timed and planned: as it is launched, shrunk, with ops in pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.capture.captured import Captured
from shoal.capture.layered import Refused
from shoal.capture.pieces import choose_elsewhere, choose_faster, choose_pieces, in_pieces
from shoal.capture.step_writer import shrunk
from shoal.core.means import KERNEL_MEANS
from shoal.core.plan import Plan
from shoal.core.progress import doing
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Pieces, Variant
from shoal.engine.search.encoding import EncodeBelow, EncodeIfFaster
from shoal.engine.search.scaled_step import NotLinear
from shoal.engine.search.split_variants import PatchWork
from shoal.engine.search.variants import AnyVariants, Graph
from shoal.memory.limit import no_memory_limit
from shoal.planners.estimates import least_seconds

log = logging.getLogger("shoal")

Made = TypeVar("Made")
Cost = TypeVar("Cost")
_MAX_OPS = 12  # of all variants together, as a multiple of the whole step's
_MIN_OPS = 6_000  # the same for small steps, in ops
_OPS_A_CALL = 5  # of a layer on a patch: it is cut out, and both passes compute it


@dataclass(frozen=True)
class Encodable(Generic[Made]):
    """What a variant costs with storages encoded.

    Attributes:
        graph: makes the step with a share of what may be encoded, by codecs that take no time, and no bytes in addition
            exact values.
        plan: plans the variant inside a budget, or raises BudgetError; NotFaster where no plan is what is asked for.
    """

    graph: Callable[[float], StepGraph]
    plan: Callable[[int, EncodeIfFaster | EncodeBelow], tuple[Made, Plan]]


@dataclass(frozen=True)
class Priced(Generic[Made]):
    """A variant of the step with what it costs.

    Attributes:
        graph: with seconds, workspaces and all that the training loop holds.
        plan: plans it inside a budget, or raises BudgetError; what the caller wants of it, and the plan.
        encoded: the same with storages encoded; None where nothing may be.
        shrunk: the same variant with what waits within the backward pass shrunk; None where nothing can be.
        cut: the same variant with convolutions in pieces, and which those are; None where there are none.
        faster: likewise only with those that direct kernels compute, which may be faster.
        refuse: raises the BudgetError of a budget that is hopeless (see `planners.infeasible`), in a moment; None
            where the planner may not find the plan that this tells of.
        smallest: as `plan`, for a search that asks only whether the variant fits: any plan, however slow. None where
            the planner is another one than `joint`.
    """

    graph: StepGraph
    plan: Callable[[int], tuple[Made, Plan]]
    encoded: Encodable[Made] | None = None
    shrunk: Callable[[], Priced[Made] | None] = lambda: None
    cut: Callable[[], tuple[tuple[Pieces, ...], Priced[Made]] | None] = lambda: None
    faster: Callable[[], tuple[tuple[Pieces, ...], Priced[Made]] | None] = lambda: None
    refuse: Callable[[int], object] | None = None
    smallest: Callable[[int], tuple[Made, Plan]] | None = None

    def least_seconds(self, budget_bytes: int) -> float:
        """The lower bound of the step inside the budget, nothing encoded: see `planners.estimates.least_seconds`."""
        return least_seconds(self.graph, budget_bytes)


@dataclass(frozen=True)
class PricedVariant(Generic[Graph, Made]):
    """A variant of the step that was captured and priced."""

    variant: Variant
    graph: Graph
    priced: Priced[Made]


@dataclass(frozen=True)
class InVariant:
    """A graph of a step, captured in a variant."""

    captured: Captured
    variant: Variant = WHOLE


@dataclass(frozen=True)
class Prices(Generic[Made]):
    """What a step costs whose graphs were captured: one or several.

    Attributes:
        means: techniques that change its ops, of `shoal.core.means`.
        launched: a graph → with the ops that are launched where it runs, such as compiled regions.
        timed: a graph → with seconds and workspaces.
        costs: what the step costs with these graphs, as they are; and each of them `timed`.
        runs_here: whether it is planned for this machine.
        pieces: the ops of these graphs that are in pieces, by their names in the step.
    """

    means: frozenset[str]
    launched: Callable[[Captured], Captured]
    timed: Callable[[Captured], StepGraph]
    costs: Callable[[Sequence[InVariant]], tuple[Priced[Made], Sequence[StepGraph]]]
    runs_here: bool = True
    pieces: Callable[[Sequence[InVariant]], tuple[Pieces, ...]] = lambda steps: steps[0].variant.pieces

    def price(self, *steps: InVariant) -> Priced[Made]:
        """What the step costs with these graphs, as they are launched; then shrunk, and in pieces."""

        def smaller() -> Priced[Made] | None:
            with no_memory_limit():
                found = [shrunk(step.captured) for step in steps]
            pairs = zip(steps, found, strict=True)
            less = [InVariant(new, replace(old.variant, shrunk=True)) if new else old for old, new in pairs]
            return self._launched(less) if any(found) else None

        return replace(self._launched(steps), shrunk=cache(smaller))

    def _launched(self, steps: Sequence[InVariant]) -> Priced[Made]:
        return self._as_they_are([replace(step, captured=self.launched(step.captured)) for step in steps])

    def _as_they_are(self, steps: Sequence[InVariant]) -> Priced[Made]:
        priced, timed = self.costs(steps)

        @no_memory_limit()
        @unset_fake_temporarily()
        def changed(choose: Callable[..., tuple[Pieces, ...]]) -> tuple[tuple[Pieces, ...], Priced[Made]] | None:
            if not KERNEL_MEANS & self.means:
                return None
            found = []
            for step, graph in zip(steps, timed, strict=True):
                pieces = choose(step.captured, graph, self.means, self.timed)
                found.append(InVariant(in_pieces(step.captured, pieces), replace(step.variant, pieces=pieces)))
            named = self.pieces(found)
            return (named, self._as_they_are(found)) if named else None

        return replace(
            priced,
            cut=cache(lambda: changed(choose_pieces if self.runs_here else choose_elsewhere)),
            faster=cache(lambda: changed(choose_faster) if self.runs_here else None),
        )


def why_too_many(work: PatchWork, whole_ops: int, captured_ops: int) -> str:
    """Why a variant on patches is not captured; "" where it may be.

    Args:
        work: what its patches take.
        whole_ops: of the step as it is.
        captured_ops: of all variants so far.
    """
    n_ops = expected_ops(work, whole_ops)
    is_too_many = captured_ops + n_ops > max(_MAX_OPS * whole_ops, _MIN_OPS)
    return f"about {n_ops} ops, too many to plan" if is_too_many else ""


def expected_ops(work: PatchWork, whole_ops: int) -> int:
    """How many ops a variant on patches has, about, before it is captured.

    Args:
        work: what its patches take.
        whole_ops: of the step as it is.
    """
    return whole_ops + _OPS_A_CALL * work.n_calls


def captured_variant(
    variants: AnyVariants[Graph], price: Callable[[Graph], Cost], variant: Variant
) -> tuple[Graph, Cost]:
    """The graph of a variant, and what it costs.

    Raises:
        Refused: the step does not have that variant, or cannot be traced in it: then it is computed in another one.
    """
    doing("capture", str(variant))
    try:
        graph = variants.graph(variant)
        return graph, price(graph)
    except (Refused, NotLinear, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # of whatever PyTorch or a kernel says of a graph that the model's author did not write
        if variant == WHOLE:
            raise
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        log.info("the step cannot be captured with %s: %s", variant, reason)
        raise Refused(f"cannot be captured ({reason})") from error
