"""What a refused budget's error says besides: what of the training loop could change, so that a plan fits."""

from __future__ import annotations

from shoal.core.sizes import format_bytes
from shoal.errors import BudgetError
from shoal.memory.static_memory import StaticMemory


def with_hint(error: BudgetError, static: StaticMemory, state_bytes: int) -> BudgetError:
    """The error with the first thing of the loop that takes room, or is not counted yet.

    Args:
        error: what the planner raised.
        static: what is in use beside the step.
        state_bytes: the optimizer's state, as counted.
    """
    if gradient_bytes := static.gradient_bytes():
        return error.with_hint(
            f"gradients of an earlier step take {format_bytes(gradient_bytes)}: call optimizer.zero_grad() "
            "before the forward pass unless you accumulate them"
        )
    if state_bytes:
        return error.with_hint(f"the optimizer's state takes {format_bytes(state_bytes)}")
    if not static.has_optimizer:
        return error.with_hint("the optimizer's state is not counted yet: declare it with optimizer=")
    return error


def with_hope(refused: BudgetError, in_hope: BudgetError) -> BudgetError:
    """The error with what is enough in a loop that holds least, where that is less.

    Args:
        refused: of the loop as far as it is known.
        in_hope: of the loop that holds least.

    >>> refused, in_hope = BudgetError("no", least_feasible_bytes=2048), BudgetError("no", least_feasible_bytes=1024)
    >>> str(with_hope(refused, in_hope))[:22], str(with_hope(in_hope, refused))
    ('no; 1.000 KiB are enou', 'no')
    """
    least_bytes = in_hope.least_feasible_bytes or 0
    if not 0 < least_bytes < (refused.least_feasible_bytes or 0):
        return refused
    return refused.with_hint(
        f"{format_bytes(least_bytes)} are enough where nothing holds the model's outputs once the loss is known, as in "
        "criterion(model(x), y).backward()"
    )


def with_aside(error: BudgetError, aside_bytes: int) -> BudgetError:
    """The error with what is set aside of the budget, which counts in what a plan needs.

    >>> str(with_aside(BudgetError("no"), 2048))[:19], str(with_aside(BudgetError("no"), 0))
    ('no; 2.000 KiB of it', 'no')
    """
    if not aside_bytes:
        return error
    return error.with_hint(
        f"{format_bytes(aside_bytes)} of it are set aside: a step took more than was planned, or ran out of memory"
    )
