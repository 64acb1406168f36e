"""A norm and its activation in one sweep: the bits of the two one after the other, in fewer bytes on the way."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shoal.kernels import norm_again, pieces
from shoal.kernels.norm_again import activated
from shoal.kernels.norm_again import activated_repeats_bits as repeats_bits

CPU = torch.device("cpu")
LARGE = (70, 47, 41)  # more than one piece a row
SHAPES = [(2, 6, 5, 7, 3), (2, 4, *LARGE), (1, 3, 300, 500), (3, 2, 70_001), (2, 40, 9, 11)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slope", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("affine", [True, False])
def test_it_has_the_bits_of_batch_norm_and_activation(shape: tuple[int, ...], slope: float, affine: bool) -> None:
    x = torch.randn(shape) * 3 + 1
    weight, bias = (torch.randn(shape[1]) for _ in range(2)) if affine else (None, None)
    z, mean, invstd = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
    expected = F.leaky_relu(z, slope) if slope else z.relu()
    assert torch.equal(activated(x, weight, bias, mean, invstd, slope, list(shape)), expected)
    assert repeats_bits(torch.float32, CPU, x.dim(), False, slope, torch.float32 if affine else None)


@pytest.mark.parametrize("shape", [(2, 6, 5, 7, 3), (2, 4, *LARGE), (3, 2, 300, 500)])
@pytest.mark.parametrize("slope", [0.0, 0.01])
def test_it_has_the_bits_of_group_norm_and_activation(shape: tuple[int, ...], slope: float) -> None:
    x, weight, bias = torch.randn(shape) * 3 + 1, torch.randn(shape[1]), torch.randn(shape[1])
    pixels = x.shape[2:].numel()
    z, mean, invstd = torch.ops.aten.native_group_norm(x, weight, bias, *shape[:2], pixels, 2, 1e-5)
    expected = F.leaky_relu(z, slope) if slope else z.relu()
    assert torch.equal(activated(x, weight, bias, mean, invstd, slope, list(shape)), expected)
    assert repeats_bits(torch.float32, CPU, x.dim(), True, slope, torch.float32)


def test_the_result_has_the_shape_that_is_asked_for_and_nan_stays() -> None:
    x = torch.randn(1, 6, 4, 4, 4)
    x[0, 1, 0, 0, 0] = torch.nan
    one = torch.ones(6)
    y = activated(x, None, None, 0 * one, one, 0.0, [2, 3, 4, 4, 4])
    assert y.shape == (2, 3, 4, 4, 4) and y.isnan().sum() == 1 and (y[~y.isnan()] >= 0).all()


def test_no_second_tensor_of_its_size_is_made() -> None:
    x, one = torch.randn(1, 4, *LARGE), torch.ones(4)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        activated(x, one, one, one, one, 0.01, list(x.shape))
    allocated = [event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0]
    assert max(allocated) == x.nbytes and sum(nbytes >= x.nbytes // 8 for nbytes in allocated) <= 2  # op and its caller


def test_bits_that_do_not_repeat_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces._repeats_bits.cache_clear()
    try:
        tiles = norm_again.tiles
        off = lambda some, into, scale, shift: (some, into, scale * (1 + 1e-6), shift)  # noqa: E731
        monkeypatch.setattr(norm_again, "tiles", lambda *args: (off(*tile) for tile in tiles(*args)))
        assert not repeats_bits(torch.float32, CPU, 5, False, 0.01, None)
    finally:
        pieces._repeats_bits.cache_clear()
