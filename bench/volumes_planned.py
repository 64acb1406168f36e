"""What is planned for a GPU that is not here: the least share, the added time inside budgets, and the largest patch.

Nothing is run. Plain PyTorch's peak is that of the step with everything kept, as planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from bench.network import refusal_columns
from bench.plain import plan_columns
from bench.volumes_catalogue import Entry, build
from bench.volumes_step import autocasting, example
from shoal.core import presets
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.engine.fit import fit
from shoal.engine.options import Options
from shoal.engine.plan import plan
from shoal.errors import BudgetError
from shoal.planners.joint import joint
from shoal.planners.limits import DEFAULT

_LEAST_PERCENT = 33.0
# Of the search for a patch: at each size the question is whether a plan fits, hardly how fast it is.
_SHORT = replace(
    DEFAULT,
    iterated_search_ops=50_000,
    local_search_ops=50_000,
    fill_slack_ops=50_000,
    smallest_peak_ops=50_000,
    hold_longer_ops=200_000,
    max_restarts=0,
)
_HOPELESS = 0.02  # of plain PyTorch's peak, beside what no plan can save


def least_share(
    entry: Entry,
    precision: str,
    hardware: str,
    allow: str,
    seed: int,
    advance: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """The least budget that the planner finds a plan for.

    Args:
        hardware: a preset.
        allow: as of `shoal.plan`; device bytes alone: nothing waits in host memory unless "offload" is in it.

    Returns:
        Plain values, `least_percent` of plain PyTorch's peak among them.
    """
    planned = _Planned(entry, precision, hardware, allow, seed)
    advance("everything kept")
    plain_bytes = planned.plain.plain_peak_bytes
    advance("the least share")
    hopeless_bytes = 2 * planned.parameter_bytes + int(_HOPELESS * plain_bytes)
    started = time.process_time()
    try:
        least_bytes = planned.inside(hopeless_bytes).predicted_peak_bytes
    except BudgetError as error:
        least_bytes = error.least_feasible_bytes
    return {
        **planned.columns,
        "least_bytes": least_bytes,
        "least_percent": 100 * least_bytes / plain_bytes,
        "least_cpu_seconds": time.process_time() - started,
    }


def added_rows(
    entry: Entry,
    precision: str,
    shares: Sequence[float],
    hardware: str,
    allow: str,
    seed: int,
    advance: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """What each budget is planned to add to plain PyTorch's step.

    Args:
        shares: budgets in percent of plain PyTorch's peak.
        hardware, allow: as of `least_share`.

    Returns:
        Plain values: `plain_peak_bytes`, `plain_seconds`, `rows`.
    """
    planned = _Planned(entry, precision, hardware, allow, seed)
    advance("everything kept")
    plain = planned.plain
    rows = []
    for share in shares:
        budget_bytes = int(plain.plain_peak_bytes * share / 100)
        advance(f"{share:g} %")
        row: dict[str, Any] = {"share": share, "budget_bytes": budget_bytes}
        started = time.process_time()
        try:
            made = planned.inside(budget_bytes)
            row |= {"fits": True, **plan_columns(made), "variant": str(made.variant)}
        except BudgetError as error:
            row |= {"fits": False, **refusal_columns(error)}
        rows.append({**row, "planning_cpu_seconds": time.process_time() - started})
    return {**planned.columns, "plain_seconds": plain.plain_seconds, "rows": rows}


class _Planned:
    """The plans of a network's step in one precision."""

    def __init__(self, entry: Entry, precision: str, hardware: str, allow: str, seed: int) -> None:
        self._size, self._precision, self._hardware, self._allow = entry.planned, precision, hardware, allow
        # On the CPU: the meta device has no autocast, and loses gradients behind PReLU.
        self._network = build(self._size, seed)
        self._batch = example(self._size)
        self.parameter_bytes = sum(parameter.nbytes for parameter in self._network.parameters())

    @cached_property
    def plain(self) -> Plan:
        """With everything kept."""
        with autocasting(self._precision):
            return plan(self._network, self._batch, hardware=self._hardware)

    def inside(self, budget_bytes: int) -> Plan:
        with autocasting(self._precision):
            return plan(self._network, self._batch, budget_bytes, hardware=self._hardware, allow=self._allow)

    @property
    def columns(self) -> dict[str, Any]:
        """What was planned."""
        return {
            "side": self._size.side,
            "batch": self._size.batch,
            "hardware": self._hardware,
            "allow": self._allow,
            "plain_peak_bytes": self.plain.plain_peak_bytes,
            "parameters_and_gradients_percent": 200 * self.parameter_bytes / self.plain.plain_peak_bytes,
        }


def largest_patch(
    entry: Entry,
    hardware: str,
    allow: str,
    seed: int,
    least_percent: float = _LEAST_PERCENT,
    advance: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """The largest patch inside all of a card's memory, float32: of plain PyTorch by `shoal.fit`, each side by itself;
    of Shoal among cubes, so that few are planned, each with short searches: a step may be faster than its plan says.

    Args:
        least_percent: the least share of the step at another size, where the search begins.
    """
    size, step = entry.planned, entry.multiple_of
    network = build(size, seed)
    budget_bytes = presets.get(hardware).device.memory_bytes
    found: dict[str, Any] = {"hardware": hardware, "budget_bytes": budget_bytes, "batch": size.batch, "allow": allow}

    def batch(patch: Sequence[int]) -> torch.Tensor:
        return torch.empty(size.batch, 1, *patch)  # no page of it is touched

    plain = fit(
        network,
        batch,
        budget_bytes,
        patch=(size.side,) * 3,
        multiple_of=step,
        hardware=hardware,
        allow="keep",
        trying=lambda patch: advance(f"the largest patch, plain: {patch}"),
    )
    found["plain"] = {"patch": list(plain.patch), **_patch_columns(plain.plan)}
    made: dict[int, Plan] = {}

    def least(side: int) -> int:
        advance(f"the largest patch, Shoal: {side}")
        try:
            made[side] = plan(
                network,
                batch((side,) * 3),
                budget_bytes,
                hardware=hardware,
                allow=allow,
                options=Options(planner=_searched_shortly),
            )
        except BudgetError as error:
            return error.least_feasible_bytes
        return made[side].predicted_peak_bytes

    first = int((prod(plain.patch) * 100 / least_percent) ** (1 / 3)) // step * step
    side, too_large = largest_side(least, budget_bytes, step, first)
    found["shoal"] = {"patch": [side] * 3, "too_large": [too_large] * 3, **_patch_columns(made[side])}
    found["volumes"] = side**3 / prod(plain.patch)
    return found


def _searched_shortly(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    return joint(graph, hardware, budget_bytes, limits=_SHORT)


def _patch_columns(made: Plan) -> dict[str, Any]:
    return {
        "predicted_peak_bytes": made.predicted_peak_bytes,
        "plain_peak_bytes": made.plain_peak_bytes,
        "predicted_seconds": made.predicted_seconds,
        "plain_seconds": made.plain_seconds,
    }


def largest_side(least: Callable[[int], int], budget_bytes: int, step: int, first: int) -> tuple[int, int]:
    """The largest side of a cube that fits, a multiple of `step`, and the next; bytes are taken to grow with voxels.

    Args:
        least: bytes of a cube: above the budget where it does not fit.

    >>> largest_side(lambda side: 100 * side**3, 100 * 70**3, 16, 32)
    (64, 80)
    """
    fits, refused, side = 0, 0, first
    while not refused or refused - fits > step:
        needed_bytes = least(side)
        if needed_bytes <= budget_bytes:
            fits = side
        else:
            refused = side
        guess = int(side * (budget_bytes / needed_bytes) ** (1 / 3)) // step * step
        most = refused - step if refused else max(guess, fits + step)
        side = min(max(guess, fits + step), most)
    return fits, refused
