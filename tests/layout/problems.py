"""Random layout problems, and the smallest arena of small ones by brute force."""

from __future__ import annotations

from itertools import permutations

from hypothesis import strategies as st

from shoal.layout.problem import Block, Problem


@st.composite
def problems(draw: st.DrawFn, most_blocks: int = 12, most_bytes: int = 9) -> Problem:
    """Blocks within 12 moments, sizes from 0 up."""
    blocks = []
    for name in range(draw(st.integers(0, most_blocks))):
        lower = draw(st.integers(-3, 8))
        blocks.append(Block(f"b{name}", lower, lower + draw(st.integers(1, 6)), draw(st.integers(0, most_bytes))))
    return Problem(tuple(blocks))


def smallest_arena_bytes(problem: Problem) -> int:
    """Over all orders of stacking: in the best layout each block lies on the floor or on another that shares a time."""
    best = sum(block.size_bytes for block in problem.blocks)
    for order in permutations(problem.blocks):
        top: list[tuple[Block, int]] = []
        for block in order:
            below = (end for other, end in top if other.lower < block.upper and block.lower < other.upper)
            top.append((block, max(below, default=0) + block.size_bytes))
        best = min(best, max((end for _, end in top), default=0))
    return best
