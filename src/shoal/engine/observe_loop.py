"""What a metered step shows of the memory that the training loop holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.engine.generator_states import states_of
from shoal.engine.iteration.metered import Fates, Iteration, Measured
from shoal.engine.iteration.record import Metered
from shoal.engine.loop_memory import LoopMemory, dropped_bytes


def observe_loop(
    iteration: Iteration,
    fates: Fates,
    measured: Measured,
    loop: LoopMemory,
    *,
    gradients_pass: bool,
    awaited_bytes: int = 0,
) -> LoopMemory:
    """What is known of the loop after one more metered step: the worst of all steps, attribute by attribute.

    So what the loop holds only in its first step counts permanently, even where the next metered step says less. Loops
    do
    come back to it: a penalty or a log every n steps begins with the first one, and no later step is metered.

    Args:
        iteration: the steps that ran.
        fates: what became of their outputs and gradients.
        measured: bytes in use meanwhile.
        loop: what was known before.
        gradients_pass: whether gradients of the step before were there when the first forward pass began.
        awaited_bytes: that the plans count and that are not there yet: state of an optimizer that has not stepped.
    """
    released, let_go = frozenset(fates.released - fates.kept), frozenset(fates.let_go - fates.outlived)
    freed = any(step.handed_stayed is False for step in iteration.steps) and not any(
        step.handed_stayed for step in iteration.steps
    )
    seen = replace(
        loop,
        learnt=True,
        released=loop.released & released if loop.learnt else released,
        let_go=loop.let_go & let_go if loop.learnt else let_go,
        tangents_pass=not fates.tangents_stayed and (loop.tangents_pass or not loop.learnt),
        gradients_given=fates.gradients_given or (loop.learnt and loop.gradients_given),
        hooks_free=freed and (loop.hooks_free or not loop.learnt),
        drops_late=loop.drops_late and not (fates.gradients_stayed and gradients_pass),
    )
    gradient_bytes = sum(_loss_bytes(step)[0] for step in iteration.steps)
    given_share = measured.given_bytes / gradient_bytes if gradient_bytes else 0.0
    seen = replace(seen, given_share=max(given_share, loop.given_share) if loop.learnt else given_share)
    # As it was metered: without what the loss keeps, and without graphs; before the first step nothing was held.
    metered = replace(seen, kept_share=0.0, replays=False, held_gradient_bytes=seen.held_gradient_bytes or 0)
    loss_shares = [loop.loss_share] if loop.learnt else []
    kept_shares = [loop.kept_share] if loop.learnt else []
    for step in iteration.steps:
        basis = step.basis_in_call()
        plan = step.plan and basis and basis.of(step.plan, metered)
        at_loss = plan and next((m for m in plan.timeline.moments if m.phase == "loss"), None)
        gradient_bytes, operand_bytes = _loss_bytes(step)
        if not plan or not at_loss or not gradient_bytes:
            continue
        rest_bytes = at_loss.total_bytes - at_loss.workspace_bytes
        if plan.states_bytes:  # of these, the one that the backward pass puts back is not there yet
            rest_bytes -= plan.states_bytes // states_of(plan)
        left_bytes = rest_bytes - dropped_bytes(plan.graph)
        backward_bytes = measured.before_backward_bytes
        kept_bytes = max(0, backward_bytes + awaited_bytes - left_bytes) if backward_bytes else 0
        kept_shares.append(kept_bytes / operand_bytes)
        if measured.loss_bytes:
            scratch_bytes = measured.loss_bytes + awaited_bytes - rest_bytes - kept_bytes
            loss_shares.append(max(0, scratch_bytes) / gradient_bytes)
    return replace(
        seen, loss_share=max(loss_shares, default=loop.loss_share), kept_share=max(kept_shares, default=loop.kept_share)
    )


def loss_takes_more(loop: LoopMemory, steps: Sequence[Metered], used_bytes: int) -> LoopMemory:
    """The loop whose loss, of which nothing was known, ran out of memory: it takes what it asked for by then, at least.
    The first step that is metered to its end tells what it does take.

    Args:
        loop: as it was planned for.
        steps: that ran.
        used_bytes: what it would have taken to go on.
    """
    # What the plan had for it; whether what the loss takes stays until the backward pass is not known yet.
    shares = [had := loop.loss_share + loop.kept_share + loop.given_share]
    for step in steps:
        at_loss = step.plan and next((m for m in step.plan.timeline.moments if m.phase == "loss"), None)
        if at_loss and (gradient_bytes := _loss_bytes(step)[0]):
            rest_bytes = at_loss.total_bytes - at_loss.workspace_bytes
            shares.append((used_bytes - rest_bytes) / gradient_bytes + had - loop.loss_share)
    return loop if max(shares) == had else replace(loop, loss_share=max(shares))


def _loss_bytes(step: Metered) -> tuple[int, int]:
    """Of the gradients that the loss computes, and of what it is computed from."""
    basis = step.basis_in_call()
    if basis is None:
        return 0, 0
    names = basis.outputs.values()
    return basis.graph.loss_gradient_bytes(names), basis.graph.loss_operand_bytes(names)
