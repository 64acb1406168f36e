"""Which kernels of ours a plan relies on, and whether this installation has them."""

from __future__ import annotations

from shoal.core.plan import Plan
from shoal.core.validate_plan import check_step
from shoal.errors import PlanError
from shoal.lowlevel.dispatch import VARIABLE, allowed, available_kinds
from shoal.lowlevel.inductor_region import missing_compiler


def kernels_of(plan: Plan, device_type: str) -> tuple[str, ...]:
    """The kinds of kernels that a plan made here relies on; none where PyTorch's own ops do the same."""
    return available_kinds(device_type) if plan.kernel_means else ()


def check_kernels(plan: Plan, device_type: str) -> None:
    """Whether what a plan was made with is here.

    Without them PyTorch's ops compute the same function, in other bytes and times than the plan has.

    Raises:
        PlanError: a kind of kernels is not, or the compiler that its regions need; or the plan is of no step.
    """
    check_step(plan.graph)
    here = available_kinds(device_type)
    for kind in plan.kernels:
        if kind in here:
            continue
        if kind not in allowed().kinds:
            what, remedy = f"{VARIABLE} leaves out", f"unset {VARIABLE}"
        else:
            what, remedy = "this installation lacks", "install Shoal with them"
        used = " and ".join(map(repr, plan.kernel_means))
        raise PlanError(
            f"the plan was made with {used} by {kind} kernels, which {what} on {device_type}; {remedy} or plan again"
        )
    if plan.n_regions and (reason := missing_compiler(device_type)):
        raise PlanError(
            f"the plan was made with {plan.n_regions} compiled regions (kernels='compiled'), and {reason}; plan again"
        )
