"""The plan of a network's step at any size of its patches: what `shoal.fit` searches among where `patch=` is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

from shoal.capture.call_arguments import Example, arguments_of
from shoal.core.plan import Plan
from shoal.engine.forward_on_meta import why_not
from shoal.engine.plan import any_plan_of, plan_of
from shoal.engine.pricing import Pricing
from shoal.engine.remembered_fits import RememberedFits
from shoal.engine.search.max_patch import Largest, Patch
from shoal.errors import BudgetError, InputError, brief
from shoal.memory.storage_bytes import reject_without_shape

MakePatch = Callable[[Patch], Example]


class PlansByPatch:
    """The plans of `shoal.plan` inside one budget, by patch. Whatever was asked for once is remembered.

    Args:
        pricing: the model, its budget, and how its step is priced.
        make_example: patch → an example, as of `shoal.plan`.
    """

    def __init__(self, pricing: Pricing, make_example: MakePatch) -> None:
        if not callable(make_example):
            raise InputError(f"make_example={brief(make_example)}: expected a function of a patch, such as "
                             "lambda patch: torch.empty(2, 1, *patch)")  # fmt: skip
        reject_without_shape(pricing.model)
        self._pricing = pricing
        self._make_example = make_example
        self._plans: dict[Patch, Plan] = {}
        self._fits = RememberedFits(self._ask)
        self._likely = 0  # the form that fitted last
        self._smallest: Patch = ()

    def __call__(self, patch: Patch) -> Plan:
        """The plan at a patch.

        Raises:
            InputError, BudgetError, CaptureError: as `shoal.plan`; or `make_example` made something else.
        """
        if patch not in self._plans:
            self._plans[patch] = plan_of(self._pricing, self.example(patch))
        return self._plans[patch]

    def fitting_bytes(self, patch: Patch) -> int:
        """The peak of a plan of a patch that fits, however slow: whether there is one takes less time than a plan.

        Raises:
            InputError, BudgetError, CaptureError: as a plan. A BudgetError names the lowest peak of the plans that were
                found in a moment.
        """
        return self._fits(patch)

    def _ask(self, patch: Patch) -> int:
        if patch == self._smallest or not self._pricing.finds_smallest:
            return self(patch).predicted_peak_bytes
        found = any_plan_of(self._pricing, self.example(patch), self._likely)
        self._likely = found.place
        return found.peak_bytes

    def largest(self, search: Callable[[Callable[[Patch], int]], Largest], smallest: Patch) -> Largest:
        """The largest patch that has a plan, and the smallest that was tried and does not fit.

        Args:
            search: finds it with a function, which is `fitting_bytes`.
            smallest: of which a BudgetError names the least.
        """
        self._smallest = smallest
        while True:
            found = search(self.fitting_bytes)
            try:
                self(found.patch)
            except BudgetError as error:  # what was found in a moment is by means that were not allowed
                self._fits.refuse(found.patch, error)
            else:
                return found

    def example(self, patch: Patch) -> Example:
        """What the model is called with."""
        made = self._make_example(patch)
        arguments_of(made, f"make_example({patch})")
        return made

    def why_not(self, patch: Patch) -> str:
        """Why the network does not take a patch, by its forward pass on the meta device; "" where it does."""
        return why_not(self._pricing.model, self.example(patch))


def patch_of(what: str, sizes: object, dims: int = 0) -> Patch:
    """Sizes that a caller gave.

    Args:
        dims: how many there have to be; 0 for any number.

    Raises:
        InputError: they are not that number of positive ints.
    """
    right = isinstance(sizes, Sequence) and not isinstance(sizes, str) and all(map(_is_positive, sizes))
    if not right or not sizes or (dims and len(sizes) != dims):  # type: ignore[arg-type]
        raise InputError(f"{what}={brief(sizes)}: expected {dims or 'a few'} positive ints, such as (64, 128, 128)")
    return tuple(int(n) for n in sizes)  # type: ignore[attr-defined]


def _is_positive(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) > 0
