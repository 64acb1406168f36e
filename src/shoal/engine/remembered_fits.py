"""Which sizes of a step fit, each asked for once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from shoal.errors import BudgetError

Size = TypeVar("Size", bound=Hashable)


class RememberedFits(Generic[Size]):
    """A function of a size that remembers what it said.

    Args:
        ask: size → the peak of a plan that fits; raises BudgetError where none does.
    """

    def __init__(self, ask: Callable[[Size], int]) -> None:
        self._ask = ask
        self._found: dict[Size, int | BudgetError] = {}

    def __call__(self, size: Size) -> int:
        """What `ask` says."""
        if size not in self._found:
            try:
                self._found[size] = self._ask(size)
            except BudgetError as error:
                self._found[size] = error
        found = self._found[size]
        if isinstance(found, BudgetError):
            raise found
        return found

    def refuse(self, size: Size, error: BudgetError) -> None:
        """Remember that it does not fit, whatever was said before."""
        self._found[size] = error
