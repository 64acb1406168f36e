"""Details of a BudgetError that only the training loop knows: what of it could change to make a plan fit."""

from __future__ import annotations

from shoal.core.sizes import format_bytes
from shoal.errors import MESSAGE_CHARACTERS, BudgetError
from shoal.memory.static_memory import StaticMemory


def with_hint(error: BudgetError, static: StaticMemory, state_bytes: int) -> BudgetError:
    """The error with the first thing of the loop that takes room, or is not counted yet.

    Args:
        error: what the planner raised.
        static: memory in use outside the step.
        state_bytes: the optimizer's state, as counted.
    """
    if gradient_bytes := static.gradient_bytes():
        return error.with_detail(
            "gradients of an earlier step",
            f"{format_bytes(gradient_bytes)}; call optimizer.zero_grad() before the forward pass unless you accumulate",
        )
    if state_bytes:
        return error.with_detail("optimizer state", format_bytes(state_bytes))
    if not static.has_optimizer:
        return error.with_detail("optimizer state", "not counted yet; declare it with optimizer=")
    return error


def with_optimistic(refused: BudgetError, optimistic: BudgetError) -> BudgetError:
    """The error with what is enough for a loop that holds the minimum, if that is less.

    Which of the two the loop needs shows in its first step: a budget between them is tried. So the first line has both,
    if it has room for them without what else could be made smaller, and what it says to type is enough for either.

    Args:
        refused: of the loop as far as it is known.
        optimistic: of the loop that holds the minimum.

    >>> from shoal.core.over_budget import over_budget
    >>> refused, optimistic = over_budget("M", 2048, 512), over_budget("M", 1024, 512)
    >>> with_optimistic(refused, optimistic).message
    "M needs 1.000 KiB to 2.000 KiB, by what the loop holds; the budget is 512 B. Use budget='2KiB' or a smaller batch."
    >>> with_optimistic(refused, optimistic).details["minimum if the loss frees the outputs"]
    '1.000 KiB, as in criterion(model(x), y).backward()'
    >>> with_optimistic(optimistic, refused) is optimistic
    True
    """
    least_bytes, enough_bytes = optimistic.least_feasible_bytes or 0, refused.least_feasible_bytes or 0
    if not 0 < least_bytes < enough_bytes:
        return refused
    least, enough = format_bytes(least_bytes), format_bytes(enough_bytes)
    error = refused.with_detail(
        "minimum if the loss frees the outputs", f"{least}, as in criterion(model(x), y).backward()"
    )
    both = refused.message.replace(f"at least {enough}", f"{least} to {enough}, by what the loop holds", 1)
    if len(both) > MESSAGE_CHARACTERS:
        both = both.partition("' or ")[0] + "'."
    if least != enough and len(both) <= MESSAGE_CHARACTERS:
        error.message = both
    return error


def with_reserve(error: BudgetError, reserve_bytes: int) -> BudgetError:
    """The error with the part of the budget that is reserved, which counts in what a plan needs.

    >>> with_reserve(BudgetError("no"), 2048).details
    {'reserve': '2.000 KiB; a step took more than was planned, or ran out of memory'}
    """
    if not reserve_bytes:
        return error
    return error.with_detail(
        "reserve", f"{format_bytes(reserve_bytes)}; a step took more than was planned, or ran out of memory"
    )
