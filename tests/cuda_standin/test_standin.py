"""The stand-in answers as a device does: memory runs out, what is taken is counted, and contents are small only."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from tests.cuda_standin.counts import device_counts, record_all, recorded

MIB = 2**20


def test_the_allocator_takes_what_it_says_it_reserves() -> None:
    torch.cuda.empty_cache()
    before_bytes, reserved_bytes = device_counts().used_bytes, torch.cuda.memory_reserved()
    tensor = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert device_counts().used_bytes - before_bytes == torch.cuda.memory_reserved() - reserved_bytes == 100 * MIB
    del tensor
    torch.cuda.empty_cache()
    assert device_counts().used_bytes == before_bytes


def test_memory_runs_out() -> None:
    gc.collect()  # what other tests left
    torch.cuda.empty_cache()
    left_bytes, device_bytes = torch.cuda.mem_get_info()
    held = torch.empty(left_bytes // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):  # however much the allocator finds to give back before it raises
        torch.empty(device_bytes - held.nbytes + MIB, dtype=torch.uint8, device="cuda")


def test_what_is_copied_there_comes_back_and_kernels_do_nothing() -> None:
    there = torch.arange(100).cuda()
    assert torch.equal(there.cpu(), torch.arange(100))
    launches = device_counts().launches
    assert not torch.equal((there + 1).cpu(), torch.arange(1, 101))
    assert device_counts().launches == launches + 1


def test_a_record_replays_to_the_allocators_peak() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 10)).cuda()
    torch.cuda.reset_peak_memory_stats()
    record_all()
    try:
        with recorded() as record:
            model(torch.empty(16, 3, 32, 32, device="cuda")).sum().backward()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert record.peak_bytes == torch.cuda.max_memory_allocated() > record.before_bytes
