"""One pass of a step as tasks over blocks of memory, free of the order in which its runs were given.

A task is a run of the schedule. A block is one instance of a storage: what is computed again gets a block of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from shoal.core.schedule import Run
from shoal.core.simulate import dropped_bytes
from shoal.core.step import StepGraph


@dataclass
class TaskBlock:
    """Bytes that are in use from their producer to their last reader.

    Attributes:
        nbytes: how many.
        producer: the task that writes it; -1 where it is alive when the pass begins.
        readers: the tasks that read it.
        stays: it is still in use when the pass ends.
    """

    nbytes: int
    producer: int = -1
    readers: list[int] = field(default_factory=list)
    stays: bool = True


@dataclass(frozen=True)
class PassTasks:
    """The tasks 0, 1, 2, and so on of one pass, in the order in which they were given.

    Attributes:
        blocks: of memory.
        reads, writes: task → blocks.
        after: task → tasks that must have run before it.
        scratch_bytes: task → what it holds besides while it runs.
        overwrites: task → the block that its first result takes over if no other task needs it any more; -1 for none.
        resident_bytes: in use whatever the order.
    """

    blocks: list[TaskBlock]
    reads: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    after: list[set[int]]
    scratch_bytes: list[int]
    overwrites: list[int]
    resident_bytes: int

    def __len__(self) -> int:
        return len(self.reads)

    @cached_property
    def n_readers(self) -> list[int]:
        """Block → how many tasks read it."""
        return [len(block.readers) for block in self.blocks]

    @cached_property
    def freed_bytes(self) -> list[int]:
        """Block → what its last reader frees."""
        return [0 if block.stays else block.nbytes for block in self.blocks]

    @cached_property
    def written_bytes(self) -> list[int]:
        """Task → bytes of the blocks that begin with it."""
        return [sum(self.blocks[block].nbytes for block in writes) for writes in self.writes]

    @cached_property
    def bytes_at_first(self) -> int:
        """In use when the pass begins."""
        return self.resident_bytes + sum(block.nbytes for block in self.blocks if block.producer < 0)


def pass_tasks(graph: StepGraph, runs: Sequence[Run], begin: int, end: int) -> PassTasks:
    """The tasks of `runs[begin:end]`, all of one pass of a schedule that offloads nothing."""
    tasks = PassTasks([], [], [], [], [], [], graph.resident_bytes)
    of_storage: dict[int, int] = {}  # storage → the block that its readers find
    for run in runs[:begin]:
        of_storage.update(dict.fromkeys(run.writes, -1))
        for storage in run.frees:
            of_storage.pop(storage, None)
    for storage in of_storage:
        of_storage[storage] = len(tasks.blocks)
        tasks.blocks.append(TaskBlock(graph.storages[storage].nbytes))
    in_forward = begin < graph.n_forward
    held = set() if in_forward else {b for s, b in of_storage.items() if graph.producer[s] < graph.n_forward}
    for place, run in enumerate(runs[begin:end]):
        _add(tasks, graph, run, place, of_storage, held)
    _keep_places(tasks, graph, runs[begin:end], in_forward)
    return tasks


def _add(tasks: PassTasks, graph: StepGraph, run: Run, place: int, of_storage: dict[int, int], held: set[int]) -> None:
    op, blocks = run.of(graph), tasks.blocks
    reads = tuple(of_storage[s] for s in op.reads if s in of_storage)
    after = {blocks[block].producer for block in reads} - {-1}
    for block in reads:
        blocks[block].readers.append(place)
    target = of_storage.get(op.overwrites, -1)
    if target in held or op.overwrites < 0 or op.overwrites in graph.never_freed:
        target = -1  # the caller's, or autograd's saved tensor
    tasks.overwrites.append(target if op.writes and op.writes[0] in run.writes else -1)
    writes = []
    for storage in run.writes:
        if storage in of_storage:  # every read takes the latest instance: who reads the one before comes first
            old = blocks[of_storage[storage]]
            after.update({*old.readers, old.producer} - {-1, place})
        of_storage[storage] = len(blocks)
        writes.append(len(blocks))
        blocks.append(TaskBlock(graph.storages[storage].nbytes, place))
    for storage in run.frees:
        blocks[of_storage[storage]].stays = False
    tasks.reads.append(reads)
    tasks.writes.append(tuple(writes))
    tasks.after.append(after)
    tasks.scratch_bytes.append(op.workspace_bytes + dropped_bytes(graph, run, op))


def _keep_places(tasks: PassTasks, graph: StepGraph, runs: Sequence[Run], in_forward: bool) -> None:
    """Order that is not told by what ops read: random numbers, communication, what stands for things outside."""
    firsts = [(place, graph.ops[run.op]) for place, run in enumerate(runs) if not run.again]
    acting = [place for place, op in firsts if op.random or not op.writes or "c10d" in op.target]
    for one, other in pairwise(acting):
        tasks.after[other].add(one)
    # What a loop holds through the forward pass is counted up to its last op.
    fixed = [place for place, op in firsts if op.is_outside or (in_forward and place == firsts[-1][0])]
    for before, place in pairwise([0, *fixed]):
        tasks.after[place].update(range(before, place))
    for place, end in pairwise([*fixed, len(tasks)]):
        for later in range(place + 1, end):
            tasks.after[later].add(place)


def bytes_during(tasks: PassTasks, order: Sequence[int]) -> list[int]:
    """The bytes in use during each task, in the order in which they run."""
    written_bytes, in_use = tasks.written_bytes, tasks.bytes_at_first
    freed_bytes, left = tasks.freed_bytes, tasks.n_readers.copy()
    found = []
    for task in order:  # called often: no more of Python than needed
        reads, target = tasks.reads[task], tasks.overwrites[task]
        in_use += written_bytes[task]
        for block in reads:
            left[block] -= 1
        taken_over_bytes = freed_bytes[target] if target >= 0 and not left[target] else 0
        found.append(in_use + tasks.scratch_bytes[task] - taken_over_bytes)
        for block in reads:
            if not left[block]:
                in_use -= freed_bytes[block]
        for block in tasks.writes[task]:
            if not left[block]:
                in_use -= freed_bytes[block]
    return found


def least_peak(tasks: PassTasks) -> int:
    """What no order has a lower peak than: each task's own blocks, and what is in use when the pass begins and ends."""
    blocks = tasks.blocks
    always = {index for index, block in enumerate(blocks) if block.producer < 0 and block.stays}
    always_bytes = tasks.resident_bytes + sum(blocks[index].nbytes for index in always)
    highest = tasks.resident_bytes + sum(block.nbytes for block in blocks if block.stays)
    for task, (reads, writes) in enumerate(zip(tasks.reads, tasks.writes, strict=True)):
        own = {*reads, *writes} - always - {tasks.overwrites[task]}
        own_bytes = tasks.scratch_bytes[task] + sum(blocks[index].nbytes for index in own)
        highest = max(highest, always_bytes + own_bytes)
    return max(highest, tasks.bytes_at_first)
