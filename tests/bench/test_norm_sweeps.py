"""bench.norm_sweeps on a small tensor: every sweep is timed with our kernels and without, and they are put back."""

from __future__ import annotations

import itertools
import os

import torch

from bench.norm_sweeps import measure, table
from shoal.lowlevel.dispatch import VARIABLE


def test_every_sweep_is_timed_both_ways() -> None:
    x = torch.randn((2, 3, 4, 5), generator=torch.Generator().manual_seed(0))
    before = os.environ.get(VARIABLE, "")
    ticks = itertools.count()
    rows = measure(x.contiguous(memory_format=torch.channels_last), rounds=2, clock=lambda: float(next(ticks)))
    assert os.environ.get(VARIABLE, "") == before
    assert [row.sweep for row in rows][:2] == ["statistics", "statistics backward"] and len(rows) == 10
    assert {(row.ours_seconds, row.torch_seconds, row.tensor_bytes) for row in rows} == {(1.0, 1.0, 480)}
    assert table(rows).row_count == 10
    some = measure(x, 1, lambda: float(next(ticks)), "inverted ELU")
    assert [row.sweep for row in some] == ["inverted ELU", "inverted ELU backward"]
