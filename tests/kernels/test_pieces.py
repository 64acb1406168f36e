"""Whether another form of an op has the bits of the whole is found out on arguments like those that are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.kernels.pieces import described, drawn, repeats_bits

CPU = torch.device("cpu")


def whole(x: torch.Tensor, dims: list[int], y: None) -> tuple[torch.Tensor, None]:
    assert y is None
    return x.sum(dims), None


def other(x: torch.Tensor, dims: list[int], y: None, off: float) -> tuple[torch.Tensor, None]:
    return x.sum(dims) + off, None


def out_of_memory(*_: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError


def test_arguments_are_drawn_as_they_are_described() -> None:
    x = torch.empty(3, 5, 4, 2).contiguous(memory_format=torch.channels_last)[:, 1:]
    key = described([x, [1, (2,)], None, torch.empty(0, dtype=torch.bfloat16)])
    assert len({key, described([x + 1.0, [1, (2,)], None, torch.ones(0, dtype=torch.bfloat16)])}) == 2  # + is dense
    one, again = (drawn(key, CPU) for _ in range(2))
    assert one[0].shape == x.shape and one[0].stride() == x.stride() and torch.equal(one[0], again[0])
    assert one[1:3] == [[1, [2]], None] and one[3].numel() == 0 and one[3].dtype == torch.bfloat16


def test_bits_are_compared_on_real_tensors_also_within_a_trace() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4)
        assert repeats_bits(whole, other, [x, [1], None], 0.0)
        assert not repeats_bits(whole, other, [x, [1], None], 1e-3)
        assert not repeats_bits(whole, out_of_memory, [x, [1], None])


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_found_is_kept_for_a_number_of_threads(threads: int) -> None:
    calls = []

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return arguments[0].sum()

    before = torch.get_num_threads()
    try:
        for count in (threads, threads, threads + 1):
            torch.set_num_threads(count)
            assert repeats_bits(counted, counted, [torch.ones(2)])
    finally:
        torch.set_num_threads(before)
    assert len(calls) == 4
