"""The plan of a network's step at any size of its patches: what `shoal.fit` searches among where `patch=` is given."""

from __future__ import annotations

from collections.abc import Callable

from shoal.engine.forward_on_meta import why_not
from shoal.engine.plans_by_size import PlansBySize
from shoal.engine.search.max_patch import Largest, Patch


class PlansByPatch(PlansBySize[Patch]):
    """The plans of `shoal.plan` inside one budget, by patch."""

    makes = "a function of a patch, such as lambda patch: torch.empty(2, 1, *patch)"
    smallest: Patch = ()

    def largest(self, search: Callable[[Callable[[Patch], int]], Largest], smallest: Patch) -> Largest:
        """The largest patch that has a plan, and the smallest that was tried and does not fit.

        Args:
            search: finds it with a function, which is `fitting_bytes`.
            smallest: of which a BudgetError names the least.
        """
        self.smallest = smallest
        return self._largest_planned(lambda: search(self.fitting_bytes), lambda found: found.patch)

    def why_not(self, patch: Patch) -> str:
        """Why the network does not take a patch, by its forward pass on the meta device; "" where it does."""
        return why_not(self._pricing.model, self.example(patch))
