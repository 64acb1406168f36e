"""First fit, as the serialised step allocates: the paper's static memory planning (Split-CNN and HMMS, section 4.4)."""

from __future__ import annotations

from shoal.memory.layout.in_order import lay_out_in_order
from shoal.memory.layout.problem import Layout, Problem


def first_fit(problem: Problem) -> Layout:
    """Give each block, in the order in which they come into use, the lowest address where it fits.

    It equals an allocator that knows nothing of the future. Blocks that begin together are taken in their given order.
    """
    blocks = problem.blocks
    return lay_out_in_order(problem, sorted(range(len(blocks)), key=lambda place: blocks[place].lower), tightest=False)
