"""Group norm's gradient in pieces is the whole one, over the incoming gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.kernels import group_norm_pieces
from shoal.kernels.pieces import Cut

WHOLE = torch.ops.aten.native_group_norm_backward.default


def arguments(
    *shape: int, groups: int, dtype: torch.dtype = torch.float32, wanted: tuple[bool, ...] = (True,) * 3
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    grad, x = torch.randn(shape, dtype=dtype), 3 * torch.randn(shape, dtype=dtype) + 1
    weight = torch.rand(shape[1], dtype=dtype) + 0.5
    sizes = *shape[:2], x[0, 0].numel(), groups
    _, mean, invstd = torch.ops.aten.native_group_norm(x, weight, weight, *sizes, 1e-5)
    return grad, x, mean, invstd, weight, *sizes, list(wanted)


@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_pieces_have_the_bits_of_the_whole_and_only_the_second_form_writes(groups: int, pieces: int) -> None:
    call = arguments(2, 12, 5, 4, 3, groups=groups)
    expected, before = WHOLE(*call), call[0].clone()
    found = group_norm_pieces.backward(*call, 1, pieces)
    assert torch.equal(call[0], before)
    assert all(map(torch.equal, found, expected))
    over = group_norm_pieces.backward_(*call, 1, pieces)
    assert over[0] is call[0] and all(map(torch.equal, over, expected))


def test_the_gradient_is_that_in_float64() -> None:
    call = arguments(2, 8, 6, 5, groups=4, dtype=torch.float64)
    found = group_norm_pieces.backward(*call, 1, 4)
    x, weight, bias = call[1].requires_grad_(), call[4].clone().requires_grad_(), torch.zeros(8).double()
    torch.nn.functional.group_norm(x, 4, weight, bias.requires_grad_()).backward(call[0])
    for ours, theirs in zip(found, (x.grad, weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_elsewhere_large_contiguous_maps_are_cut_by_their_groups() -> None:
    call = arguments(1, 16, 32, 32, 64, groups=8)
    nbytes = call[0].nbytes
    assert nbytes == 4 << 20
    assert group_norm_pieces.cut_elsewhere(WHOLE, call) == Cut(1, 8, nbytes - nbytes // 8)
    assert group_norm_pieces.choose(WHOLE, call) is None  # this is no GPU
    grad, x, *rest = call
    not_cut = {
        "small": arguments(1, 16, 32, 32, 8, groups=8),
        "one group of one sample": arguments(1, 16, 32, 32, 64, groups=1),
        "without a weight": (grad, x, *rest[:2], None, *rest[3:]),
        "one gradient only": (*call[:-1], [True, False, False]),
        "channels_last_3d": (grad.contiguous(memory_format=torch.channels_last_3d), *call[1:]),
    }
    for name, other in not_cut.items():
        assert group_norm_pieces.cut_elsewhere(WHOLE, other) is None, name


def test_half_precision_with_float32_weights_is_cut_too_to_the_bits_of_the_whole() -> None:
    grad, x, _, _, weight, *sizes = arguments(1, 8, 64, 64, 64, groups=4)
    grad, x = grad.bfloat16(), x.bfloat16()
    _, mean, invstd = torch.ops.aten.native_group_norm(x, weight, weight, *sizes[:4], 1e-5)
    call = grad, x, mean, invstd, weight, *sizes
    assert group_norm_pieces.cut_elsewhere(WHOLE, call) == Cut(1, 4, x.nbytes - x.nbytes // 4)
    for ours, theirs in zip(group_norm_pieces.backward(*call, 1, 4), WHOLE(*call), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
