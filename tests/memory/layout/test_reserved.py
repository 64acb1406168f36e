"""What the allocator reserves for a planned step, by its model: of steps whose blocks can be counted by hand."""

from __future__ import annotations

from shoal.core.schedule import schedule
from shoal.core.step import Op, StepGraph, Storage, StorageKind
from shoal.memory.layout.reserved import reserved

MIB = 1 << 20


def storage(number: int, mib: int, kind: StorageKind) -> Storage:
    return Storage(number, f"s{number}", mib * MIB, kind, "", (mib * MIB,), "uint8", (f"s{number}",))


STEP = StepGraph(
    "m",
    (
        Op(0, "f0", "a", "forward", "", (0,), (1,), workspace_bytes=20 * MIB),
        Op(1, "f1", "a", "forward", "", (1,), (2,)),
        Op(2, "loss", "loss", "loss", "", (2,), (3,)),
        Op(3, "b1", "a", "backward", "", (1, 3), (4,)),
        Op(4, "b0", "a", "backward", "", (0, 4), (5,)),
    ),
    (
        storage(0, 40, "input"),
        storage(1, 60, "activation"),
        storage(2, 20, "activation"),
        storage(3, 20, "activation_gradient"),
        storage(4, 60, "activation_gradient"),
        storage(5, 40, "gradient"),
    ),
)
RUNS = schedule(STEP, {})
BLOCKS = [{"address": 0, "size": 40 * MIB, "state": "active_allocated"}]
SEGMENTS = [{"address": 0, "total_size": 40 * MIB, "segment_type": "large", "is_expandable": True, "blocks": BLOCKS}]


def test_a_hole_that_is_too_small_is_reserved_beside_the_peak() -> None:
    in_use, hole = 40 + 60 + 20 + 60, 20  # of the first result, which the loss has read, before its gradient
    assert reserved(STEP, RUNS, SEGMENTS).reserved_bytes == (in_use + hole) * MIB


def test_blocks_of_the_optimizer_stay_from_its_first_step_on() -> None:
    with_state = reserved(STEP, RUNS, SEGMENTS, state=[40 * MIB])
    assert with_state.reserved_bytes == reserved(STEP, RUNS, SEGMENTS).reserved_bytes + 40 * MIB
    assert reserved(STEP, RUNS, SEGMENTS, scratch=[300 * MIB]).reserved_bytes >= (40 + 40 + 300) * MIB


def test_in_a_limit_cached_pages_are_given_back_and_what_is_missing_is_told() -> None:
    free = reserved(STEP, RUNS, SEGMENTS, scratch=[100 * MIB])
    least_bytes = next(n * MIB for n in range(400) if not _short(n))
    assert _short(least_bytes // MIB - 1) > 0
    assert 180 * MIB <= least_bytes < free.reserved_bytes
    assert reserved(STEP, RUNS, SEGMENTS, limit_bytes=least_bytes, scratch=[100 * MIB]).reserved_bytes <= least_bytes


def _short(mib: int) -> int:
    return reserved(STEP, RUNS, SEGMENTS, limit_bytes=mib * MIB, scratch=[100 * MIB]).short_bytes
