"""What several models under one budget hold, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from shoal.core.columns import aligned
from shoal.core.sizes import format_bytes
from shoal.engine.iteration.known import KnownIteration
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import storage_sizes
from shoal.planners.infeasible import at_peak


@dataclass(frozen=True)
class PersistentMemory:
    """Persistent memory of a model. Tensors shared between models are counted once, for the first.

    Attributes:
        model: its name.
        parameter_bytes, gradient_bytes, state_bytes: of parameters and buffers, of the gradients that exist, and of
            the state that optimizers have of its parameters.
    """

    model: str
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes

    @staticmethod
    def of(models: Mapping[str, nn.Module], static: StaticMemory) -> list[PersistentMemory]:
        """Of each model."""
        seen: set[int] = set()

        def new_bytes(tensors: Iterable[torch.Tensor]) -> int:
            storages = storage_sizes(tensors)
            found = sum(nbytes for key, nbytes in storages.items() if key not in seen)
            seen.update(storages)
            return found

        return [
            PersistentMemory(
                name,
                new_bytes([*model.parameters(), *model.buffers()]),
                new_bytes(p.grad for p in model.parameters() if p.grad is not None),
                new_bytes(static.state_of(model.parameters())),
            )
            for name, model in models.items()
        ]


class BudgetFigures(Protocol):
    """The figures of a budget that a table shows."""

    @property
    def budget_bytes(self) -> int | None: ...
    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def predicted_peak_bytes(self) -> int | None: ...


def table(budget: BudgetFigures, persistent: Sequence[PersistentMemory], iterations: Sequence[KnownIteration]) -> str:
    """A line of the budget, one for each model, and one for each iteration.

    Args:
        budget: its figures.
        persistent: of each model.
        iterations: those that have run.
    """
    if budget.budget_bytes is None:
        return f"{budget!r}; no model is compiled with it yet"
    at = _at_the_peak(iterations)
    models: list[tuple[str, ...]] = [
        ("model", "persistent", "parameters", "gradients", "optimizer state", "at the peak")
    ]
    models += [
        (
            one.model,
            *map(format_bytes, (one.nbytes, one.parameter_bytes, one.gradient_bytes, one.state_bytes)),
            format_bytes(at.get(one.model, 0)),
        )
        for one in persistent
    ]
    ran: list[tuple[str, ...]] = [("iteration", "graphs", "predicted peak", "measured peak", "added ms")]
    ran += [_row(iteration) for iteration in iterations]
    return "\n".join(
        [
            f"budget          {format_bytes(budget.budget_bytes)}",
            f"predicted peak  {_size(budget.predicted_peak_bytes, 'no iteration was planned yet')}",
            f"measured peak   {_size(budget.peak_bytes, 'no iteration was measured yet')}",
            *aligned(models),
            *(aligned(ran) if iterations else []),
        ]
    )


def _row(iteration: KnownIteration) -> tuple[str, ...]:
    plans = iteration.planned.plans if iteration.planned is not None else ()
    return (
        iteration.name,
        str(len(iteration.nodes)),
        format_bytes(iteration.predicted_bytes) if plans else "not planned",
        _size(iteration.peak_bytes or None, "-"),
        f"{1e3 * sum(plan.added_seconds for plan in plans):+.1f}",
    )


def _at_the_peak(iterations: Iterable[KnownIteration]) -> dict[str, int]:
    """What each model has in use, in addition to persistent memory, at the highest predicted peak."""
    planned = [(iteration, iteration.planned) for iteration in iterations if iteration.planned is not None]
    if not planned:
        return {}
    iteration, made = max(planned, key=lambda one: one[0].predicted_bytes)
    plan, runs = max(zip(made.plans, made.runs, strict=True), key=lambda one: one[0].predicted_peak_bytes)
    found: dict[str, int] = {}
    for storage in at_peak(plan)[2]:
        held = plan.graph.storages[storage]
        part = held.name.partition(".")[0].removeprefix("part")
        if part.isdecimal() and held.kind not in ("parameter", "buffer"):
            model = iteration.models[runs[int(part)]]
            found[model] = found.get(model, 0) + held.nbytes
    return found


def _size(nbytes: int | None, otherwise: str) -> str:
    return otherwise if nbytes is None else format_bytes(nbytes)
