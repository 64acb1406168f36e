"""The law of budgets, on random steps with variants of every kind: more bytes and more means are never slower.

A variant that may gain less than half a percent is not planned, so that much is let pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.capture.layered import Refused
from shoal.core.plan import Plan
from shoal.core.simulate import simulate
from shoal.core.step import Op, StepGraph, Storage
from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.best_variant import best_variant
from shoal.engine.search.encoding import EncodeBelow, EncodeIfFaster, NotFaster
from shoal.engine.search.priced import Encodable, Priced
from shoal.engine.search.search_state import GOOD_ENOUGH, WORTH_A_PLAN
from shoal.engine.search.split_variants import PatchWork
from shoal.errors import BudgetError
from shoal.planners.infeasible import fewest_bytes
from shoal.planners.joint import joint
from tests.random_steps import HARDWARE, Builder, conv_bn_relu_chain, steps

FUSED = Variant(fuse="bnff")
FEW, MANY = Variant(depth=0.5, slices=3), Variant(depth=0.5, slices=6)
PATCHES, APART = Variant(depth=0.5, grid=(2, 2)), Variant(depth=0.5, grid=(2, 2), exact=False)
SHARES = (0.3, 0.45, 0.6, 0.75, 0.9, 1.0)


def in_parts(step: StepGraph, n: int, slower: float) -> StepGraph:
    """The step where what nothing saves is there one part at a time, and each op takes so much longer."""
    kept = {*step.saved, *step.never_freed}

    def thin(storage: Storage) -> Storage:
        return storage if storage.id in kept else replace(storage, nbytes=-(-storage.nbytes // n))

    def slow(op: Op) -> Op:
        return replace(op, seconds=slower * op.seconds, workspace_bytes=op.workspace_bytes // n, overwrites=-1)

    return replace(step, ops=tuple(map(slow, step.ops)), storages=tuple(map(thin, step.storages)))


def encoded(step: StepGraph, codec_seconds: float) -> StepGraph:
    """The step where what is saved takes a quarter, and what writes it takes longer."""
    saved = {s for s in step.saved if step.storages[s].kind == "activation"}

    def small(storage: Storage) -> Storage:
        return replace(storage, nbytes=-(-storage.nbytes // 4)) if storage.id in saved else storage

    def slow(op: Op) -> Op:
        more = codec_seconds if saved & set(op.writes) else 0.0
        return replace(op, seconds=op.seconds + more, overwrites=-1)

    return replace(step, ops=tuple(map(slow, step.ops)), storages=tuple(map(small, step.storages)))


@dataclass
class AnyVariants:
    """Stands for `Variants`: a variant's graph is its name."""

    steps: dict[Variant, StepGraph]
    codec_seconds: float | None = None

    def of_norms(self) -> Iterator[Variant]:
        return (variant for variant in self.steps if variant.fuse)

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        return iter(())

    def split(self) -> Iterator[Variant]:
        return (variant for variant in self.steps if variant.depth)

    def of_fewer_layers(self, sliced: Variant) -> Iterator[Variant]:
        return iter(())

    def work(self, variant: Variant) -> PatchWork:
        more = self.steps[variant.parts].plain_seconds / self.steps[WHOLE].plain_seconds - 1 if variant.grid else 0.0
        return PatchWork(more if variant.exact else 0.0, 1)

    def graph(self, variant: Variant) -> Any:
        if variant not in self.steps:
            raise Refused("fused and in parts at once")
        return variant

    def price(self, variant: Any) -> Priced[None]:
        step = self.steps[variant]

        def plan(graph: StepGraph) -> Callable[[int], tuple[None, Plan]]:
            return lambda budget_bytes: (None, joint(graph, HARDWARE, budget_bytes))

        if self.codec_seconds is None:
            return Priced(step, plan(step))
        coded = encoded(step, self.codec_seconds)

        def plan_encoded(budget_bytes: int, encoding: EncodeIfFaster | EncodeBelow) -> tuple[None, Plan]:
            below_seconds = encoding.seconds if isinstance(encoding, EncodeBelow) else math.inf
            try:
                found = joint(coded, HARDWARE, budget_bytes)
            except BudgetError:
                if math.isfinite(below_seconds):
                    raise NotFaster from None
                raise
            if found.predicted_seconds >= below_seconds:
                raise NotFaster
            return None, found

        return Priced(step, plan(step), Encodable(lambda share: encoded(step, 0.0), plan_encoded))

    def seconds(self, budget_bytes: int) -> float:
        try:
            return best_variant(self, self.price, budget_bytes, "").plan.predicted_seconds  # type: ignore[arg-type]
        except BudgetError:
            return math.inf


def network(*widths: int) -> StepGraph:
    """Convolution, batch norm and ReLU at these widths."""
    b = Builder(gradients_apart=True)
    x = b.input(100)
    for place, width in enumerate(widths):
        x = b.conv_bn_relu(x, width, seconds=(8.0, 12.0, 4.0)[place % 3])
    return b.step(b.conv(x, 1, seconds=0.01))


@pytest.mark.parametrize("slower", [1.0, 1.02])
@pytest.mark.parametrize("widths", [(16, 8, 2, 2), (8, 16, 4, 4, 2), (2, 2, 8, 4)], ids=str)
def test_slices_that_are_the_fastest_in_few_bytes_are_looked_at_in_more(widths: tuple[int, ...], slower: float) -> None:
    whole = network(*(100 * width for width in widths))
    parts = in_parts(whole, 3, slower)
    candidates, plain, least_bytes = AnyVariants({WHOLE: whole, FEW: parts}), simulate(whole, {}), fewest_bytes(parts)
    enough = (1 + GOOD_ENOUGH) * plain.seconds
    found = [candidates.seconds(int(least_bytes + n / 14 * (plain.peak_bytes - least_bytes))) for n in range(15)]
    for seconds, least in zip(found[1:], accumulate(found, min), strict=False):
        assert seconds * (1 - WORTH_A_PLAN) <= max(least, enough)
    assert found[-1] == plain.seconds < found[0]


class Doubted(Priced[None]):
    """A variant of which the bound says, wrongly, that it does not fit."""

    def least_seconds(self, budget_bytes: int) -> float:
        return math.inf


def test_a_variant_that_fits_after_all_is_planned_beside_a_slower_one_that_fits_by_its_bound() -> None:
    whole = conv_bn_relu_chain(4)
    budget_bytes = int(0.9 * simulate(whole, {}).peak_bytes)
    candidates = AnyVariants({WHOLE: whole, FUSED: in_parts(whole, 4, 3.0)})

    def price(variant: Any) -> Priced[None]:
        priced = candidates.price(variant)
        return Doubted(priced.graph, priced.plan) if variant == WHOLE else priced

    found = best_variant(candidates, price, budget_bytes, "").plan  # type: ignore[arg-type]
    assert found.variant == WHOLE and found.predicted_seconds == joint(whole, HARDWARE, budget_bytes).predicted_seconds
    assert {one.variant: one.outcome for one in found.candidates} == {WHOLE: "chosen", FUSED: "slower"}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(steps(), steps(), st.floats(1.0, 1.2), st.floats(0.0, 0.5))
def test_more_bytes_and_more_means_are_never_slower(
    whole: StepGraph, fused: StepGraph, slower: float, codec_seconds: float
) -> None:
    exact = {
        WHOLE: whole,
        FUSED: fused,
        FEW: in_parts(whole, 3, slower),
        MANY: in_parts(whole, 6, 1 + 2 * (slower - 1)),
        PATCHES: in_parts(whole, 2, 1.1 * slower),
    }
    means = {
        "recompute": AnyVariants({WHOLE: whole}),
        "exact": AnyVariants(exact),
        "lossy": AnyVariants(exact | {APART: in_parts(whole, 4, slower)}, codec_seconds),
    }
    plain = simulate(whole, {})
    before = dict.fromkeys(means, math.inf)
    least_bytes = fewest_bytes(whole)
    for share in SHARES:
        budget_bytes = int(least_bytes + share * (plain.peak_bytes - least_bytes))
        now = {name: candidates.seconds(budget_bytes) for name, candidates in means.items()}
        for narrow, wide in pairwise(now):
            assert now[wide] * (1 - WORTH_A_PLAN) <= now[narrow], (narrow, wide, share)
        for name, seconds in now.items():
            enough = (1 + GOOD_ENOUGH) * plain.seconds
            assert seconds * (1 - WORTH_A_PLAN) <= max(before[name], enough), (name, share)
            before[name] = min(before[name], seconds)
