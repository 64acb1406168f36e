"""The wording of every BudgetError: what is needed, what there is, what to type; exact bytes below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.sizes import budget_text, format_bytes
from shoal.errors import BudgetError


def over_budget(
    name: str,
    needed_bytes: int,
    budget_bytes: int,
    *,
    instead: str = "a smaller batch",
    is_minimum: bool = True,
    details: Mapping[str, object] | None = None,
    **attributes: Any,
) -> BudgetError:
    """The error to raise if a budget is too small.

    Args:
        name: of the model, or of several with "and" between them.
        needed_bytes: what is needed.
        budget_bytes: what was asked for.
        instead: what to do other than to use a larger budget.
        is_minimum: whether a plan of `needed_bytes` is known; otherwise more may be needed.
        details, attributes: as of `BudgetError`.

    >>> print(over_budget("ResNet", 218_412_345, 166_723_584, details={"batch": 8}))
    ResNet needs at least 208.3 MiB; the budget is 159.0 MiB. Use budget='209MiB' or a smaller batch.
      minimum: 208.3 MiB (218412345 bytes)
      budget: 159.0 MiB (166723584 bytes)
      batch: 8
    """
    needs = "need" if " and " in name else "needs"
    at_least, or_more = ("at least", "") if is_minimum else ("more than", " or more")
    figures = {"minimum" if is_minimum else "lower bound": needed_bytes, "budget": budget_bytes}
    return BudgetError(
        f"{name or 'The model'} {needs} {at_least} {format_bytes(needed_bytes)}; the budget is "
        f"{format_bytes(budget_bytes)}. Use budget='{budget_text(needed_bytes)}'{or_more} or {instead}.",
        details={
            **{label: f"{format_bytes(count)} ({count} bytes)" for label, count in figures.items()},
            **{label: value for label, value in (details or {}).items() if label not in figures},
        },
        budget_bytes=budget_bytes,
        least_feasible_bytes=needed_bytes if is_minimum else None,
        **attributes,
    )
