"""The plan of a network's step at any batch: what `shoal.fit` and `shoal.frontier` search among."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from math import isclose
from typing import Any, TypeVar

from torch import fx

from shoal.capture.call_arguments import Example
from shoal.capture.capture_step import InputPlaces, in_dynamo, joint_step
from shoal.capture.captured import Captured
from shoal.capture.layered import Refused
from shoal.capture.step_writer import shrunk
from shoal.core.plan import Plan
from shoal.core.variant import WHOLE, Variant
from shoal.engine.plans_by_size import PlansBySize
from shoal.engine.pricing import Counted, Pricing
from shoal.engine.search.any_variant import Fitting, any_variant
from shoal.engine.search.best_variant import best_variant
from shoal.engine.search.max_batch import largest_fitting
from shoal.engine.search.priced import captured_variant
from shoal.engine.search.scaled_step import NotLinear, scaled_step
from shoal.engine.search.split_variants import PatchWork, sliced_variants
from shoal.engine.search.variants import Variants, fused_variants, variants_up_to
from shoal.engine.step_planning import CountedStep
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import distinct_bytes

_SMALLEST = 4  # batch whose step stands for others: that of one image is often of another variant
_APART = 4
_Read = TypeVar("_Read")
MakeExample = Callable[[int], Example]


class PlansByBatch(PlansBySize[int]):
    """The plans of `shoal.plan` inside one budget, by batch.

    Capturing takes most of the time that a plan takes. So where a step's times follow from its counts (`hardware` is
    named), the variants of the step are captured at 4, 16, 64, ... images, as far as they are asked for, and those in
    between are interpolated (see `scaled_step`). That is done where the step of a third batch is what two others say;
    all others are captured.

    Args:
        pricing, make_example: as of `PlansBySize`.
        max_batch: `make_example` is asked for none above.
    """

    makes = "a function of a batch size, such as lambda batch: torch.empty(batch, 3, 224, 224)"
    smallest = 1

    def __init__(self, pricing: Pricing, make_example: MakeExample, max_batch: int) -> None:
        super().__init__(pricing, make_example)
        self._max_batch = max_batch
        self._captured: dict[int, _CapturedVariants] = {}

    def _plan(self, batch: int) -> Plan:
        """The plan of steps that are captured for other batches too, where they are enough."""
        started, pricing = time.perf_counter(), self._pricing
        with suppress(NotLinear):
            variants = self._variants(batch)
            found = best_variant(variants, pricing.price_of_counts, self.budget_bytes, pricing.name).plan
            lines, seconds = variants.listed.without_effect, time.perf_counter() - started
            return replace(found, planning_seconds=seconds, options=pricing.options.to_json(), without_effect=lines)
        return super()._plan(batch)  # not in a handler of NotLinear: an error of the model has no other error before it

    def _any_plan(self, batch: int) -> Fitting:
        pricing = self._pricing
        with suppress(NotLinear):
            variants = self._variants(batch)
            return any_variant(variants, pricing.price_of_counts, self.budget_bytes, pricing.name, self._likely)
        return super()._any_plan(batch)

    def largest(
        self,
        trying: Callable[[int], object] = lambda batch: None,
        first: int = 16,
        fits: Callable[[int], int] | None = None,
    ) -> tuple[int, int]:
        """The largest batch that has a plan, and the smallest that was tried and does not fit.

        Args:
            trying, first: as of `largest_fitting`.
            fits: called in place of `fitting_bytes`, which it calls.
        """
        search = partial(
            largest_fitting,
            fits or self.fitting_bytes,
            least_bytes(self._pricing),
            self.budget_bytes,
            first=first,
            max_batch=self._max_batch,
            trying=trying,
        )
        return self._largest_planned(search, lambda found: found[0])

    def _variants(self, batch: int) -> _CapturedVariants | _ScaledVariants:
        """The variants of the step at a batch, without capturing it there if it is not one of 4, 16, 64, ..."""
        if not self._pricing.is_of_counts or batch < _SMALLEST:
            raise NotLinear
        below = _SMALLEST
        while below * _APART <= batch:
            below *= _APART
        if batch == below:
            return self._variants_at(batch)
        above = below * _APART
        beyond = below // _APART if below > _SMALLEST else above * _APART
        if max(above, beyond) > self._max_batch:
            raise NotLinear
        try:
            known = {n: self._variants_at(n) for n in (below, above, beyond)}
            return _ScaledVariants(batch, known, _CapturedVariants(self._pricing, self.example(batch)))
        except Exception as error:  # of the model or of `make_example`, at a batch that the user did not ask for
            raise NotLinear from error

    def _variants_at(self, batch: int) -> _CapturedVariants:
        if batch not in self._captured:
            self._captured[batch] = _CapturedVariants(self._pricing, self.example(batch))
        return self._captured[batch]


@dataclass(frozen=True)
class _Listed:
    """Which variants a step has, known before they are captured."""

    of_norms: tuple[Variant, ...]
    split: tuple[Variant, ...]
    of_fewer_layers: tuple[Variant, ...]
    norm_elems: tuple[int, ...]
    works: dict[Variant, PatchWork | str]
    sliced_depth: float
    samples: int
    without_effect: tuple[str, ...]

    @property
    def patches(self) -> tuple[Variant, ...]:
        """Those of `split` that do not depend on the batch: how many slices there are does."""
        return tuple(one for one in self.split if not one.slices)

    @property
    def on_one_slice(self) -> dict[float, PatchWork]:
        """What a slice of the batch takes, by the share of the layers that are cut."""
        works = ((one, work) for one, work in self.works.items() if one.slices and not isinstance(work, str))
        return {one.depth: replace(work, n_calls=work.n_calls // one.slices) for one, work in works}


class _CapturedVariants:
    """The variants of the step at one batch, without times: each is captured when it is asked for.

    The step as it is and with batch norms fused, which are always considered, are captured together.
    """

    def __init__(self, pricing: Pricing, example: Example) -> None:
        self._pricing = pricing
        self._example = example
        self._graphs: dict[Variant, Counted | str] = {}

    @cached_property
    def listed(self) -> _Listed:
        def read(variants: Variants, step: Callable[[fx.GraphModule], Counted]) -> _Listed:
            of_norms = tuple(variants.of_norms())
            split = tuple(variants.split())
            for variant in (WHOLE, *of_norms):
                self._graphs[variant] = _captured(variants, step, variant)
            sliced = (one for one in split[:1] if one.slices)
            fewer = tuple(each for one in sliced for each in variants.of_fewer_layers(one))
            works = {one: _work(variants, one) for one in (*split, *fewer)}
            lines = self._pricing.say_without_effect(variants)
            elems, depth, samples = variants.norm_elems, variants.sliced_depth, variants.samples
            return _Listed(of_norms, split, fewer, elems, works, depth, samples, lines)

        return self._read(read)

    def of_norms(self) -> Iterator[Variant]:
        return iter(self.listed.of_norms)

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        return variants_up_to(fused, self.listed.norm_elems)

    def split(self) -> Iterator[Variant]:
        return iter(self.listed.split)

    def of_fewer_layers(self, sliced: Variant) -> Iterator[Variant]:
        return (replace(sliced, depth=one.depth) for one in self.listed.of_fewer_layers)

    def work(self, variant: Variant) -> PatchWork:
        return _unless_refused(self.listed.works[variant.parts])

    def graph(self, variant: Variant) -> Counted:
        if variant not in self._graphs:
            self._graphs[variant] = self._read(lambda variants, step: _captured(variants, step, variant))
        return _unless_refused(self._graphs[variant])

    def _read(self, read: Callable[[Variants, Callable[[fx.GraphModule], Counted]], _Read]) -> _Read:
        pricing = self._pricing

        def with_places(gm: fx.GraphModule, inputs: Sequence[Any]) -> _Read:
            places = InputPlaces.of(gm)

            def step(graph: fx.GraphModule) -> Counted:
                captured = joint_step(graph, inputs, places, name=pricing.name, runs_here=False)
                smaller = shrunk(captured)
                return Counted(_counted(captured), None if smaller is None else _counted(smaller))

            return read(Variants(gm, pricing.options.means), step)

        return in_dynamo(pricing.model, self._example, with_places, name=pricing.name)


class _ScaledVariants:
    """The variants of the step at a batch, from those at the batches below, above and beyond it.

    Args:
        batch: whose variants.
        known: the three.
        here: captures those at `batch` that do not follow from the three.

    Raises:
        NotLinear: the step itself is not what the three let expect.
    """

    def __init__(self, batch: int, known: Mapping[int, _CapturedVariants], here: _CapturedVariants) -> None:
        self._batch, self._known, self._here = batch, known, here
        self._below, self._above, _ = known
        lists = [variants.listed for variants in known.values()]
        if len({(one.patches, one.sliced_depth, one.of_norms[:1], len(one.norm_elems)) for one in lists}) > 1:
            raise NotLinear
        self.listed = lists[0]
        self._norm_elems = tuple(map(self._scaled, *(one.norm_elems for one in lists)))
        self._samples = self._scaled(*(one.samples for one in lists))
        self._whole = self._scaled_graph(WHOLE)

    def of_norms(self) -> Iterator[Variant]:
        for variant in self.listed.of_norms[:1]:
            if variant.fuse:
                yield from fused_variants(variant.fuse, self._norm_elems)
        yield from (variant for variant in self.listed.of_norms if variant.invert)

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        return variants_up_to(fused, self._norm_elems)

    def split(self) -> Iterator[Variant]:
        if self._samples > 1:
            yield from sliced_variants(self.listed.sliced_depth, self._samples)
        yield from self.listed.patches

    def of_fewer_layers(self, sliced: Variant) -> Iterator[Variant]:
        return (replace(sliced, depth=one.depth) for one in self.listed.of_fewer_layers)

    def work(self, variant: Variant) -> PatchWork:
        if variant.slices:
            work = self.listed.on_one_slice[variant.depth]
            return replace(work, n_calls=variant.slices * work.n_calls)
        one, *others = (variants.listed.works[variant.parts] for variants in self._known.values())
        for other in others:
            if isinstance(one, str) or isinstance(other, str):
                is_alike = one == other
            else:
                is_alike = one.n_calls == other.n_calls and isclose(one.more_share, other.more_share)
            if not is_alike:
                raise NotLinear
        return _unless_refused(one)

    def graph(self, variant: Variant) -> Counted:
        if variant == WHOLE:
            return self._whole
        if not variant.slices:  # how many there are, and whether they are of one size, differs by batch
            with suppress(NotLinear, Refused):
                return self._scaled_graph(variant)
        return self._here.graph(variant)

    def _scaled_graph(self, variant: Variant) -> Counted:
        known = {batch: variants.graph(variant) for batch, variants in self._known.items()}
        smaller = {batch: step.shrunk for batch, step in known.items() if step.shrunk is not None}
        if smaller and len(smaller) < len(known):
            raise NotLinear
        whole = self._scaled_step({batch: step.whole for batch, step in known.items()})
        return Counted(whole, self._scaled_step(smaller) if smaller else None)

    def _scaled_step(self, known: Mapping[int, CountedStep]) -> CountedStep:
        graphs = {batch: step.graph for batch, step in known.items()}
        first, middle, last = sorted(graphs)
        if scaled_step(graphs[first], first, graphs[last], last, middle) != graphs[middle]:
            raise NotLinear
        scaled = scaled_step(graphs[self._below], self._below, graphs[self._above], self._above, self._batch)
        if scaled is None:
            raise NotLinear
        return replace(known[first], graph=scaled)

    def _scaled(self, *counts: int) -> int:
        """A count at the batch, where those at the three lie on a line."""
        below, above, beyond = self._known
        slope = Fraction(counts[1] - counts[0], above - below)
        found = counts[0] + slope * (self._batch - below)
        if counts[0] + slope * (beyond - below) != counts[2] or found.denominator != 1:
            raise NotLinear
        return int(found)


def least_bytes(pricing: Pricing) -> int:
    """About what a step needs without any images."""
    model, optimizer = pricing.model, pricing.optimizer
    fixed_bytes = distinct_bytes([*model.parameters(), *model.buffers()])
    fixed_bytes += distinct_bytes(p for p in model.parameters() if p.requires_grad)
    return fixed_bytes + StaticMemory(model, optimizer).state_bytes()


def _counted(captured: Captured) -> CountedStep:
    return CountedStep(captured.graph, captured.output_storages())


def _captured(variants: Variants, step: Callable[[fx.GraphModule], Counted], variant: Variant) -> Counted | str:
    try:
        return captured_variant(variants, step, variant)[1]
    except Refused as reason:
        return str(reason)


def _work(variants: Variants, variant: Variant) -> PatchWork | str:
    try:
        return variants.work(variant)
    except Refused as reason:
        return str(reason)


def _unless_refused(found: _Read | str) -> _Read:
    if isinstance(found, str):
        raise Refused(found)
    return found
