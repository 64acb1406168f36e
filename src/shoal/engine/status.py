"""`model.shoal`: the plans of a compiled model, and what was measured under them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.variant import Variant
from shoal.engine.lossy_report import Loss, LossyReport, lossy_report
from shoal.errors import InputError


@dataclass
class Status:
    """The plans of a compiled model, and what was measured under them; `model.shoal`.

    Attributes:
        budget_bytes: the budget. None: everything is kept and the peak is only reported.
        plans: every plan in force, one for each shape, and one more where gradients are there before the step.
        measured_peak_bytes: highest measured use of any metered step of the plans in force; None before the first.
        planning_seconds: capture, profiling and planning of all plans, repairs included.
        repairs: how often plans were made anew because a measured peak was over the budget.
        encoded: by step, the storages that its plan encodes. They depend on times measured here; what an earlier run
            encoded, put here before the first step, is encoded again, so that the run continues with the same numbers.
        variants: by the shapes of the inputs, the form in which the step is computed; likewise.
    """

    budget_bytes: int | None
    plans: tuple[Plan, ...] = ()
    measured_peak_bytes: int | None = None
    planning_seconds: float = 0.0
    repairs: int = 0
    encoded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    variants: dict[str, Variant] = field(default_factory=dict)
    _model: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    _compiled: Callable[[nn.Module, Plan], nn.Module] | None = field(default=None, repr=False, compare=False)
    _lossy: LossyOptions | None = field(default=None, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """None: a copy of the model trains without a plan, and so it has no status."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None, as a copy: plans are made anew where a saved model is compiled."""
        return type(None), ()

    def describes(
        self,
        model: nn.Module,
        compiled: Callable[[nn.Module, Plan], nn.Module],
        lossy: LossyOptions | None,
    ) -> None:
        """Tell whose status this is, how a copy of it runs under a plan, and what may be encoded."""
        self._model, self._compiled, self._lossy = weakref.ref(model), compiled, lossy

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest step so far; None before the first training step."""
        return max(self.plans, key=lambda plan: plan.plain_peak_bytes, default=None)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The highest predicted peak of the plans in force."""
        return max((plan.predicted_peak_bytes for plan in self.plans), default=None)

    @property
    def lower_bound_seconds(self) -> float | None:
        """No plan of the largest step inside the budget adds less time than this, in its form and order of ops."""
        return self.plan.lower_bound_seconds if self.plan else None

    def lossy_report(
        self,
        example: torch.Tensor | Sequence[Any],
        lossy: str | Mapping[str, Any] | LossyOptions | None = None,
        *,
        loss: Loss | None = None,
        plan: Plan | None = None,
    ) -> LossyReport:
        """Train one step on one batch twice, exactly and with encoded convolution inputs, and compare the gradients.

        Copies of the model run; the model stays as it is.

        Args:
            example: the batch, real numbers of it: the forward pass's argument or a tuple of its arguments.
            lossy: as for `shoal.compile`; None for what the model was compiled with, else "dynamic_tree".
            loss: outputs → a scalar; by default the mean of their squares.
            plan: encode what this plan encodes, in its codec, such as `model.shoal.plan`. By default everything that
                may be encoded is.

        Returns:
            A `LossyReport`: `explain()` for people, `to_json()` for later.

        Raises:
            InputError, CodecError: an argument is none of what is listed above; or the model is gone.
            CaptureError: the model is not one graph.

        Example:
            >>> import shoal
            >>> model = shoal.compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)))
            >>> report = model.shoal.lossy_report(torch.randn(4, 3, 16, 16))
            >>> 0 < report.largest_error < 0.05
            True
        """
        model = None if self._model is None else self._model()
        if model is None or self._compiled is None:
            raise InputError("this status is of no model that is still there; compile one with shoal.compile")
        options = lossy or self._lossy or "dynamic_tree"
        return lossy_report(model, example, options, compiled=self._compiled, loss=loss, plan=plan)
