"""A sum over what a mask selects has PyTorch's bits, and takes as many bytes whatever the mask selects."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.masked_sum import indexed_sum, masked_sum
from shoal.lowlevel import allocations


def masks(shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.rand(shape) < share for share in (0.0, 0.1, 0.5, 1.0)]


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5, 6)])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_has_the_bits_of_selecting_and_summing(shape: tuple[int, ...], axes: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    for mask in masks(shape[:axes]):
        assert torch.equal(masked_sum(x, mask, [0]), x[mask].sum([0]))
        assert torch.equal(masked_sum(x, mask, [0], keepdim=True), x[mask].sum([0], keepdim=True))
        assert torch.equal(masked_sum(x, mask, None), x[mask].sum())


@pytest.mark.parametrize("shape", [(64,), (64, 8)])
def test_every_mask_takes_as_many_bytes(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, 16)
    peaks = {allocations.peak_bytes(allocations.record(lambda m=m: masked_sum(x, m, [0]))[1]) for m in masks(shape)}
    assert len(peaks) == 1


@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((7,), 0), ((7, 6), -1), ((5, 7, 6), 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_sum_over_an_index_counts_each_place_once(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    g = torch.randn(shape).to(dtype)
    for index in ([0, 0, 0], *(([], [5, 2, 5, 0]) if shape else ())):
        value = torch.zeros((), dtype=dtype, requires_grad=True)
        places = torch.tensor(index, dtype=torch.int64)
        torch.zeros(shape, dtype=dtype).index_fill(dim, places, value).backward(g)
        assert torch.equal(indexed_sum(g, dim, places), value.grad)


def test_every_index_of_a_size_takes_as_many_bytes() -> None:
    x, indices = torch.randn(4, 64, 16), [torch.zeros(32, dtype=torch.int64), torch.arange(32)]
    peaks = {allocations.peak_bytes(allocations.record(lambda i=i: indexed_sum(x, 1, i))[1]) for i in indices}
    assert max(peaks) <= min(peaks) + 1024
