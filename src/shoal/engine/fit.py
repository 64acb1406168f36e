"""`shoal.fit`: the largest batch that trains inside a budget, found by planning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal import planners
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.engine.plan import plan
from shoal.engine.pricing import Pricing
from shoal.engine.search.max_batch import MAX_IMAGES, largest_fitting
from shoal.errors import BudgetError, CaptureError, InputError, brief
from shoal.memory.static_memory import distinct_bytes, optimizer_state_bytes
from shoal.offload.policy import AUTO


@dataclass(frozen=True)
class Fit:
    """The largest batch that was found to train inside a budget.

    Attributes:
        batch: what `make_example` was given.
        plan: of that step; give it to `shoal.compile(model, plan=...)`, or compile with the same budget.
        too_many: the smallest batch that was tried and does not fit; 0 where every one fits that was tried.
    """

    batch: int
    plan: Plan
    too_many: int

    @property
    def images_per_second(self) -> float:
        """Predicted."""
        return self.batch / self.plan.predicted_seconds


def fit(
    model: nn.Module,
    make_example: Callable[[int], torch.Tensor | Sequence[Any]],
    budget: int | str,
    *,
    first: int = 16,
    max_batch: int = MAX_IMAGES,
    hardware: str | Hardware | None = None,
    allow: str | Collection[str] | None = None,
    planner: str | planners.Planner = "joint",
    optimizer: torch.optim.Optimizer | None = None,
    offload_to: str | Path | None = AUTO,
    host_budget: int | str | None = None,
    lossy: str | Mapping[str, Any] | None = None,
    name: str | None = None,
    trying: Callable[[int], object] = lambda batch: None,
) -> Fit:
    """The largest batch that trains inside a budget.

    It replaces doubling the batch until training runs out of memory: steps are planned, and none is run. Doubles the
    batch until it no longer fits, then narrows down by what the planner says the least budget would be. Answers below
    200 are exact: the next one does not fit. Above, one that is 1 % larger does not.

    Args:
        model: the network.
        make_example: an int → the forward pass's argument at that size, or a tuple of its arguments. It may as well be
            the side of an image: whatever needs more bytes the larger it is. On the "meta" device it takes no memory.
        budget: device bytes at the peak of the step, as for `shoal.plan`.
        first: the batch to begin with.
        max_batch: the batch to stop at.
        hardware, allow, planner, optimizer, offload_to, host_budget, lossy, name: as for `shoal.plan`.
        trying: called with each batch before it is planned.

    Returns:
        A `Fit`: `batch` and its `plan`.

    Raises:
        InputError: an argument is none of what is listed above, or the model takes no input that `make_example` made.
        CodecError: `lossy` names no codec for activations.
        BudgetError: not even a batch of one fits.
        CaptureError: the model is not one graph.

    Example:
        >>> import shoal
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
        >>> def images(batch):
        ...     return torch.empty(batch, 3, 32, 32, device="meta")
        >>> found = shoal.fit(model, images, "4MiB", hardware="p100-nvlink", allow="recompute")
        >>> found.batch, found.plan.predicted_peak_bytes <= 4 * 2**20
        (34, True)

    Known limits: it assumes that where a batch does not fit, no larger one does. A planner whose search is limited can
    miss a plan; then the answer is a batch that fits, not the largest.
    """
    if not callable(make_example):
        raise InputError(f"make_example={brief(make_example)}: expected a function of a batch size, such as "
                         "lambda batch: torch.empty(batch, 3, 224, 224)")  # fmt: skip
    if budget is None:
        raise InputError("no budget was given; say how many bytes a step may use, such as budget='2GiB'")
    for what, number in {"first": first, "max_batch": max_batch}.items():
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
            raise InputError(f"{what}={brief(number)}: expected a positive int")
    options: dict[str, Any] = {
        "hardware": hardware,
        "allow": allow,
        "planner": planner,
        "optimizer": optimizer,
        "offload_to": offload_to,
        "host_budget": host_budget,
        "lossy": lossy,
        "name": name,
    }
    within_bytes = Pricing.of(model, budget, **options).budget_bytes or 0
    fixed_bytes = distinct_bytes(model.parameters()) + distinct_bytes(model.buffers())
    fixed_bytes += distinct_bytes(p for p in model.parameters() if p.requires_grad)
    fixed_bytes += optimizer_state_bytes(optimizer) if optimizer is not None else 0
    refused: Exception | None = None

    def plan_of(batch: int) -> Plan:
        nonlocal refused
        try:
            return plan(model, _example(make_example, batch), within_bytes, **options)
        except (BudgetError, CaptureError, InputError) as error:
            refused = error
            raise

    answer = largest_fitting(
        plan_of,
        lambda batch: fixed_bytes,
        within_bytes,
        "",
        first=int(first),
        max_images=int(max_batch),
        trying=trying,
    )
    if answer.plan is None:
        assert refused is not None
        raise refused
    return Fit(answer.batch, answer.plan, answer.too_many)


def _example(make_example: Callable[[int], Any], batch: int) -> torch.Tensor | Sequence[Any]:
    made = make_example(batch)
    if not isinstance(made, (torch.Tensor, tuple, list)):
        raise InputError(f"make_example({batch}) is {brief(made)}; expected a tensor, or a tuple of arguments")
    return made
