"""The step of one network at any batch size, for a device that is not here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from shoal.capture.capture_step import capture_step
from shoal.core.hardware import Hardware
from shoal.core.step import StepGraph
from shoal.cost.roofline import roofline
from shoal.engine.search.scaled_step import scaled_step
from shoal.errors import CaptureError
from shoal.memory.static_memory import StaticMemory

_SMALLEST = 4  # batch whose step stands for others: that of one image is often of another form
_APART = 4


class StepsByBatch:
    """A network's training step by batch size, with the times of a device that is not here; nothing is allocated.

    Capturing takes seconds. So steps are captured at 4, 16, 64, ... images, as far as they are asked for, and those in
    between are interpolated from their neighbours (see `scaled_step`). Where two neighbours are not of one form, the
    step itself is captured. Whatever was asked for once is remembered.

    Args:
        model: the network, best built under `with torch.device("meta"):`, where it takes no memory.
        shape_of: batch size → shape of its one argument.
        hardware: whose rates give the times, and whose link the host is reached by.
        optimizer: the optimizer whose state counts.
        name: the model's name in tables and errors; by default its class.
        rewrites: False for the step as PyTorch has it, without Shoal's lossless rewrites.

    Example:
        >>> from shoal.core import presets
        >>> with torch.device("meta"):
        ...     network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten())
        >>> steps = StepsByBatch(network, lambda batch: (batch, 3, 32, 32), presets.get("p100-nvlink"))
        >>> [storage.shape for storage in steps(100).storages if storage.kind == "input"]
        [(100, 3, 32, 32)]
    """

    def __init__(
        self,
        model: nn.Module,
        shape_of: Callable[[int], tuple[int, ...]],
        hardware: Hardware,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        name: str | None = None,
        rewrites: bool = True,
    ) -> None:
        self._model = model
        self._shape_of = shape_of
        self._hardware = hardware
        self._static = StaticMemory(model, optimizer)
        self._name = name or type(model).__name__
        self._rewrites = rewrites
        self._captured: dict[int, StepGraph] = {}
        self._timed: dict[int, StepGraph] = {}

    def __call__(self, batch: int) -> StepGraph:
        """The step at `batch` images.

        Raises:
            CaptureError: there is no such step: the model is not one graph, or cannot take that batch.
        """
        if batch not in self._timed:
            graph = self._scaled(batch) or self._capture(batch)
            graph = replace(graph, static_bytes=self._static.bytes_beside(graph))
            self._timed[batch] = roofline(graph, self._hardware)
        return self._timed[batch]

    def _scaled(self, batch: int) -> StepGraph | None:
        below = _SMALLEST
        while below * _APART <= batch:
            below *= _APART
        if batch <= below:
            return None
        above = below * _APART
        try:
            return scaled_step(self._capture(below), below, self._capture(above), above, batch)
        except CaptureError:
            return None

    def _capture(self, batch: int) -> StepGraph:
        if batch not in self._captured:
            example = torch.empty(self._shape_of(batch), device="meta")
            captured, _ = capture_step(self._model, example, name=self._name, runs_here=False, rewrites=self._rewrites)
            self._captured[batch] = captured.graph
        return self._captured[batch]
