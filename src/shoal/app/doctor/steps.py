"""A step of a user's model and what it takes: bytes, seconds, gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shoal.capture.call_arguments import Example, arguments_of
from shoal.errors import InputError
from shoal.memory.running_meter import RunningMeter


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
