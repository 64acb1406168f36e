"""What became of a promise; `model.shoal`."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.core.plan import Plan


@dataclass
class Status:
    """What became of the promise; `model.shoal`.

    Attributes:
        budget_bytes: the promise. None: everything is kept and the peak is only reported.
        plans: every plan in force, one for each shape, and one more where gradients are there before the step.
        measured_peak_bytes: highest measured use of any metered step of the plans in force; None before the first.
        planning_seconds: capture, profiling and planning of all plans, repairs included.
        repairs: how often plans were made anew because a measured peak was over the budget.
        encoded: by step, the storages that its plan encodes. Which those are hangs on times measured here; what an
            earlier run had, put here before the first step, is chosen again, so that its numbers come again.
    """

    budget_bytes: int | None
    plans: tuple[Plan, ...] = ()
    measured_peak_bytes: int | None = None
    planning_seconds: float = 0.0
    repairs: int = 0
    encoded: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """None: a copy of the model trains without a plan, and so it has no status."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None, as a copy: plans are made anew where a saved model is compiled."""
        return type(None), ()

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest step so far; None before the first training step."""
        return max(self.plans, key=lambda plan: plan.plain_peak_bytes, default=None)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """What the plans promise: the highest of their peaks."""
        return max((plan.predicted_peak_bytes for plan in self.plans), default=None)

    @property
    def lower_bound_seconds(self) -> float | None:
        """No plan of the largest step inside the budget adds less time than this."""
        return self.plan.lower_bound_seconds if self.plan else None
