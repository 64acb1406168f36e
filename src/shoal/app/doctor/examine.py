"""What a model's step takes plain and planned, and what would help: measured and planned here, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import shoal
from shoal import Plan
from shoal.app.doctor.steps import Start, Taken, gradients_of, largest_difference, plain_step, seconds
from shoal.app.doctor.subject import Subject
from shoal.capture.dynamo import GraphBreak
from shoal.core.sizes import MAX_BYTES, format_bytes
from shoal.errors import BudgetError, CaptureError, ShoalError
from shoal.memory.budget import budget_bytes
from shoal.memory.optimizer_state import declared_optimizer
from shoal.memory.storage_bytes import distinct_bytes

_STEPS_TO_SETTLE = 4  # of several graphs the second step is compiled again, by the plan of what the first one showed
_HALVINGS = 3  # each is planned, which takes seconds where it does not fit either


@dataclass(frozen=True)
class Examination:
    """Everything that `shoal doctor` found.

    Attributes:
        budget: as it was given, such as "80%"; None where it is what the device has left.
        plain: plain PyTorch's step; None where it was not taken, and `plain_reason` says why.
        plan: what the planned step runs by; where none was taken, the step with everything kept; None where there is
            none.
        planned: the planned step; None where it was not taken.
        difference: between the gradients of both, see `largest_difference`; None where one is missing.
        refused: why the budget cannot be met.
        least_bytes: the smallest budget for which a plan was found; None where the budget given can be met.
        breaks: where the model breaks into several graphs; the first place only where no step was planned.
        uncaptured: why nothing of it can be captured.
        remedies: what would bring it into the budget, the best first.
    """

    subject: Subject
    budget: int | str | None
    budget_bytes: int
    optimizer: str | None
    state_bytes: int
    parameter_bytes: int
    plain: Taken | None = None
    plain_reason: str = ""
    plan: Plan | None = None
    planned: Taken | None = None
    difference: float | None = None
    refused: str = ""
    least_bytes: int | None = None
    breaks: tuple[str, ...] = ()
    uncaptured: str = ""
    remedies: tuple[str, ...] = ()

    @property
    def fits_plain(self) -> bool | None:
        """Whether plain PyTorch's step is within the budget; None where that is not known."""
        bytes_ = self.plain_peak_bytes
        return None if bytes_ is None else bytes_ <= self.budget_bytes

    @property
    def plain_peak_bytes(self) -> int | None:
        """Of plain PyTorch's step: measured, with the optimizer's state, else predicted."""
        if self.plain is not None and self.plain.peak_bytes is not None:
            return self.plain.peak_bytes + self.state_bytes
        return None if self.plan is None else self.plan.plain_peak_bytes

    @property
    def fits_planned(self) -> bool:
        """Whether the planned step is within the budget, as measured where it was."""
        if self.plan is None:
            return False
        if self.planned is None:
            return False
        return (self.planned.peak_bytes or self.plan.predicted_peak_bytes) <= self.budget_bytes


def examine(
    subject: Subject,
    budget: int | str | None,
    *,
    optimizer: str | None = None,
    allow: str | None = None,
    doing: Callable[[str], object] = lambda what: None,
) -> Examination:
    """Take a step of the model as it is and one inside the budget, and look for what would help.

    Args:
        subject: the model and its input.
        budget: as for `shoal.compile`; None for SHOAL_BUDGET, else for "auto".
        optimizer, allow: as for `shoal.compile`.
        doing: called with what is done next, in words.

    Raises:
        InputError: an argument is none of what is listed above, or the model does not take its input.
    """
    model, example = subject.model, subject.example
    within_bytes = budget_bytes(budget, subject.device) or budget_bytes("auto", subject.device) or 0
    declared = declared_optimizer(optimizer)
    state_bytes = 0 if declared is None else declared.state_bytes(model.parameters())  # type: ignore[union-attr]
    found: dict[str, Any] = {
        "subject": subject,
        "budget": budget,
        "budget_bytes": within_bytes,
        "optimizer": optimizer,
        "state_bytes": state_bytes,
        "parameter_bytes": distinct_bytes(model.parameters()),
    }
    beside: dict[str, Any] = {"optimizer": optimizer, "name": subject.name}
    how = beside | {"allow": allow}
    start = Start(model)

    doing("the unmodified step")
    try:
        plain = shoal.plan(model, example, MAX_BYTES, **(beside | {"allow": "keep"}))
    except GraphBreak as error:  # several graphs, unless the planned step says otherwise
        plain, found["breaks"] = None, (f"{error.place}: {error.reason}",)
    except CaptureError as error:
        plain, found["uncaptured"] = None, _in_one_line(error)
    left_bytes = (budget_bytes("auto", subject.device) or 0) + distinct_bytes([*model.parameters(), *model.buffers()])
    if plain is not None and plain.plain_peak_bytes > left_bytes:
        found |= {"plain_reason": "not taken, as the device has no room for it", "plan": plain}
    else:
        doing("plain PyTorch's step")
        try:
            found["plain"] = plain_step(model, example, start)
        except torch.OutOfMemoryError:
            found["plain_reason"] = "it ran out of the device's memory"
    gradients = gradients_of(model) if "plain" in found else None

    doing("planned step")
    start.again()
    try:
        found |= _planned(subject, within_bytes, how, start, gradients, state_bytes)
        found["uncaptured"] = ""
    except BudgetError as error:
        doing("what would help")
        standing_bytes = 2 * found["parameter_bytes"] + state_bytes
        least_bytes = error.least_feasible_bytes or _least_bytes(subject, standing_bytes, how)
        found |= {"refused": _in_one_line(error), "least_bytes": least_bytes}
        found["remedies"] = tuple(_remedies(subject, within_bytes, how, least_bytes, state_bytes))
    except CaptureError as error:
        found |= {"uncaptured": _in_one_line(error), "breaks": ()}
    return Examination(**{"plan": plain, **found})


def _in_one_line(error: ShoalError) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines())


def _planned(
    subject: Subject,
    within_bytes: int,
    how: Mapping[str, Any],
    start: Start,
    gradients: dict[str, torch.Tensor] | None,
    state_bytes: int,
) -> dict[str, Any]:
    model = shoal.compile(subject.model, within_bytes, **how)
    status: Any = model.shoal
    seconds(model, subject.example, start)  # prepared and metered
    difference = None if gradients is None else largest_difference(gradients_of(model), gradients)
    for _ in range(_STEPS_TO_SETTLE):
        prepared = len(status.preparations)
        again = seconds(model, subject.example, start)
        if len(status.preparations) == prepared:
            break
    plan, measured_bytes = status.plan, status.measured_peak_bytes  # no optimizer has made its state here
    return {
        "plan": plan,
        "planned": Taken(None if measured_bytes is None else measured_bytes + state_bytes, again),
        "difference": difference,
        "breaks": plan.breaks,
    }


def _least_bytes(subject: Subject, standing_bytes: int, how: Mapping[str, Any]) -> int | None:
    """The least that works, where the budget was refused before anything was planned; None for several graphs."""
    try:
        return shoal.plan(subject.model, subject.example, standing_bytes, **how).predicted_peak_bytes
    except BudgetError as error:
        return error.least_feasible_bytes
    except CaptureError:
        return None


def _remedies(
    subject: Subject, within_bytes: int, how: Mapping[str, Any], least_bytes: int | None, state_bytes: int
) -> Iterator[str]:
    """What would bring the step into the budget; only what was planned, or follows from what was."""
    if least_bytes is not None and least_bytes - state_bytes <= within_bytes:
        yield f"an optimizer with less state than {how['optimizer']}, which takes {format_bytes(state_bytes)}"
    samples = subject.samples
    for _ in range(_HALVINGS):
        samples //= 2
        if not samples:
            return
        try:
            shoal.plan(subject.model, subject.of_samples(samples), within_bytes, **how)
        except (BudgetError, CaptureError):
            continue
        yield f"a batch of {samples} in place of {subject.samples}"
        return
