"""Variants of a step that is made up, with what each needs and takes: they stand for `Variants`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.capture.layered import Refused
from shoal.core.plan import Plan
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.priced import Priced
from shoal.engine.search.split_variants import PatchWork
from shoal.errors import BudgetError
from tests.random_steps import conv_bn_relu_chain

FUSED = Variant(fuse="bnff")
CROWDED_BYTES = 10**6


class Refusing:
    """Variants of which each needs another number of bytes, with what plans them."""

    def __init__(self, **needed_bytes: int) -> None:
        self.needed_bytes = {Variant(fuse="" if name == "whole" else name): need for name, need in needed_bytes.items()}
        self.asked: list[Variant] = []

    def of_norms(self) -> Iterator[Variant]:
        return (variant for variant in self.needed_bytes if variant != WHOLE)

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        return iter(())

    def split(self) -> Iterator[Variant]:
        return iter(())

    def of_fewer_layers(self, sliced: Variant) -> Iterator[Variant]:
        return iter(())

    def work(self, variant: Variant) -> PatchWork:
        raise Refused(f"{variant} is not on patches")

    def graph(self, variant: Variant) -> Variant:
        return variant

    def price(self, variant: Variant) -> Priced[None]:
        def plan(budget_bytes: int) -> tuple[None, Plan]:
            self.asked.append(variant)
            raise BudgetError("no plan fits", least_feasible_bytes=self.needed_bytes[variant])

        step = conv_bn_relu_chain(2 + len(self.asked) + list(self.needed_bytes).index(variant))
        return Priced(replace(step, static_bytes=1000), plan)


class OnPatches(Refusing):
    """Variants that hold that many bytes besides, by the number of patches along each side; 1 is the step as it is."""

    def __init__(self, *held_bytes: int) -> None:
        super().__init__()
        patches = [Variant(depth=0.5, grid=(n, n)) for n in range(2, 1 + len(held_bytes))]
        self.held_bytes = dict(zip([WHOLE, *patches], held_bytes, strict=True))
        self.captured: list[Variant] = []

    def split(self) -> Iterator[Variant]:
        return (variant for variant in self.held_bytes if variant != WHOLE)

    def work(self, variant: Variant) -> PatchWork:
        return PatchWork(0.0, 1)

    def price(self, variant: Variant) -> Priced[None]:
        def plan(budget_bytes: int) -> tuple[None, Plan]:
            self.asked.append(variant)
            raise BudgetError("no plan fits", least_feasible_bytes=self.held_bytes[variant])

        self.captured.append(variant)
        step = conv_bn_relu_chain(1 + len(self.captured))
        return Priced(replace(step, static_bytes=self.held_bytes[variant]), plan)


class Many(Refusing):
    """Variants of many ops, of which the least is not searched where the budget is hopeless."""

    def __init__(self, **needed_bytes: int) -> None:
        super().__init__(**needed_bytes)
        self.step = conv_bn_relu_chain(20)
        self.captured: list[Variant] = []

    def price(self, variant: Variant) -> Priced[None]:
        def refuse(budget_bytes: int) -> None:
            raise BudgetError("in a moment")

        self.captured.append(variant)
        made = super().price(variant)
        step = replace(self.step, static_bytes=self.step.static_bytes - list(self.needed_bytes).index(variant))
        return replace(made, graph=step, refuse=refuse)


class InSeconds(Refusing):
    """Variants by the seconds that they take with everything kept, and that their plans take."""

    def __init__(self, **seconds: tuple[float, float]) -> None:
        super().__init__(**dict.fromkeys(seconds, 0))
        self.seconds = dict(zip(self.needed_bytes, seconds.values(), strict=True))

    def price(self, variant: Variant) -> Priced[None]:
        kept_seconds, plan_seconds = self.seconds[variant]
        place = list(self.seconds).index(variant)

        def plan(budget_bytes: int) -> tuple[None, Plan]:
            self.asked.append(variant)
            return None, Plan(taking(plan_seconds, place), {}, "keep_all")

        return Priced(taking(kept_seconds, place), plan)


def taking(seconds: float, place: int) -> StepGraph:
    step = conv_bn_relu_chain(2 + place)  # another step each
    first, *others = step.ops
    others = [replace(op, seconds=0.0) for op in others]
    return replace(step, ops=(replace(first, seconds=seconds), *others))


def kept_alone(nbytes: int) -> StepGraph:
    step = conv_bn_relu_chain(6, nbytes)
    return replace(step, ops=tuple(replace(op, recomputable=False) for op in step.ops))


def crowded(step: StepGraph) -> StepGraph:
    """The step with so much in addition to it that everything kept needs `CROWDED_BYTES`."""
    return replace(step, static_bytes=CROWDED_BYTES - simulate(step, {}).peak_bytes)
