"""A budget of reserved bytes: plans are made until what the caching allocator will reserve for one fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shoal.core.plan import Plan
from shoal.core.schedule import schedule
from shoal.core.sizes import format_bytes
from shoal.engine.compile_options import CompileOptions
from shoal.engine.loop_memory import LoopMemory, best_case
from shoal.engine.step_planning import Planned
from shoal.errors import BudgetError, InputError
from shoal.lowlevel import cuda_allocator
from shoal.memory.layout.caching_allocator import PASSES_LIMIT_BYTES
from shoal.memory.layout.reserved import Reserved, reserved
from shoal.memory.layout.segment_ages import trimmed_segments
from shoal.memory.static_memory import StaticMemory

log = logging.getLogger("shoal")

_ROUNDS = 12


def within_reserved(
    made: Planned, again: Callable[[int], Planned], look: Callable[[Planned], Reserved], budget_bytes: int
) -> tuple[Planned, Reserved]:
    """The plan that the allocator reserves no more for than the budget, and what it reserves.

    Args:
        made: a plan that has no more in use than that.
        again: makes one with that many bytes set aside.
        look: what the allocator reserves for a plan.
        budget_bytes: that may be reserved.

    Raises:
        BudgetError: no plan was found.
    """
    aside_bytes = 0
    found = look(made)
    for _ in range(_ROUNDS):
        if not found.short_bytes:
            return made, found
        aside_bytes = max(aside_bytes, budget_bytes - made.plan.predicted_peak_bytes) + found.short_bytes
        try:
            made = without_aside(again(aside_bytes), aside_bytes)
        except BudgetError as error:
            left = f"{format_bytes(aside_bytes)} of the budget; the allocator reserves more than is in use"
            raise error.with_detail("left to the allocator", left) from None
        found = look(made)
    raise BudgetError(
        f"for every plan tried the allocator reserves more than the budget of {format_bytes(budget_bytes)}; use a "
        "larger budget, or budget_of='allocated'",
        details={"in use at the peak of the last": format_bytes(made.plan.predicted_peak_bytes)},
        budget_bytes=budget_bytes,
    )


def without_aside(made: Planned, aside_bytes: int) -> Planned:
    """The same plan, which does not count what was set aside while it was made."""
    plan, exact = made.plan, made.plan.exact_graph
    plan = replace(
        plan,
        graph=replace(plan.graph, static_bytes=plan.graph.static_bytes - aside_bytes),
        exact_graph=exact and replace(exact, static_bytes=exact.static_bytes - aside_bytes),
    )
    return replace(made, plan=plan, basis=made.basis.with_static(-aside_bytes))


def look_at_allocator(
    device: torch.device,
    budget_bytes: int,
    parameters: Sequence[torch.Tensor],
    state_bytes: int,
    scratch_bytes: int,
    loop: LoopMemory,
) -> Callable[[Planned], Reserved]:
    """What tells what the allocator, as it is now, will reserve for a plan.

    Args:
        device: a CUDA device.
        budget_bytes: that it may reserve.
        parameters: of the optimizer, whose state and scratch have their sizes.
        state_bytes: of optimizer state that is not there yet.
        scratch_bytes: that each step of the optimizer allocates and frees.
        loop: around the model. Before it is known, the most is returned of what its two extremes reserve: a loop that
            holds less leaves other holes, which may reserve more.
    """
    segments = trimmed_segments(device)
    elsewhere_bytes = torch.accelerator.memory_reserved(device) - sum(int(one["total_size"]) for one in segments)
    sizes = [p.numel() * p.element_size() for p in parameters if p.requires_grad]

    def in_loop(plan: Plan) -> Reserved:
        return reserved(
            plan.graph,
            schedule(plan.graph, plan.residences),
            segments,
            limit_bytes=limit_for(budget_bytes) - elsewhere_bytes,
            state=_blocks(sizes, state_bytes),
            scratch=_blocks(sizes, scratch_bytes),
        )

    def look(made: Planned) -> Reserved:
        found = [in_loop(made.plan)]
        if not loop.learnt:
            found.append(in_loop(made.basis.of(made.plan, best_case(loop, made.basis.outputs))))
        return Reserved(
            max(one.reserved_bytes for one in found) + elsewhere_bytes, max(one.short_bytes for one in found)
        )

    return look


def look_beside(
    static: StaticMemory, device: torch.device, budget_bytes: int, loop: LoopMemory
) -> Callable[[Planned], Reserved]:
    """`look_at_allocator` for a model and its optimizer."""
    return look_at_allocator(
        device,
        budget_bytes,
        static.trained_tensors(),
        max(0, static.state_bytes() - static.state_there_bytes()),
        static.optimizer_step_bytes()[1],
        loop,
    )


def limit_for(budget_bytes: int) -> int:
    """The allocator's limit with which it reserves no more than the budget."""
    return max(0, budget_bytes - PASSES_LIMIT_BYTES)


def grow_segments(device: torch.device, options: CompileOptions) -> bool | None:
    """Whether CUDA's allocator cuts its blocks to size; under a budget it is set to, where it is not said otherwise.

    Raises:
        InputError: reserved bytes are bounded, and the allocator's settings have it round blocks up.
    """
    if device.type != "cuda" or options.budget_bytes is None:
        return None
    grow = cuda_allocator.set_expandable_segments()
    if not grow and options.budget_of == "reserved":
        raise InputError(
            "budget_of='reserved' follows the allocator with expandable_segments, which its settings have off; "
            "leave it out of PYTORCH_ALLOC_CONF"
        )
    if not grow:
        log.warning(
            "expandable_segments is off in the allocator's settings: it rounds blocks up, by 1 % or so, and reserves "
            "more of the device; leave it out of PYTORCH_ALLOC_CONF to have it on"
        )
    return grow


def _blocks(sizes: Sequence[int], nbytes: int) -> list[int]:
    """Blocks of that many bytes in all, as of copies of all parameters, the last ones of what is left."""
    blocks: list[int] = []
    while nbytes > 0 and sizes:
        for size in sizes:
            if nbytes <= 0:
                break
            blocks.append(min(size, nbytes))
            nbytes -= size
    return [*blocks, nbytes] if nbytes > 0 else blocks
