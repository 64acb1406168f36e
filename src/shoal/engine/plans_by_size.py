"""The plan of a network's step at any size of its input: what the searches for a batch and for a patch have alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import ClassVar, Generic, TypeVar

from shoal.capture.call_arguments import Example, arguments_of
from shoal.core.plan import Plan
from shoal.engine.plan import any_plan_of, plan_of, required_budget
from shoal.engine.pricing import Pricing
from shoal.engine.search.any_variant import Fitting
from shoal.errors import BudgetError, InputError, brief
from shoal.memory.storage_bytes import reject_without_shape

Size = TypeVar("Size", bound=Hashable)
_Found = TypeVar("_Found")


class PlansBySize(Generic[Size]):
    """The plans of `shoal.plan` inside one budget, by size. Whatever was asked for once is remembered.

    Attributes:
        budget_bytes: that all plans are inside.

    Args:
        pricing: the model, its budget, and how its step is priced.
        make_example: size → an example, as of `shoal.plan`.
    """

    makes: ClassVar[str]  # what `make_example` has to be, in words
    smallest: Size  # of which a BudgetError names the least

    def __init__(self, pricing: Pricing, make_example: Callable[[Size], Example]) -> None:
        if not callable(make_example):
            raise InputError(f"make_example={brief(make_example)}: expected {self.makes}")
        self.budget_bytes = required_budget(pricing)
        reject_without_shape(pricing.model)
        self._pricing = pricing
        self._make_example = make_example
        self._plans: dict[Size, Plan] = {}
        self._fits: dict[Size, int | BudgetError] = {}
        self._likely = 0  # the variant that fitted last

    def __call__(self, size: Size) -> Plan:
        """The plan at a size.

        Raises:
            InputError, BudgetError, CaptureError: as `shoal.plan`; or `make_example` made something else.
        """
        if size not in self._plans:
            self._plans[size] = self._plan(size)
        return self._plans[size]

    def fitting_bytes(self, size: Size) -> int:
        """The peak of a plan of a size that fits, however slow: whether there is one takes less time than a plan.

        Raises:
            InputError, BudgetError, CaptureError: as a plan. A BudgetError names the lowest peak of the plans that were
                found in a moment, and of the smallest size the least.
        """
        if size not in self._fits:
            try:
                self._fits[size] = self._least_bytes(size)
            except BudgetError as error:
                self._fits[size] = error
        found = self._fits[size]
        if isinstance(found, BudgetError):
            raise found
        return found

    def example(self, size: Size) -> Example:
        """What the model is called with."""
        made = self._make_example(size)
        arguments_of(made, f"make_example({size})")
        return made

    def _least_bytes(self, size: Size) -> int:
        if size == self.smallest or not self._pricing.finds_smallest:
            return self(size).predicted_peak_bytes
        found = self._any_plan(size)
        self._likely = found.place
        return found.peak_bytes

    def _plan(self, size: Size) -> Plan:
        return plan_of(self._pricing, self.example(size))

    def _any_plan(self, size: Size) -> Fitting:
        return any_plan_of(self._pricing, self.example(size), self._likely)

    def _largest_planned(self, search: Callable[[], _Found], size_of: Callable[[_Found], Size]) -> _Found:
        """What a search by `fitting_bytes` finds, repeated until the size that it found has a plan."""
        while True:
            found = search()
            size = size_of(found)
            try:
                self(size)
            except BudgetError as error:  # what was found in a moment is by techniques that were not allowed
                self._fits[size] = error
            else:
                return found
