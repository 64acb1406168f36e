"""PReLU's gradients in pieces: the input's has the bits of the whole, the slope's is no further from float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.kernels import prelu
from shoal.kernels.pieces import Cut
from shoal.lowlevel import allocations

WHOLE = torch.ops.aten._prelu_kernel_backward.default


def arguments(
    *shape: int, slopes: int = 1, dtype: torch.dtype = torch.float32, layout: torch.memory_format | None = None
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x.view(-1)[::5] = 0.0
    if layout is not None:
        grad, x = (one.contiguous(memory_format=layout) for one in (grad, x))
    weight = torch.linspace(-0.5, 0.5, slopes).to(dtype).view(1, slopes, *[1] * (len(shape) - 2))
    return grad, x, weight, [dim for dim in range(len(shape)) if slopes == 1 or dim != 1], True


@pytest.mark.parametrize("slopes", [1, 6])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [1, 4, 7])
def test_pieces_are_the_whole_and_only_the_second_form_writes(
    slopes: int, layout: torch.memory_format, dtype: torch.dtype, pieces: int
) -> None:
    call = arguments(2, 6, 5, 9, 8, slopes=slopes, dtype=dtype, layout=layout)
    of_input, of_slope = prelu.backward(*call)
    exact = prelu.backward(*(one.double() if isinstance(one, torch.Tensor) else one for one in call))[1]
    before, dim = call[0].clone(), int(slopes > 1 and layout is torch.contiguous_format)
    found = prelu.in_pieces(*call, dim, pieces)
    assert torch.equal(call[0], before)
    over = prelu.in_pieces_(*call, dim, pieces)
    assert over[0] is call[0]
    for mine in (found, over):
        assert torch.equal(mine[0], of_input)
        assert (mine[1].shape, mine[1].dtype) == (of_slope.shape, of_slope.dtype)
        theirs_off, mine_off = ((one.double() - exact).abs().max() for one in (of_slope, mine[1]))
        assert mine_off <= theirs_off + torch.finfo(dtype).eps * exact.abs().max()


def test_operands_of_two_layouts_are_computed_as_a_whole() -> None:
    grad, *others = arguments(2, 6, 5, 9, 8, slopes=6)
    last = grad.contiguous(memory_format=torch.channels_last_3d)
    expected = prelu.backward(last, *others)
    assert all(map(torch.equal, prelu.in_pieces(last, *others, 1, 3), expected))


@pytest.mark.parametrize("slopes", [1, 6])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_gradient_that_is_some_channels_of_a_larger_one_is_cut_and_left_as_it_is(slopes: int, samples: int) -> None:
    grad, x, *others = arguments(samples, 6, 5, 9, 8, slopes=slopes)
    whole = torch.cat([torch.ones_like(grad), grad], 1)
    before, part = whole.clone(), whole[:, 6:]
    of_input, of_slope = prelu.in_pieces(part, x, *others, int(slopes > 1), 3)
    expected = prelu.backward(grad, x, *others)
    assert torch.equal(whole, before) and of_input.stride() == x.stride()
    assert torch.equal(of_input, expected[0])
    torch.testing.assert_close(of_slope, expected[1])


def test_two_eighths_of_a_tensor_are_held_beside_the_operands() -> None:
    call = arguments(1, 8, 32, 64, 64)
    _, changes = allocations.record(lambda: prelu.in_pieces_(*call, 0, 8))
    assert allocations.peak_bytes(changes) <= call[1].nbytes / 4 + 2048


def test_large_dense_ones_are_cut_by_elements_or_by_channels() -> None:
    one, many = arguments(1, 16, 32, 32, 64), arguments(1, 16, 32, 32, 64, slopes=16)
    nbytes = one[0].nbytes
    assert nbytes == 4 << 20
    assert prelu.choose(WHOLE, one[:3]) == Cut(0, 8, 2 * nbytes - nbytes // 4, reordered=True)
    assert prelu.choose(prelu.backward, many) == Cut(1, 8, nbytes - nbytes // 4, reordered=True)
    last = arguments(1, 16, 32, 32, 64, slopes=16, layout=torch.channels_last_3d)
    assert prelu.choose(WHOLE, last[:3]) == Cut(0, 8, 2 * nbytes - nbytes // 4, reordered=True)
    grad, x, weight, *_ = one
    part = torch.cat([grad, grad], 1)[:, 16:]  # is copied
    assert prelu.choose(WHOLE, (part, x, weight)) == Cut(0, 8, nbytes - nbytes // 4, reordered=True)
    not_cut = {
        "small": arguments(1, 16, 32, 32, 8),
        "two layouts": (grad.contiguous(memory_format=torch.channels_last_3d), x, weight),
        "two dtypes": (grad, x, weight.double()),
        "with gaps": (grad[..., ::2], x[..., ::2], weight),
    }
    for name, other in not_cut.items():
        assert prelu.choose(WHOLE, other[:3]) is None, name
