"""The gradient of a convolution's input needs no input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.kernels.convolution import _turned, _unread, input_gradient
from shoal.lowlevel import allocations

aten = torch.ops.aten


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any]]:
    """Gradient, input, weight and options of a random convolution."""
    dims = draw(st.sampled_from([1, 2, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    n_in, n_out = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    per_axis = lambda least, most: draw(st.lists(st.integers(least, most), min_size=dims, max_size=dims))  # noqa: E731
    kernel, stride, padding, dilation = per_axis(1, 3), per_axis(1, 2), per_axis(0, 1), per_axis(1, 2)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    x = torch.randn(draw(st.integers(1, 2)), n_in, *per_axis(3, 8), generator=generator).to(dtype)
    first, second = (n_in, n_out) if transposed else (n_out, n_in)
    weight = torch.randn(first, second // groups, *kernel, generator=generator).to(dtype)
    if dims > 1 and draw(st.booleans()):
        layout = torch.channels_last if dims == 2 else torch.channels_last_3d
        x, weight = x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    options = [stride, padding, dilation, transposed, [0] * dims, groups]
    try:
        result = aten.convolution(x, weight, None, *options)
    except RuntimeError:  # the kernel is larger than the image
        assume(False)
    return torch.empty_like(result).copy_(torch.randn(result.shape, generator=generator)), x, weight, options


@given(convolutions())
def test_the_gradient_is_the_one_that_pytorch_gives_with_the_input(
    convolution: tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any]],
) -> None:
    grad, x, weight, options = convolution
    expected, _, _ = aten.convolution_backward(grad, x, weight, None, *options, [True, False, False])
    found = input_gradient(grad, weight, list(x.shape), list(x.stride()), *options)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@given(convolutions())
def test_the_convolution_the_other_way_is_the_gradient(
    convolution: tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any]],
) -> None:
    """What CUDA is asked for."""
    grad, x, weight, options = convolution
    stride, padding, dilation, transposed, _, groups = options
    turned = _turned(
        *(tuple(each) for each in (x.shape, weight.shape, grad.shape, stride, padding, dilation)), transposed
    )
    assert turned is not None
    found = aten.convolution(grad, weight, None, stride, padding, dilation, not transposed, turned, groups)
    assert found.shape == x.shape
    exact, plain = (
        aten.convolution_backward(*(each.to(kind) for each in (grad, x, weight)), None, *options, [True, False, False])[
            0
        ]
        for kind in (torch.float64, grad.dtype)
    )
    tolerance = 8 * torch.finfo(grad.dtype).eps * max(1.0, float(exact.abs().max()))
    assert (found - exact).abs().max() <= (plain - exact).abs().max() + tolerance


def test_an_output_padding_that_no_other_way_has_is_left_to_pytorch() -> None:
    # A transposed convolution of 3 pixels whose output padding, 2, is not below its stride, 1, but its dilation, 3.
    assert _turned((1, 1, 3), (1, 1, 2), (1, 1, 8), (1,), (0,), (3,), True) is None


@given(convolutions())
def test_it_allocates_what_pytorch_allocates_and_not_the_input(
    convolution: tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any]],
) -> None:
    grad, x, weight, options = convolution
    _unread.cache_clear()
    _, ours = allocations.record(lambda: input_gradient(grad, weight, list(x.shape), list(x.stride()), *options))
    _, theirs = allocations.record(
        lambda: aten.convolution_backward(grad, x, weight, None, *options, [True, False, False])
    )
    assert allocations.peak_bytes(ours) == allocations.peak_bytes(theirs)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_stands_in_for_the_input_has_its_shape_and_layout_and_no_memory(layout: torch.memory_format) -> None:
    shape = (64, 64, 512, 512)  # 4 GiB
    stride = torch.empty(shape, device="meta", memory_format=layout).stride()
    stand_in, changes = allocations.record(lambda: _unread(shape, stride, torch.float32))
    assert (stand_in.shape, stand_in.stride(), changes) == (shape, stride, [])
    assert float(stand_in[63, 63, 511, 511]) == 0
    _unread.cache_clear()


@pytest.mark.parametrize("shape", [(0, 4, 4, 4), (0, 64, 224, 224), (2, 3, 0, 5), (0, 1, 1, 1)])
def test_an_empty_batch_has_a_stand_in_and_a_gradient_too(shape: tuple[int, ...]) -> None:
    stride = torch.empty(shape, device="meta").stride()
    assert _unread(shape, stride, torch.float32).shape == shape
    if shape[0] == 0:
        weight = torch.randn(2, shape[1], 1, 1)
        grad = torch.empty(0, 2, *shape[2:])
        options = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
        assert input_gradient(grad, weight, list(shape), list(stride), *options).shape == shape
