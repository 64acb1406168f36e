"""Random layout problems, and by brute force whether small ones fit and how small their arena can be."""

from __future__ import annotations

from itertools import permutations

from hypothesis import strategies as st

from shoal.memory.layout.problem import Block, Problem


@st.composite
def problems(draw: st.DrawFn, most_blocks: int = 12, most_bytes: int = 9) -> Problem:
    """Blocks within 12 moments, sizes from 0 up."""
    blocks = []
    for name in range(draw(st.integers(0, most_blocks))):
        lower = draw(st.integers(-3, 8))
        blocks.append(Block(f"b{name}", lower, lower + draw(st.integers(1, 6)), draw(st.integers(0, most_bytes))))
    return Problem(tuple(blocks))


@st.composite
def crowded_problems(draw: st.DrawFn, most_blocks: int = 6, moments: int = 6) -> Problem:
    """Few bytes and few moments, most of them full: some have no layout as small as their highest live bytes."""
    blocks = []
    for name in range(draw(st.integers(2, most_blocks))):
        lower = draw(st.integers(0, moments - 2))
        blocks.append(Block(f"b{name}", lower, draw(st.integers(lower + 1, moments)), draw(st.integers(1, 4))))
    highest = Problem(tuple(blocks)).highest_live_bytes
    for time in draw(st.sets(st.integers(0, moments - 1))):
        free = highest - sum(block.size_bytes for block in blocks if block.lower <= time < block.upper)
        if free:
            blocks.append(Block(f"t{time}", time, time + 1, free))
    return Problem(tuple(draw(st.permutations(blocks))))


def fits(problem: Problem, capacity_bytes: int) -> bool:
    """Whether there is a layout: every block is tried at every offset."""
    blocks = sorted(problem.blocks, key=lambda block: block.lower)

    def place(offsets: tuple[int, ...]) -> bool:
        if len(offsets) == len(blocks):
            return True
        block = blocks[len(offsets)]
        beside = [(b, at) for b, at in zip(blocks, offsets, strict=False) if block.lower < b.upper]
        return any(
            all(offset + block.size_bytes <= at or at + b.size_bytes <= offset for b, at in beside)
            and place((*offsets, offset))
            for offset in range(capacity_bytes - block.size_bytes + 1)
        )

    return place(())


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
