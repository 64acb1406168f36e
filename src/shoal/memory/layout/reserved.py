"""What PyTorch's caching allocator reserves of a CUDA device for a planned step, before any of it has run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.schedule import Run
from shoal.core.simulate import dropped_bytes
from shoal.core.step import StepGraph
from shoal.memory.layout.caching_allocator import AddressRange, CachingAllocator, LimitReached


@dataclass(frozen=True)
class Reserved:
    """What a step reserves.

    Attributes:
        reserved_bytes: most of the device that the allocator holds, what was there before included.
        short_bytes: what the step lacks where it passes the limit; else 0.
    """

    reserved_bytes: int
    short_bytes: int = 0


def reserved(
    graph: StepGraph,
    runs: Iterable[Run],
    segments: Iterable[Mapping[str, Any]],
    *,
    limit_bytes: int | None = None,
    state: Sequence[int] = (),
    scratch: Sequence[int] = (),
) -> Reserved:
    """Follow the allocator through three steps: with what the optimizer's first one leaves, and again.

    Args:
        graph: the step.
        runs: its schedule.
        segments: of the allocator, once all persistent memory is allocated; see `CachingAllocator.of_snapshot`.
        limit_bytes: that the allocator may reserve: it gives cached blocks back before it passes them.
        state: the blocks that the optimizer's first step allocates for good.
        scratch: those that each of its steps allocates and frees.
    """
    allocator = CachingAllocator.of_snapshot(segments)
    allocator.limit_bytes = limit_bytes
    allocator.trim()
    runs = list(runs)
    try:
        for step in range(3):
            left = _run(allocator, graph, runs)
            standing = [allocator.allocate(nbytes) for nbytes in (state if step == 0 else ())]
            del standing
            for block in [allocator.allocate(nbytes) for nbytes in scratch]:
                allocator.release(block)
            for block in left:
                allocator.release(block)
    except LimitReached as error:
        return Reserved(allocator.peak_reserved_bytes, error.short_bytes)
    return Reserved(allocator.peak_reserved_bytes)


def _run(allocator: CachingAllocator, graph: StepGraph, runs: Iterable[Run]) -> list[AddressRange]:
    """One forward and backward pass; what is in use when it ends."""
    storages = graph.storages
    blocks: dict[int, AddressRange] = {}

    def begin(storage: int) -> None:
        if storage not in blocks and storages[storage].nbytes:
            blocks[storage] = allocator.allocate(storages[storage].nbytes)

    def end(storage: int) -> None:
        if (block := blocks.pop(storage, None)) is not None:
            allocator.release(block)

    for run in runs:
        op = run.of(graph)
        for storage in run.fetches:
            begin(storage)
        writes = run.writes
        if run.takes_over in blocks:
            blocks[writes[0]] = blocks.pop(run.takes_over)
        for storage in writes:
            begin(storage)
        passing = [dropped_bytes(graph, run, op), op.workspace_bytes]
        for block in [allocator.allocate(nbytes) for nbytes in passing if nbytes]:
            allocator.release(block)
        for storage in (*run.frees, *run.releases):
            end(storage)
    return list(blocks.values())
