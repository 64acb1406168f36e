"""How deep and how finely to split a network for a budget: `split="auto"` of `shoal.compile`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal import planners
from shoal.capture.capture_step import capture_step
from shoal.core.hardware import Hardware, Link
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.cost.profile import profile_step
from shoal.errors import BudgetError, CaptureError, InputError
from shoal.memory.static_memory import StaticMemory
from shoal.transforms.split.split import SplitModule, split

log = logging.getLogger(__name__)

_DEPTHS = (0.5, 0.75)
_PARTS = (2, 3, 4)  # along each dimension
_GOOD_ENOUGH = 0.02  # of the plain step: a plan that adds no more is not split


def choose_split(
    model: nn.Module,
    arguments: Sequence[Any],
    budget_bytes: int,
    hardware: Hardware,
    *,
    static: StaticMemory,
    planner: str | planners.Planner = "joint",
    link: Link | None = None,
    name: str = "",
) -> nn.Module:
    """The model, or the model with overlapping patches, whichever has the fastest plan inside the budget.

    Depths of 50 and 75 % and two to four patches a side are planned with `halo="exact"`, so that the function stays
    what it is. No step runs, but each distinct op does, to be profiled. Where the unsplit step adds next to nothing it
    is taken at once.

    Raises:
        BudgetError: no plan of any of them fits; the one that came nearest.
    """
    best: tuple[float, nn.Module, str] | None = None
    nearest: BudgetError | None = None
    for candidate, called in _candidates(model, arguments):
        try:
            plan = _planned(candidate, arguments, budget_bytes, hardware, static, planner, link, name)
        except BudgetError as error:
            if nearest is None or (error.least_feasible_bytes or 0) < (nearest.least_feasible_bytes or 0):
                nearest = error
            continue
        except (CaptureError, InputError):
            if not called:
                raise  # the network itself; what cannot be split is left out
            continue
        if best is None or plan.predicted_seconds < best[0]:
            best = plan.predicted_seconds, candidate, called
        if not called and plan.added_seconds <= _GOOD_ENOUGH * plan.plain_seconds:
            break
    if best is None:
        assert nearest is not None
        raise nearest
    log.info("%s: %s inside %s", name or "model", best[2] or "not split", format_bytes(budget_bytes))
    return best[1]


def _candidates(model: nn.Module, arguments: Sequence[Any]) -> Iterator[tuple[nn.Module, str]]:
    yield model, ""
    dims = arguments[0].dim() - 2 if arguments and isinstance(arguments[0], torch.Tensor) else 0
    if not 1 <= dims <= 3:
        return
    for depth in _DEPTHS:
        for parts in _PARTS:
            try:
                divided: SplitModule = split(model, depth, (parts,) * dims, halo="exact")
                divided.check(arguments[0].shape[2:])
            except (CaptureError, InputError):
                continue
            if divided.plan is not None:
                yield divided, f"{depth:.0%} of the convolutions in {parts} patches a side"


def _planned(
    model: nn.Module,
    arguments: Sequence[Any],
    budget_bytes: int,
    hardware: Hardware,
    static: StaticMemory,
    planner: str | planners.Planner,
    link: Link | None,
    name: str,
) -> Plan:
    captured, device = capture_step(model, tuple(arguments), name=name)
    graph = profile_step(captured, device)
    graph = replace(graph, static_bytes=static.bytes_beside(graph), link=link)
    return planners.get(planner)(graph, hardware, budget_bytes)
