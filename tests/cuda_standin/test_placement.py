"""The allocator does what its model says, block by block; a step whose blocks are placed reserves what was planned."""

from __future__ import annotations

import subprocess
import sys

from tests.cuda_standin.training import Case, trained

COMPARE = """
import os
from random import Random
import torch
from shoal.lowlevel.cuda_allocator import segments, set_expandable_segments
from shoal.memory.layout.caching_allocator import CachingAllocator

random, live, cuda = Random(1), [], torch.device("cuda", 0)

def change():
    "Release one tensor or make one; its bytes, or 0, and where it lies."
    if live and random.random() < 0.5:
        return 0, live.pop(random.randrange(len(live))).data_ptr()
    nbytes = random.choice([random.randrange(1, 1 << 20), random.randrange(1 << 20, 1 << 26), *sizes])
    live.append(torch.empty(nbytes, dtype=torch.uint8, device=cuda))
    return nbytes, live[-1].data_ptr()

set_expandable_segments()
sizes = [1 << 24, 49 << 20, 3 << 20, 3 << 20]
lowest = [torch.empty(nbytes, dtype=torch.uint8, device=cuda) for nbytes in (1 << 29, 1 << 20, 1 << 20, 1 << 20)]
for _ in range(200):
    change()
torch.cuda.empty_cache()
model, n_same = CachingAllocator.of_snapshot(segments(cuda)), 0
for _ in range(1500):
    nbytes, address = change()
    if nbytes:
        n_same += model.allocate(nbytes).address == address
        assert n_same, "from the first on"
    else:
        model.release(model.block_at(address))
        n_same += 1
    assert model.reserved_bytes == torch.cuda.memory_reserved(), n_same
    assert model.allocated_bytes == torch.cuda.memory_allocated(), n_same
print(n_same, flush=True)
os._exit(0)
"""


def test_the_model_of_the_allocator_puts_each_block_where_the_allocator_does() -> None:
    ran = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "1500", ran.stderr


def test_a_placed_step_reserves_what_was_planned_and_takes_no_more_launches() -> None:
    case = Case("resnet18", share=0.65, optimizer="adamw", amp="bf16", steps=5)
    run = trained(case)
    unplaced, _, *placed = run.steps[1:]
    assert unplaced.reserved_bytes > 1.1 * unplaced.counted_bytes
    for step in placed:
        assert step.reserved_bytes < 1.06 * step.counted_bytes
        assert step.counted_bytes == unplaced.counted_bytes
        assert (step.launches, step.synchronizations) == (unplaced.launches, 0)
