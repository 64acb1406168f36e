"""What a model's step takes plain and planned, and what would help: measured and planned here, as plain values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import shoal
from shoal import Plan
from shoal.app.doctor.subject import Subject
from shoal.capture.call_arguments import Example, arguments_of
from shoal.capture.dynamo import GraphBreak
from shoal.core.sizes import MAX_BYTES, format_bytes
from shoal.errors import BudgetError, CaptureError, InputError, ShoalError
from shoal.memory.budget import budget_bytes
from shoal.memory.optimizer_state import declared_optimizer
from shoal.memory.running_meter import RunningMeter
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


@dataclass(frozen=True)
class Taken:
    """A step that was taken.

    Attributes:
        peak_bytes: measured, of the step with persistent memory; None where it was not.
        seconds: of the step after it.
    """

    peak_bytes: int | None
    seconds: float


class Start:
    """Where steps of a model start: its buffers, the generator's state, no gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        self._seed = torch.random.initial_seed()

    def again(self) -> None:
        """Go back to it."""
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(self._buffers[name])
        self._model.zero_grad(set_to_none=True)
        torch.manual_seed(self._seed)


def loss_of(outputs: Any) -> torch.Tensor:
    """The mean of the squares of all outputs that have a gradient, in place of the loss that is not known here.

    Raises:
        InputError: none has one.

    >>> loss_of({"logits": torch.ones(3, requires_grad=True), "names": ["a"]})
    tensor(1., grad_fn=<AddBackward0>)
    """
    found = [value for value in _tensors(outputs) if value.requires_grad]
    if not found:
        raise InputError("no output of the model needs a gradient, so there is no training step")
    return sum((value.float().square().mean() for value in found), start=torch.zeros((), device=found[0].device))


def plain_step(model: nn.Module, example: Example, start: Start) -> Taken:
    """A step of plain PyTorch: one is metered, one is timed. Gradients stay.

    Raises:
        InputError: the model cannot be called so.
        torch.OutOfMemoryError: it does not fit.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    standing = [*model.parameters(), *model.buffers(), *_tensors(example)]
    args, kwargs = arguments_of(example)
    meter = RunningMeter(device)
    start.again()
    try:
        is_metered = _begins(meter, standing)
        try:
            outputs = model(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a user's model raises
            raise InputError(
                f"the model cannot take this input: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        peaks_bytes = [meter.mark().peak_bytes]
        loss = loss_of(outputs)
        del outputs
        peaks_bytes.append(meter.mark().peak_bytes)
        meter.go_on(standing)
        loss.backward()
        peaks_bytes.append(meter.mark().peak_bytes)
    finally:
        meter.close()
    del loss
    return Taken(max(peaks_bytes) if is_metered else None, seconds(model, example, start))


def _begins(meter: RunningMeter, standing: Sequence[torch.Tensor]) -> bool:
    """Meter a step from here on; whether that can be done: not while a profiler runs, without a C++ compiler."""
    try:
        meter.start(or_records=True)
    except InputError:
        return False
    meter.restart_from(standing)
    meter.mark()
    meter.go_on(standing)
    return True


def seconds(model: nn.Module, example: Example, start: Start) -> float:
    """How long a step takes, from the start. Gradients stay."""
    args, kwargs = arguments_of(example)
    start.again()
    _wait(example)
    begun = time.perf_counter()
    loss_of(model(*args, **kwargs)).backward()
    _wait(example)
    return time.perf_counter() - begun


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies on the host, by parameter."""
    return {name: p.grad.detach().cpu().clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
    """Between the gradients of any parameter, relative to the largest value of all; 0 where all are the same.

    Not to its own gradient's: that of a convolution's bias before a batch norm is rounding only.

    >>> one = {"weight": torch.tensor([1.0, 4.0]), "bias": torch.tensor([1e-9])}
    >>> largest_difference(one, one), largest_difference({"weight": torch.tensor([1.0, 3.0]), "bias": one["bias"]}, one)
    (0.0, 0.25)
    """
    if ours.keys() != plain.keys():
        return math.inf
    off, largest = 0.0, 0.0
    for name, theirs in plain.items():
        largest = max(largest, float(theirs.abs().nan_to_num(0.0).amax()) if theirs.numel() else 0.0)
        apart = (ours[name] != theirs) & ~(ours[name].isnan() & theirs.isnan())
        if apart.any():
            off = max(off, float((ours[name] - theirs)[apart].abs().nan_to_num(math.inf).amax()))
    return off / largest if largest else off and math.inf


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor))


def _wait(example: Example) -> None:
    if any(value.device.type == "cuda" for value in _tensors(example)):
        torch.accelerator.synchronize()
