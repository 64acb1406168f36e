"""A step with padded matrix products: those that were measured to be faster than the plain ones."""

from __future__ import annotations

import math

from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.capture.captured import Captured
from shoal.capture.padded_products import with_padded_products
from shoal.core.plan import Plan
from shoal.cost.profile import profile
from shoal.graph.op_counts import signature
from shoal.memory.limit import no_memory_limit

_SLOWER = 1.0  # a padded product stays where it takes at most as long as the plain one


def in_faster_products(captured: Captured, plan: Plan | None = None) -> Captured:
    """The step with the padded products that are faster on its device than the plain ones, their copies included.

    A copy that a region will write on its way counts as one by itself.

    Args:
        captured: the step, to be run on this machine.
        plan: one that was made for it: the products that it has padded are, and nothing is measured.
    """
    found = with_padded_products(captured)
    if not found.products:
        return captured
    if plan is not None:
        names = {op.name for op in plan.captured_graph.ops}
        left_out = {plain.name for name, (plain, _) in found.products.items() if name not in names}
    else:
        nodes = [node for plain, instead in found.products.values() for node in (plain, *instead)]
        with no_memory_limit(), unset_fake_temporarily():
            seconds = profile({signature(node): node for node in nodes}, device=captured.device).seconds
        left_out = {
            plain.name
            for plain, instead in found.products.values()
            if sum(seconds.get(signature(node), math.inf) for node in instead)
            > _SLOWER * seconds.get(signature(plain), 0.0)
        }
    return with_padded_products(captured, left_out).captured if left_out else found.captured
