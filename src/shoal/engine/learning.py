"""What a metered step shows of the training loop around a model."""

from __future__ import annotations

from dataclasses import replace

from shoal.engine.habits import Habits, dropped_bytes
from shoal.engine.metering import Window
from shoal.memory.step_meter import Measured


def habits_seen_in(window: Window, measured: Measured, habits: Habits, *, gradients_pass: bool) -> Habits:
    """The loop's habits as they are known after one more metered step; the worst of all steps, per habit.

    Args:
        window: the steps that ran, and what became of their outputs and gradients.
        measured: bytes in use meanwhile.
        habits: as they were known before.
        gradients_pass: whether gradients of the step before were there when the first forward pass began.
    """
    released = frozenset(window.released - window.kept)
    seen = replace(
        habits,
        learnt=True,
        released=habits.released & released if habits.learnt else released,
        tangents_pass=not window.tangents_stayed and (habits.tangents_pass or not habits.learnt),
        drops_late=habits.drops_late and not (window.gradients_stayed and gradients_pass),
    )
    loss_shares = [habits.loss_share] if habits.learnt else []
    kept_shares = [habits.kept_share] if habits.learnt else []
    for step in window.steps:
        plan = step.plan and step.basis and step.basis.of(step.plan, replace(seen, kept_share=0.0))
        at_loss = plan and next((m for m in plan.timeline.moments if m.phase == "loss"), None)
        if not plan or not at_loss or not at_loss.error_bytes:
            continue
        rest_bytes = at_loss.total_bytes - at_loss.workspace_bytes
        left_bytes = rest_bytes - dropped_bytes(plan.graph)
        kept_bytes = max(0, measured.before_backward_bytes - left_bytes) if measured.before_backward_bytes else 0
        kept_shares.append(kept_bytes / at_loss.error_bytes)
        if measured.loss_bytes:
            scratch_bytes = measured.loss_bytes - rest_bytes - kept_bytes
            loss_shares.append(max(0, scratch_bytes) / at_loss.error_bytes)
    return replace(
        seen,
        loss_share=max(loss_shares, default=habits.loss_share),
        kept_share=max(kept_shares, default=habits.kept_share),
    )
