"""What is said of memory that was not planned for, or that no plan changes: a sentence in the log for each."""

from __future__ import annotations

import logging

from shoal.core.sizes import format_bytes
from shoal.memory.static_memory import StaticMemory

log = logging.getLogger("shoal")


def optimizer_step_is_over(name: str, static: StaticMemory, budget_bytes: int | None) -> None:
    """Where an optimizer's own step, which comes between the steps that are planned, passes the budget."""
    if budget_bytes is None:
        return
    in_use_bytes, own_bytes = static.optimizer_step_bytes()
    if own_bytes and in_use_bytes > budget_bytes:
        log.warning(
            "%s: the optimizer's step takes %s, %s of it for itself in addition to parameters, gradients and state; "
            "that is over the budget of %s, and no plan changes it: make the optimizer with fused=True, where it has "
            "that, or foreach=False",
            name,
            format_bytes(in_use_bytes),
            format_bytes(own_bytes),
            format_bytes(budget_bytes),
        )


def ran_out_in_loss(name: str, room: str, budget_bytes: int) -> None:
    """Where memory runs out between two passes, and what that takes is not known yet; `room` is planned for it now."""
    log.warning(
        "%s: out of memory between the forward and the backward pass, as in the loss, in a step planned for %s; "
        "planning again with %s",
        name,
        format_bytes(budget_bytes),
        room,
    )


def ran_out_after(name: str, static: StaticMemory) -> None:
    """Where memory runs out between the end of a step's backward pass and the next call."""
    in_use_bytes, own_bytes = static.optimizer_step_bytes()
    log.warning(
        "%s: out of memory after a step's backward pass, where no plan changes it; the optimizer's step takes "
        "%s, %s of it for itself: make the optimizer with fused=True or foreach=False, or hold less between steps",
        name,
        format_bytes(in_use_bytes),
        format_bytes(own_bytes),
    )


class UncountedState:
    """Says which optimizers hold another state than was counted.

    The first is told at once. Those that step after it, before the model's next call, are told together then: where
    every parameter has an optimizer of its own there are hundreds.

    Args:
        name: the model's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._told_bytes: int | None = None  # of state, since the last call
        self._untold = 0  # optimizers
        self._bytes = 0

    def stepped(self, news: str, state_bytes: int, counted_bytes: int) -> None:
        """An optimizer has stepped; `news` says which."""
        if self._told_bytes is None:
            self._told_bytes = state_bytes
            self._say(news, "holds", state_bytes, counted_bytes)
        else:
            self._untold, self._bytes = self._untold + 1, state_bytes

    def called(self) -> None:
        """The model is called."""
        if self._untold and self._told_bytes is not None:
            others = f"{self._untold} more optimizers have stepped" if self._untold > 1 else "another one has stepped"
            self._say(others, "all hold", self._bytes, self._told_bytes)
        self._told_bytes, self._untold = None, 0

    def _say(self, news: str, holds: str, state_bytes: int, counted_bytes: int) -> None:
        log.warning(
            "%s: %s, and %s %s of state where %s were counted; counted in the budget from here on: declare it with "
            "optimizer=",
            self._name,
            news,
            holds,
            format_bytes(state_bytes),
            format_bytes(counted_bytes),
        )


def state_is_over(name: str, predicted_bytes: int, budget_bytes: int) -> None:
    """An optimizer's state passes the budget, and nothing can be planned again."""
    log.warning(
        "%s: with it the predicted peak is %s, over the budget of %s; a plain torch.compile backend cannot "
        "plan again: declare it in options, as an optimizer or by its name",
        name,
        format_bytes(predicted_bytes),
        format_bytes(budget_bytes),
    )


def calls_come_together(name: str, *, reserved: bool) -> None:
    """Several calls of the model wait for their backward passes."""
    log.info("%s: several calls before a backward pass are planned as one iteration", name)
    if reserved:
        log.warning("%s: several calls before a backward pass: budget_of='reserved' bounds what they allocate", name)


def left_over(name: str, n_calls: int, peak_bytes: int) -> None:
    """Calls wait whose backward passes may never come, and there is no plan with room for them."""
    log.warning(
        "%s: %d call%s before this one wait%s for a backward pass, as of a batch that is skipped: with it the step "
        "takes up to %s, over the budget, and no plan changes that; del the loss before the next call",
        name,
        n_calls,
        "s" if n_calls > 1 else "",
        "" if n_calls > 1 else "s",
        format_bytes(peak_bytes),
    )


def called_from_elsewhere(name: str, more_bytes: int) -> None:
    """cuBLAS keeps a workspace for another thread or stream."""
    log.info(
        "%s: called from another thread or stream than before, for which cuBLAS keeps %s; they count in the "
        "budget from here on",
        name,
        format_bytes(more_bytes),
    )


def planned_apart_is_over(name: str, measured_bytes: int, budget_bytes: int) -> None:
    """Calls that were planned one by one pass the budget together."""
    log.warning(
        "%s: the measured peak of %s is over the budget of %s: some of these calls were planned before it "
        "was known how many there are; the next ones are planned together",
        name,
        format_bytes(measured_bytes),
        format_bytes(budget_bytes),
    )


def graph_is_kept(name: str, measured_bytes: int, budget_bytes: int) -> None:
    """A backward pass keeps what it reads for another one, and passes the budget with it."""
    log.warning(
        "%s: the measured peak of %s is over the budget of %s: a backward pass keeps its graph (retain_graph=True), "
        "and the step was planned before that was known; the next ones are planned with it",
        name,
        format_bytes(measured_bytes),
        format_bytes(budget_bytes),
    )


def given_plan_is_over(name: str, measured_bytes: int, budget_bytes: int) -> None:
    """A plan that was given passes the budget."""
    log.warning(
        "%s: the measured peak of %s is over the budget of %s; the given plan stays as it is: give budget= "
        "without a given plan to have it planned again",
        name,
        format_bytes(measured_bytes),
        format_bytes(budget_bytes),
    )


def cannot_plan_again(name: str, exceeded: str, over_bytes: int) -> None:
    """A step passes the budget by so much, and nothing can be planned again; `exceeded` says what was measured."""
    log.warning(
        "%s: %s; a plain torch.compile backend cannot plan again: use shoal.compile, or a budget that is smaller by %s",
        name,
        exceeded,
        format_bytes(over_bytes),
    )
