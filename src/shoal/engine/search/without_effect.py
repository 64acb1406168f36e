"""Means that the caller names one by one and that a step has no use for: each is said, in one line."""

from __future__ import annotations

from shoal.core.means import KERNEL_MEANS
from shoal.engine.compile_options import WITHOUT_LINK, CompileOptions
from shoal.engine.search.variants import Variants

_OF_JOINT = {*KERNEL_MEANS, "order"}
A_MODEL = "a model of several graphs"
CALLS = "an iteration of several calls"
SEVERAL_MODELS = "an iteration of several models"


def without_effect(variants: Variants, options: CompileOptions, *, leaves: bool, runs_here: bool) -> tuple[str, ...]:
    """A line for each means that does not apply, of those that `allow=` and other keywords name one by one.

    Args:
        variants: the forms of the step.
        options: what the plan may use.
        leaves: whether saved tensors may wait anywhere other than on the device.
        runs_here: whether the step is planned for this machine.
    """
    reasons: dict[str, str] = {}
    for name in sorted(options.named):
        if name in _OF_JOINT and options.planner != "joint":
            reasons[name] = "only planner='joint' looks for it"
        elif name in KERNEL_MEANS and not runs_here:
            reasons[name] = variants.why_not_elsewhere(name)
        elif name == "offload":
            reasons[name] = "" if leaves else "device and host are one; offload_to= may name a folder"
            if options.planner in WITHOUT_LINK:
                reasons[name] = f"the planner {options.planner!r} offloads nothing"
        else:
            reasons[name] = variants.why_not(name)
    return tuple(f"{name!r} is without effect: {reason}" for name, reason in reasons.items() if reason)


def in_several_graphs(options: CompileOptions, what: str) -> tuple[str, ...]:
    """The same if several graphs are planned as one step: nothing but what to recompute is looked for.

    Args:
        options: as for `without_effect`.
        what: is several graphs, `A_MODEL`, `CALLS` or `SEVERAL_MODELS`.
    """
    return tuple(
        f"{name!r} is without effect: {what} is planned only with recompute"
        for name in sorted(options.named - {"recompute"})
    )
