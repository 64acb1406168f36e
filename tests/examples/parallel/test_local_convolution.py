"""A local layer is a convolution whose kernel may differ from place to place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from examples.parallel.local_convolution import LocalConv2d
from examples.parallel.shares import shares
from shoal.errors import InputError
from tests.raising import raising


def _by_place(layer: LocalConv2d, x: torch.Tensor) -> torch.Tensor:
    """The definition: one product of a patch and a kernel for every value."""
    k, s = layer.kernel_size, layer.stride
    padded = F.pad(x, (layer.padding,) * 4)
    y = x.new_empty(len(x), layer.out_channels, *layer.out_size)
    for i in range(layer.out_size[0]):
        for j in range(layer.out_size[1]):
            patch = padded[:, :, i * s : i * s + k, j * s : j * s + k].flatten(1)
            y[:, :, i, j] = patch @ layer.weight[:, i, j].T
    return y if layer.bias is None else y + layer.bias


Shape = tuple[int, int, int, int, int, bool]
# Height, width, kernel, stride, padding, bias: also kernels that lie in the padding alone, or step over rows.
SHAPES = st.tuples(
    st.integers(1, 7), st.integers(1, 7), st.integers(1, 3), st.integers(1, 4), st.integers(0, 4), st.booleans()
).filter(lambda shape: min(shape[:2]) + 2 * shape[4] >= shape[2])


def _layer(shape: Shape) -> LocalConv2d:
    height, width, kernel, stride, padding, bias = shape
    layer = LocalConv2d(2, 3, (height, width), kernel, stride=stride, padding=padding, bias=bias)
    return layer.double()


@settings(max_examples=30)
@given(SHAPES)
def test_each_value_is_its_own_kernel_on_its_patch(shape: Shape) -> None:
    layer = _layer(shape)
    x = torch.randn(2, 2, *layer.size, dtype=torch.float64)

    torch.testing.assert_close(layer(x), _by_place(layer, x))


@settings(max_examples=30)
@given(SHAPES)
def test_equal_kernels_make_a_convolution(shape: Shape) -> None:
    layer = _layer(shape)
    kernel = torch.randn(3, 2 * layer.kernel_size**2, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(kernel[:, None, None].expand_as(layer.weight))
        if layer.bias is not None:
            layer.bias.zero_()
    x = torch.randn(2, 2, *layer.size, dtype=torch.float64)

    as_convolution = kernel.view(3, 2, layer.kernel_size, layer.kernel_size)
    torch.testing.assert_close(layer(x), F.conv2d(x, as_convolution, None, layer.stride, layer.padding))


@settings(max_examples=60)
@example((3, 3, 1, 1, 1, True), 3)  # the last band is one row of padding
@example((3, 3, 1, 1, 2, True), 4)  # and so is the first; the last two lie wholly below
@example((2, 3, 2, 1, 4, False), 5)
@example((5, 3, 1, 3, 4, True), 3)  # rows between the kernels are read by none
@example((4, 3, 3, 2, 0, True), 3)  # one row of a result for three ranks
@given(SHAPES, st.integers(1, 7))
def test_bands_of_rows_make_the_whole_with_its_gradients(shape: Shape, ranks: int) -> None:
    layer = _layer(shape)
    x = torch.randn(2, 2, *layer.size, dtype=torch.float64, requires_grad=True)
    bands = []
    for first, last in shares(layer.out_size[0], ranks):
        start, stop = layer.input_rows(first, last)
        bias = None if layer.bias is None else layer.bias[:, first:last]
        bands.append(layer.on_rows(x[:, :, start:stop], layer.weight[:, first:last], bias, first, last))
    joined = torch.cat(bands, 2)
    weight = torch.randn_like(joined)

    inputs = [x, *layer.parameters()]
    torch.testing.assert_close(joined, layer(x))
    torch.testing.assert_close(
        torch.autograd.grad((joined * weight).sum(), inputs), torch.autograd.grad((layer(x) * weight).sum(), inputs)
    )


def test_a_band_of_no_rows_has_gradients_of_no_values() -> None:
    """An optimizer, or a norm over the ranks, asks every rank for them."""
    layer = LocalConv2d(2, 3, (4, 4), 3)
    x = torch.randn(2, 2, 0, 4, requires_grad=True)
    weight, bias = (one.detach()[:, 2:2].requires_grad_() for one in layer.parameters())
    y = layer.on_rows(x, weight, bias, 2, 2)

    assert y.shape == (2, 3, 0, 2)
    assert [grad.shape for grad in torch.autograd.grad(y.sum(), [x, weight, bias])] == [
        (2, 2, 0, 4), (3, 0, 2, 18), (3, 0, 2)
    ]  # fmt: skip


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError):
        LocalConv2d(1, 1, (2, 2), 3)
    with pytest.raises(InputError):
        LocalConv2d(0, 1, (2, 2), 1)
    with raising(InputError, "(N, 1, 4, 4)"):
        LocalConv2d(1, 1, (4, 4), 1)(torch.zeros(2, 1, 4, 5))
