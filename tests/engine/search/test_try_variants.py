"""Which of the variants that were captured are planned, on variants whose seconds are made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Pieces, Variant
from shoal.engine.search.best_variant import best_variant
from shoal.engine.search.priced import Priced, PricedVariant
from shoal.engine.search.search_state import SearchState
from shoal.engine.search.split_variants import PatchWork
from shoal.engine.search.try_variants import plan_variants
from shoal.errors import BudgetError
from shoal.planners.estimates import quick_least
from shoal.planners.keep_all import keep_all
from tests.engine.search.made_up_variants import CROWDED_BYTES, FUSED, InSeconds, OnPatches, crowded, kept_alone, taking
from tests.random_steps import HARDWARE, conv_bn_relu_chain


def test_a_variant_that_can_gain_next_to_nothing_is_not_planned() -> None:
    candidates = InSeconds(whole=(100.0, 101.0), bnff=(100.1, 100.1), icf=(100.8, 100.8))
    found = best_variant(candidates, candidates.price, 2**40, "")
    assert candidates.asked == [WHOLE, Variant(fuse="bnff")] and found.variant == Variant(fuse="bnff")
    candidates = InSeconds(whole=(100.0, 101.0), bnff=(100.8, 100.8), icf=(101.2, 101.2))
    outcomes = [one.outcome for one in best_variant(candidates, candidates.price, 2**40, "").plan.candidates]
    assert candidates.asked == [WHOLE]
    assert outcomes == ["chosen", "cannot be much faster, by its bound", "cannot be faster, by its bound"]


@pytest.mark.parametrize("room, asked", [(1.0, [WHOLE, FUSED]), (0.96, [WHOLE, FUSED]), (0.9, [FUSED])])
def test_a_variant_that_seems_to_need_more_than_the_budget_waits_for_the_others(
    room: float, asked: list[Variant]
) -> None:
    """However fast it would be: by what was found in a moment, which may be a little above what it needs."""
    candidates = InSeconds(whole=(100.0, 101.0), bnff=(102.0, 102.0))
    large, small = conv_bn_relu_chain(12, nbytes=10_000), conv_bn_relu_chain(12)
    budget_bytes = int(room * quick_least(large, 2**40).found_bytes)

    def planned(*steps: StepGraph) -> SearchState[Variant, None]:
        state: SearchState[Variant, None] = SearchState(budget_bytes)
        ways = [
            PricedVariant(variant, variant, replace(candidates.price(variant), graph=step))
            for variant, step in zip((WHOLE, FUSED), steps, strict=False)
        ]
        plan_variants(state, [(seconds, candidate) for seconds, candidate in zip((1.0, 2.0), ways, strict=False)])
        return state

    state = planned(large, small)
    assert candidates.asked == asked
    if WHOLE not in asked:
        assert "as far as was found in a moment" in {row.outcome for row in state.rows if row.variant == WHOLE}.pop()
        assert [candidate.variant for candidate in state.unfit] == [WHOLE]
    candidates.asked.clear()
    planned(large)
    assert candidates.asked == [WHOLE]  # there is no other


class UpTo(InSeconds):
    """Fused, what is normalised fits only up to some share of the largest map."""

    def __init__(self, fits_up_to: float, fused_seconds: float = 80.0, whole_seconds: float = 110.0) -> None:
        super().__init__(whole=(100.0, whole_seconds), bnff=(fused_seconds, fused_seconds))
        self.fits_up_to = fits_up_to
        self.seconds |= {Variant(fuse="bnff", up_to=share): (90.0, 92.0) for share in (0.9, 0.5, 0.25)}

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        return (variant for variant in self.seconds if variant.up_to < 1)

    def price(self, variant: Variant) -> Priced[None]:
        def refuse(budget_bytes: int) -> tuple[None, Plan]:
            self.asked.append(variant)
            raise BudgetError("no plan fits", least_feasible_bytes=budget_bytes + 1)

        priced = super().price(variant)
        return replace(priced, plan=refuse) if variant.fuse and variant.up_to > self.fits_up_to else priced


@pytest.mark.parametrize("fits_up_to, asked", [(1.0, [1.0]), (0.9, [1.0, 0.9]), (0.3, [1.0, 0.9, 0.5, 0.25])])
def test_batch_norms_of_the_largest_maps_are_left_until_the_others_fit_fused(
    fits_up_to: float, asked: list[float]
) -> None:
    candidates = UpTo(fits_up_to)
    best = best_variant(candidates, candidates.price, 2**40, "")
    assert best.variant == Variant(fuse="bnff", up_to=asked[-1])
    assert [variant.up_to for variant in candidates.asked if variant.fuse] == asked


@pytest.mark.parametrize("op_seconds, asked", [(1.0, [0.9]), (5.0, [WHOLE.up_to])], ids=["faster", "slower"])
def test_fewer_fused_are_planned_before_the_whole_where_all_fused_would_be_faster_than_it_can_be(
    op_seconds: float, asked: list[float]
) -> None:
    candidates = UpTo(1.0)

    def price(variant: Variant) -> Priced[None]:
        priced = candidates.price(variant)
        too_large = kept_alone(2000)
        slow = replace(too_large, ops=tuple(replace(op, seconds=op_seconds) for op in too_large.ops))
        return replace(priced, graph=slow) if variant == FUSED else priced

    found = best_variant(candidates, price, keep_all(kept_alone(1900), HARDWARE, 0).predicted_peak_bytes, "")
    assert [variant.up_to for variant in candidates.asked] == asked and found.variant == candidates.asked[0]
    if found.variant != WHOLE:
        assert "cannot be faster, by its bound" in {
            row.outcome for row in found.plan.candidates if row.variant == WHOLE
        }


@pytest.mark.parametrize("nbytes, said", [(2000, "as with fewer fused it does not"), (1000, "changes nothing")])
def test_where_even_the_fewest_fused_do_not_fit_or_are_what_all_are_the_others_are_not_captured(
    nbytes: int, said: str
) -> None:
    candidates = UpTo(0.0)
    captured: list[float] = []

    def price(variant: Variant) -> Priced[None]:
        captured.append(variant.up_to if variant.fuse else 0.0)
        priced = candidates.price(variant)
        step = kept_alone(nbytes if variant.up_to < 1 else 1000)
        step = replace(step, ops=tuple(replace(op, seconds=1.0) for op in step.ops))
        return replace(priced, graph=step) if variant.fuse else priced

    found = best_variant(candidates, price, keep_all(kept_alone(900), HARDWARE, 0).predicted_peak_bytes, "")
    assert captured == [0.0, 1.0, 0.25] and found.variant == WHOLE
    outcomes = {row.variant.up_to: row.outcome for row in found.plan.candidates if row.variant.fuse}
    assert outcomes.keys() == {1.0, 0.9, 0.5, 0.25} and said in outcomes[0.9] and said in outcomes[0.5]


def test_they_are_left_also_where_the_step_as_it_is_adds_nothing_but_fused_would_be_faster() -> None:
    candidates = UpTo(0.9, whole_seconds=100.0)
    assert best_variant(candidates, candidates.price, 2**40, "").variant == Variant(fuse="bnff", up_to=0.9)
    candidates = UpTo(0.9, fused_seconds=99.8, whole_seconds=100.0)
    assert best_variant(candidates, candidates.price, 2**40, "").variant == WHOLE
    assert not any(0 < variant.up_to < 1 for variant in candidates.asked)


@pytest.mark.parametrize("kept_seconds, asked", [(99.0, ["whole", "pieces"]), (99.8, ["whole"])])
def test_a_variant_that_fits_is_planned_in_pieces_only_if_that_lowers_its_bound(
    kept_seconds: float, asked: list[str]
) -> None:
    candidates = InSeconds(whole=(100.0, 110.0))
    were_asked: list[str] = []

    def made(name: str, seconds: float) -> tuple[None, Plan]:
        were_asked.append(name)
        return None, Plan(taking(seconds, 0), {}, "keep_all")

    def price(variant: Variant) -> Priced[None]:
        cut = Priced(crowded(taking(kept_seconds, 1)), lambda budget_bytes: made("pieces", 105.0))
        return Priced(
            crowded(taking(100.0, 0)),
            lambda budget_bytes: made("whole", 110.0),
            cut=lambda: ((Pieces("conv", 0, 2),), cut),
        )

    found = best_variant(candidates, price, CROWDED_BYTES - 1, "")
    assert were_asked == asked and bool(found.variant.pieces) == (len(asked) == 2)
    outcome = found.plan.candidates[-1].outcome
    assert outcome == ("chosen" if found.variant.pieces else "fits without pieces, and gains nothing by its bound")


@pytest.mark.parametrize("direct_seconds, plan_seconds", [(90.0, 100.0), (99.8, 100.0), (90.0, 110.0)])
def test_where_nothing_is_slowed_direct_kernels_are_looked_at_for_being_faster(
    direct_seconds: float, plan_seconds: float
) -> None:
    """More room never gives a slower plan: where the step is slowed down they are looked at for their scratch."""
    candidates = InSeconds(whole=(100.0, plan_seconds))
    direct = Pieces("conv", direct=True)

    def planned(budget_bytes: int) -> tuple[None, Plan]:
        return None, Plan(taking(direct_seconds, 1), {}, "keep_all")

    def price(variant: Variant) -> Priced[None]:
        changed = (direct,), Priced(taking(direct_seconds, 1), planned)
        return replace(candidates.price(variant), faster=lambda: changed)

    found = best_variant(candidates, price, 2**40, "").variant
    assert found.pieces == ((direct,) if direct_seconds < 99 and plan_seconds == 100.0 else ())


def test_fewer_slices_are_planned_before_more_are_captured() -> None:
    kept_seconds = {WHOLE: 100.0, Variant(depth=0.5, slices=4): 97.0, Variant(depth=0.5, slices=10): 96.0}
    candidates = OnPatches(1)
    candidates.held_bytes = dict.fromkeys(kept_seconds, 0)
    were_asked: list[str] = []

    def price(variant: Variant) -> Priced[None]:
        were_asked.append(f"capture {variant.slices}")

        def plan(budget_bytes: int) -> tuple[None, Plan]:
            were_asked.append(f"plan {variant.slices}")
            slowed_seconds = {0: 150.0, 4: 140.0, 10: 120.0}[variant.slices]
            return None, Plan(taking(slowed_seconds, 0), {}, "keep_all")

        return Priced(crowded(taking(kept_seconds[variant], variant.slices)), plan)

    found = best_variant(candidates, price, CROWDED_BYTES - 1, "")
    assert found.variant.slices == 10
    assert were_asked.index("plan 4") < were_asked.index("capture 10") < were_asked.index("plan 10")


@pytest.mark.parametrize(
    "few_seconds, short_of_room, captured",
    [(104.0, False, [0, 4]), (104.0, True, [0, 4, 10]), (96.0, False, [0, 4, 10])],
)
def test_more_slices_are_captured_only_where_fewer_are_short_of_room_or_cost_nothing(
    few_seconds: float, short_of_room: bool, captured: list[int]
) -> None:
    few, many = Variant(depth=0.5, slices=4), Variant(depth=0.5, slices=10)
    candidates = OnPatches(1)
    candidates.held_bytes = dict.fromkeys([WHOLE, few, many], 0)
    were_captured: list[int] = []

    class Bounded(Priced[None]):
        def least_seconds(self, budget_bytes: int) -> float:
            return self.graph.plain_seconds * (1.1 if short_of_room else 1.0)

    def price(variant: Variant) -> Priced[None]:
        were_captured.append(variant.slices)
        kept_seconds = {0: 100.0, 4: few_seconds, 10: 105.0}[variant.slices]
        made = None, Plan(taking(150.0 - variant.slices, 0), {}, "keep_all")
        return Bounded(taking(kept_seconds, variant.slices), lambda budget_bytes: made)

    found = best_variant(candidates, price, 2**40, "")
    assert were_captured == captured
    outcomes = {row.variant.slices: row.outcome for row in found.plan.candidates}
    assert ("not short of room" in outcomes[10]) == (10 not in captured)


@pytest.mark.parametrize("in_parts", [Variant(depth=0.5, slices=4), Variant(depth=0.5, grid=(2, 2))])
@pytest.mark.parametrize("kept_seconds", [110.0, 118.0])
def test_parts_that_must_be_planned_twice_as_near_to_their_bound_as_the_whole_are_not_planned(
    kept_seconds: float, in_parts: Variant
) -> None:
    candidates = OnPatches(1)
    candidates.held_bytes = dict.fromkeys([WHOLE, in_parts], 0)
    were_asked: list[Variant] = []

    def price(variant: Variant) -> Priced[None]:
        def plan(budget_bytes: int) -> tuple[None, Plan]:
            were_asked.append(variant)
            return None, Plan(taking(140.0 if variant == WHOLE else 130.0, 0), {}, "keep_all")

        is_whole = variant == WHOLE
        return Priced(crowded(taking(100.0 if is_whole else kept_seconds, 0 if is_whole else 4)), plan)

    found = best_variant(candidates, price, CROWDED_BYTES - 1, "")
    expected = [WHOLE, in_parts] if kept_seconds == 110.0 else [WHOLE]
    assert were_asked == expected and found.variant == expected[-1]
    outcome = next(one for one in found.plan.candidates if one.variant == in_parts).outcome
    assert outcome == (
        "chosen" if len(expected) == 2 else "faster only if planned twice as near to its bound as the unmodified step"
    )


@pytest.mark.parametrize("gain_seconds, captured", [(2.0, [1, 2, 3, 4]), (0.0, [1, 2])])
def test_finer_patches_are_captured_only_where_patches_gain(gain_seconds: float, captured: list[int]) -> None:
    candidates = OnPatches(0, 0, 0, 0)
    were_captured: list[int] = []

    def price(variant: Variant) -> Priced[None]:
        patches = variant.grid[0] if variant.grid else 1
        were_captured.append(patches)
        made = None, Plan(taking(120.0, 0), {}, "keep_all")
        return Priced(crowded(taking(100.0 - gain_seconds * (patches - 1), patches)), lambda budget_bytes: made)

    found = best_variant(candidates, price, CROWDED_BYTES - 1, "")
    assert were_captured == captured
    outcomes = {row.variant.grid: row.outcome for row in found.plan.candidates}
    for patches in (3, 4):
        assert (outcomes[patches, patches] == "other parts gain nothing, by their bound") == (patches not in captured)


def test_a_variant_that_fits_with_everything_kept_is_planned_however_far_the_whole_is_from_its_bound() -> None:
    """Its bound is a plan; in fewer bytes, where the whole was nearer to its bound, it was the fastest."""
    on_slices = Variant(depth=0.5, slices=4)
    candidates = OnPatches(1)
    candidates.held_bytes = dict.fromkeys([WHOLE, on_slices], 0)

    def price(variant: Variant) -> Priced[None]:
        kept_seconds, plan_seconds = (118.0, 118.0) if variant.slices else (100.0, 140.0)
        step = taking(kept_seconds, variant.slices)
        step = step if variant.slices else crowded(step)
        return Priced(step, lambda budget_bytes: (None, Plan(taking(plan_seconds, 0), {}, "keep_all")))

    assert best_variant(candidates, price, CROWDED_BYTES - 1, "").variant == on_slices


class Bounding(OnPatches):
    """Variants that all take `kept_seconds` with everything kept.

    Args:
        kept_seconds: of each.
        bound_and_plan_seconds: of `whole` and `slices`, and of `whole_shrunk` or `slices_pieces` where there is one.
    """

    def __init__(self, kept_seconds: float, **bound_and_plan_seconds: tuple[float, float]) -> None:
        super().__init__(1)
        self.kept_seconds = kept_seconds
        self.seconds = bound_and_plan_seconds
        self.held_bytes = {ON_SLICES[name]: 0 for name in ("whole", "slices") if name in bound_and_plan_seconds}
        self.planned: list[str] = []
        self.shrinks: list[Variant] = []

    def price(self, variant: Variant) -> Priced[None]:
        name = next(name for name, other in ON_SLICES.items() if other == variant)

        def shrunk() -> Priced[None] | None:
            self.shrinks.append(variant)
            return self.named(f"{name}_shrunk")

        return replace(self.named(name), shrunk=shrunk)  # type: ignore[type-var]

    def named(self, name: str) -> Priced[None] | None:
        if name not in self.seconds:
            return None
        bound_seconds, plan_seconds = self.seconds[name]

        class Bounded(Priced[None]):
            def least_seconds(self, budget_bytes: int) -> float:
                return bound_seconds

        def plan(budget_bytes: int) -> tuple[None, Plan]:
            self.planned.append(name)
            return None, Plan(taking(plan_seconds, 0), {}, "keep_all")

        place = list(self.seconds).index(name)
        cut = self.named(f"{name}_pieces")
        step = crowded(taking(self.kept_seconds + place / 100, place))
        return Bounded(step, plan, cut=lambda: ((Pieces("conv", 0, 2),), cut) if cut is not None else None)

    def chosen(self) -> Variant:
        return best_variant(self, self.price, CROWDED_BYTES - 1, "").variant


class InParts(OnPatches):
    """Variants by their bounds and the seconds of their plans; the step as it is takes 100 with everything kept."""

    def __init__(self, n_calls: int, bound_and_plan_seconds: dict[Variant, tuple[float, float]]) -> None:
        super().__init__(1)
        self.n_calls, self.seconds = n_calls, bound_and_plan_seconds
        self.held_bytes = dict.fromkeys(bound_and_plan_seconds, 0)

    def work(self, variant: Variant) -> PatchWork:
        return PatchWork(0.0, self.n_calls)

    def price(self, variant: Variant) -> Priced[None]:
        bound_seconds, plan_seconds = self.seconds[variant]
        place = len(self.captured)
        self.captured.append(variant)

        class Bounded(Priced[None]):
            def least_seconds(self, budget_bytes: int) -> float:
                return bound_seconds

        return Bounded(crowded(taking(100.0, place)), lambda _: (None, Plan(taking(plan_seconds, 0), {}, "keep_all")))

    def chosen(self) -> Variant:
        return best_variant(self, self.price, CROWDED_BYTES - 1, "").variant


FEW, MANY, PATCHES = Variant(depth=0.5, slices=4), Variant(depth=0.5, slices=10), Variant(depth=0.5, grid=(2, 2))


def test_more_slices_wait_for_a_plan_where_fewer_are_not_the_fastest_by_their_bound() -> None:
    near = InParts(1, {WHOLE: (110.0, 110.2), FEW: (112.0, 113.0), MANY: (113.0, 113.0), PATCHES: (109.0, 109.0)})
    assert near.chosen() == WHOLE and near.captured == [WHOLE, FEW]
    far = InParts(1, {WHOLE: (110.0, 140.0), FEW: (112.0, 139.0), MANY: (113.0, 118.0)})
    assert far.chosen() == MANY and far.captured == [WHOLE, FEW, MANY]


@pytest.mark.parametrize("bound_seconds, captured", [(105.0, [WHOLE]), (110.0, [WHOLE, FEW])])
def test_slices_of_many_ops_are_captured_only_where_there_is_as_much_more_to_gain(
    bound_seconds: float, captured: list[Variant]
) -> None:
    large = InParts(800, {WHOLE: (bound_seconds, bound_seconds + 0.5), FEW: (101.0, 101.0)})
    assert large.chosen() == captured[-1] and large.captured == captured


ON_SLICES = {"whole": WHOLE, "slices": Variant(depth=0.5, slices=4)}


def test_where_no_variant_can_be_fast_by_its_bound_slices_are_bounded_before_any_is_planned() -> None:
    slow = Bounding(100.0, whole=(110.0, 130.0), slices=(105.0, 107.0))
    assert slow.chosen().slices == 4 and slow.planned == ["slices"]
    slices_are_slow = Bounding(100.0, whole=(110.0, 150.0), slices=(112.0, 128.0))
    assert slices_are_slow.chosen().slices == 4 and slices_are_slow.planned == ["whole", "slices"]
    fast = Bounding(100.0, whole=(101.0, 101.5), slices=(100.0, 100.0))
    assert fast.chosen() == WHOLE and fast.planned == ["whole"] and fast.captured == []


def test_what_is_shrunk_or_in_pieces_is_planned_behind_what_is_not_where_its_bound_is_hardly_lower() -> None:
    hardly = Bounding(100.0, whole=(110.0, 110.2), whole_pieces=(109.8, 109.9), whole_shrunk=(109.9, 110.0))
    assert hardly.chosen() == WHOLE and hardly.planned == ["whole"]
    lower = Bounding(100.0, whole=(110.0, 111.0), whole_pieces=(105.0, 106.0))
    assert lower.chosen().pieces and lower.planned == ["whole_pieces"]


def test_on_slices_it_is_planned_shrunk_only_if_that_lowers_its_bound() -> None:
    """As it is, a plan of the shrunk step was often faster with the same bound; on slices little waits."""
    slices = {"whole": (120.0, 130.0), "slices": (105.0, 110.0)}
    same = Bounding(100.0, **slices, slices_shrunk=(105.0, 106.0))
    assert same.chosen() == ON_SLICES["slices"] and same.planned == ["slices"]
    lower = Bounding(100.0, **slices, slices_shrunk=(104.0, 106.0))
    assert lower.chosen() == replace(ON_SLICES["slices"], shrunk=True) and lower.planned == ["slices", "slices_shrunk"]


def test_a_variant_that_cannot_be_the_fastest_by_its_bound_is_not_shrunk() -> None:
    candidates = Bounding(100.0, whole=(105.0, 106.0), slices=(120.0, 121.0))
    assert candidates.chosen() == WHOLE and candidates.shrinks == [WHOLE]
