"""Repairs: what is set aside when a step took more than was planned, and a step that ran out of memory, run again."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from shoal.core.sizes import format_bytes
from shoal.engine.iteration.record import Metered
from shoal.engine.snapshot import Snapshot
from shoal.engine.status import Status

log = logging.getLogger("shoal")

Result = TypeVar("Result")

_LESS = 1 / 16  # of a peak that ran out of memory: the next one is to be lower by this


class SetAside:
    """Bytes of the budget that plans leave free, by step: what it was seen to take beyond its plan."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def of(self, fingerprint: str) -> int:
        """Of the step that was captured with this fingerprint."""
        return self._bytes.get(fingerprint, 0)

    def over_budget(
        self, name: str, steps: Sequence[Metered], measured_bytes: int, predicted_bytes: int, budget_bytes: int
    ) -> None:
        """Set aside by how much the measured peak passed the predicted one: see `aside_when_over`."""
        self._add(steps, aside_when_over(name, measured_bytes, predicted_bytes, budget_bytes))

    def out_of_memory(self, name: str, steps: Sequence[Metered], used_bytes: int, budget_bytes: int) -> None:
        """Set so much aside that the next step takes less: see `aside_when_out`."""
        aside_bytes = max((self.of(step.basis.fingerprint) for step in steps if step.basis is not None), default=0)
        more_bytes = aside_when_out(name, highest_predicted(steps), aside_bytes, used_bytes, budget_bytes)
        self._add(steps, more_bytes)

    def _add(self, steps: Sequence[Metered], nbytes: int) -> None:
        for step in steps:
            if step.basis is not None:
                self._bytes[step.basis.fingerprint] = self.of(step.basis.fingerprint) + nbytes


def aside_when_over(name: str, measured_bytes: int, predicted_bytes: int, budget_bytes: int) -> int:
    """How many bytes to set aside when a measured peak was over the budget, and say so: those not predicted."""
    over_bytes = max(0, measured_bytes - predicted_bytes)
    learnt = f"{format_bytes(over_bytes)} set aside" if over_bytes else "what this loop was seen to hold"
    passed = exceeded(measured_bytes, predicted_bytes, budget_bytes)
    log.warning("%s: %s; planning again with %s", name, passed, learnt)
    return over_bytes


def aside_when_out(name: str, predicted_bytes: int, aside_bytes: int, used_bytes: int, budget_bytes: int) -> int:
    """How many bytes more to set aside when a step ran out of memory, and say so.

    The next peak is a sixteenth lower, and lower by what was in use beyond the prediction: how much is missing cannot
    be told. It is no higher than what the device could not give.

    Args:
        name: the model's.
        predicted_bytes: of its plan, with what is set aside.
        aside_bytes: what is set aside already.
        used_bytes: what it would have taken to go on; 0 if that is not known.
        budget_bytes: the budget.
    """
    peak_bytes = predicted_bytes - aside_bytes
    next_bytes = min(int((1 - _LESS) * peak_bytes), used_bytes or peak_bytes) - max(0, used_bytes - peak_bytes)
    more_bytes = max(0, budget_bytes - aside_bytes - next_bytes)
    if not more_bytes:
        return 0  # as much was set aside before
    log.warning(
        "%s: out of memory in a step with a predicted peak of %s: the device has not all of the budget of %s to "
        "give; planning again with %s of it set aside",
        name,
        format_bytes(peak_bytes),
        format_bytes(budget_bytes),
        format_bytes(aside_bytes + more_bytes),
    )
    return more_bytes


def highest_predicted(steps: Sequence[Metered]) -> int:
    """The highest predicted peak of the steps."""
    return max((step.plan.predicted_peak_bytes for step in steps if step.plan is not None), default=0)


def exceeded(measured_bytes: int, predicted_bytes: int, budget_bytes: int) -> str:
    """In words: the measured peak is over the budget."""
    return (
        f"the measured peak of {format_bytes(measured_bytes)} is over the budget of {format_bytes(budget_bytes)} "
        f"(predicted: {format_bytes(predicted_bytes)})"
    )


def run_again_where_repaired(model: nn.Module, status: Status, run: Callable[[], Result]) -> Result:
    """Run a step, or a part of it, once more from its beginning whenever it ran out of memory and was planned again.

    Args:
        model: its buffers, and the generators' states, are put back before.
        status: of the model; its repairs are counted.
        run: what is run; it must drop what an earlier attempt left, such as gradients.

    Raises:
        torch.OutOfMemoryError: it ran out of memory for another reason than a plan that is new.
        BudgetError: no plan fits any more.
    """
    while True:
        before, repairs = Snapshot(model), status.repairs
        try:
            return run()
        except torch.OutOfMemoryError:
            status.note_refusals()  # in the loss, where no graph of ours has seen it
            if status.repairs == repairs:
                raise
        gc.collect()  # the frames that failed hold tensors
        before.restore()
