"""Means that the caller names one by one and that a step has no use for: each is said, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.core.means import KERNEL_MEANS
from shoal.engine.compile_options import WITHOUT_LINK, CompileOptions
from shoal.engine.search.variants import Variants

_OF_JOINT = {*KERNEL_MEANS, "order"}
A_MODEL = "a model of several graphs"
SEVERAL_MODELS = "an iteration of several models"


def without_effect(variants: Variants, options: CompileOptions, *, leaves: bool, runs_here: bool) -> tuple[str, ...]:
    """A line for each means that does not apply, of those that `allow=` and other keywords name one by one.

    Args:
        variants: the variants of the step.
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
            reasons[name] = _why_not_offloaded(options, leaves=leaves)
        else:
            reasons[name] = variants.why_not(name)
    return _lines(reasons)


def in_several_graphs(
    graphs: Iterable[Variants], options: CompileOptions, what: str, *, leaves: bool, may_vary: bool
) -> tuple[str, ...]:
    """The same if several graphs are planned as one step.

    Args:
        graphs: the variants of each, which are only asked where `may_vary`.
        options, leaves: as for `without_effect`.
        what: is several graphs, `A_MODEL` or `SEVERAL_MODELS`.
        may_vary: whether their variants are looked for.
    """
    reasons: dict[str, str] = {}
    for name in sorted(options.named - {"recompute"}):
        if name == "offload":
            reasons[name] = _why_not_offloaded(options, leaves=leaves)
        elif name in _OF_JOINT and options.planner != "joint":
            reasons[name] = "only planner='joint' looks for it"
        elif name != "order" and not may_vary:
            reasons[name] = f"{what} is planned without it"
        else:
            graphs = tuple(graphs)
            each = [variants.why_not(name) for variants in graphs]
            reasons[name] = each[0] if all(each) else ""
    return _lines(reasons)


def _why_not_offloaded(options: CompileOptions, *, leaves: bool) -> str:
    if options.planner in WITHOUT_LINK:
        return f"the planner {options.planner!r} offloads nothing"
    return "" if leaves else "device and host are one; offload_to= may name a folder"


def _lines(reasons: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name!r} is without effect: {reason}" for name, reason in reasons.items() if reason)
