"""Convolutions of volumes without unfolding: what PyTorch's give, from parts too, with next to no scratch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal.kernels import direct_convolution
from shoal.lowlevel import allocations
from shoal.lowlevel.native import levels

aten = torch.ops.aten
THREE = [1, 1, 1]
SAME = (THREE, THREE, THREE, False, [0, 0, 0], 1)
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]


def cases(number: int, dtype: torch.dtype) -> Iterator[Case]:
    """Random ones: any kernel, stride, padding and dilation, transposed or not, in either layout."""
    draw = random.Random(number)
    torch.manual_seed(number)
    while True:
        transposed = draw.random() < 0.4
        kernel, stride = [[draw.choice(sizes) for _ in range(3)] for sizes in ([1, 2, 3, 5], [1, 2, 3])]
        dilation = [draw.choice([1, 1, 2, 3]) for _ in range(3)]
        reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        padding = [draw.randint(0, r) for r in reach]
        extra = [draw.randint(0, max(s, d) - 1) * transposed for s, d in zip(stride, dilation, strict=True)]
        channels = draw.randint(1, 20), draw.randint(1, 20)
        x = torch.randn(draw.randint(1, 3), channels[0], *(r + draw.randint(1, 12) for r in reach)).to(dtype)
        weight = torch.randn(*(channels if transposed else channels[::-1]), *kernel).to(dtype)
        if draw.random() < 0.3:
            x = x.contiguous(memory_format=torch.channels_last_3d)
        options = stride, padding, dilation, transposed, extra, 1
        try:
            aten.convolution(x.double(), weight.double(), None, *options)
        except RuntimeError:  # no result is left
            continue
        yield x, weight, torch.randn(channels[1]).to(dtype), options


def assert_close(found: torch.Tensor, exact: torch.Tensor, strides: tuple[int, ...] | None = None) -> None:
    eps = torch.finfo(found.dtype).eps
    assert found.shape == exact.shape
    assert found.is_contiguous() if strides is None else found.stride() == strides
    assert (found.double() - exact).abs().max() <= 16 * eps * exact.abs().max()


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, options: tuple[Any, ...]) -> None:
    wide = x.double(), weight.double(), bias.double()
    exact = aten.convolution(*wide, *options)
    grad = torch.randn(exact.shape).to(x.dtype)
    of_x, of_weight, of_bias = aten.convolution_backward(
        grad.double(), *wide[:2], [bias.numel()], *options, [True, True, True]
    )
    rest = [bias.numel()], *options, [False, True, True]
    half = x.shape[1] // 2
    for parts in [x], [x[:, :half], x[:, half:]] if half else [x]:
        assert_close(direct_convolution.forward(parts, weight, bias, *options), exact)
        for laid_out in (weight.contiguous(), weight.contiguous(memory_format=torch.channels_last_3d)):
            strides = laid_out.stride()
            _, found, found_bias = direct_convolution.weight_gradient(grad, parts, weight, *rest, strides)
            assert_close(found, of_weight, strides)
        assert found_bias is not None
        assert torch.allclose(found_bias.double(), of_bias, rtol=1e-2, atol=1e-2 if x.dtype != torch.float32 else 1e-3)
    assert_close(direct_convolution.input_gradient(grad, weight, x.shape, *options), of_x)
    second = direct_convolution.input_gradient(grad, weight, x[:, half:].shape, *options, half)
    assert_close(second, of_x[:, half:])


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_are_those_of_float64(
    level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", f"native,{level}")
    drawn = cases(1, dtype)
    for _ in range(25):
        check(*next(drawn))


def test_the_reference_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", "reference")
    drawn = cases(2, torch.float32)
    for _ in range(10):
        check(*next(drawn))


def test_float64_and_channels_last_results_are_the_references() -> None:
    x, weight = torch.ones(1, 2, 3, 3, 3, dtype=torch.float64), torch.ones(1, 2, 3, 3, 3, dtype=torch.float64)
    assert not direct_convolution.applies(x, weight)
    assert direct_convolution.forward(x, weight, None, *SAME).sum() == aten.convolution(x, weight, None, *SAME).sum()


@pytest.mark.skipif(not levels(), reason="the native library was not built")
def test_it_takes_next_to_no_scratch_where_the_library_unfolds() -> None:
    x, weight = torch.randn(1, 8, 32, 32, 32), torch.randn(8, 8, 3, 3, 3)
    grad, rest = torch.randn(1, 8, 32, 32, 32), ([8], *SAME, [False, True, True], weight.stride())

    def scratch_bytes(run: Any) -> int:
        result, changes = allocations.record(run)
        results = result if isinstance(result, tuple) else (result,)
        return allocations.peak_bytes(changes) - sum(one.nbytes for one in results if one is not None)

    assert scratch_bytes(lambda: direct_convolution.forward(x, weight, None, *SAME)) < 512 << 10
    assert scratch_bytes(lambda: direct_convolution.input_gradient(grad, weight, x.shape, *SAME)) < 512 << 10
    assert scratch_bytes(lambda: direct_convolution.weight_gradient(grad, x, weight, *rest)) < 512 << 10
    assert scratch_bytes(lambda: aten.convolution(x, weight, None, *SAME)) > 16 << 20


@pytest.mark.skipif(not levels(), reason="the native library was not built")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    x, weight, grad = torch.randn(2, 5, 9, 9, 9), torch.randn(7, 5, 3, 3, 3), torch.randn(2, 7, 9, 9, 9)
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            rest = [7], *SAME, [False, True, False], weight.stride()
            of_weight = direct_convolution.weight_gradient(grad, x, weight, *rest)[1]
            found.append((direct_convolution.forward(x, weight, None, *SAME), of_weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_nan_beside_a_border_stays_where_it_is() -> None:
    x, weight = torch.zeros(1, 1, 1, 6, 6), torch.ones(1, 1, 1, 1, 3)
    x[0, 0, 0, 2, 5] = torch.nan
    y = direct_convolution.forward(x, weight, None, THREE, [0, 0, 1], THREE, False, [0, 0, 0], 1)
    assert y.isnan().nonzero()[:, 3:].tolist() == [[2, 4], [2, 5]]


def same_size(number: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], int, torch.Tensor, Any, tuple[Any, ...]]:
    """Parts, the place of one as large as the result, weight, bias and options of a convolution that keeps the size."""
    draw = random.Random(number)
    torch.manual_seed(number)
    kernel, dilation = [draw.choice([1, 3, 5]) for _ in range(3)], [draw.choice([1, 1, 2]) for _ in range(3)]
    padding = [d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True)]
    channels = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]
    shape = [draw.randint(1, 12) for _ in range(3)]
    samples, place = draw.randint(1, 2), draw.randrange(len(channels))
    parts = [torch.randn(samples, count, *shape).to(dtype) for count in channels]
    weight = torch.randn(channels[place], sum(channels), *kernel).to(dtype)
    bias = torch.randn(channels[place]).to(dtype) if draw.random() < 0.5 else None
    return parts, place, weight, bias, (THREE, padding, dilation, False, [0, 0, 0], 1)


@pytest.mark.parametrize("level", levels() or ["reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_over_what_it_convolves_it_gives_the_same_bits(
    level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", level)
    for number in range(60):
        parts, place, weight, bias, options = same_size(number, dtype)
        monkeypatch.setattr(direct_convolution, "_SLAB_ELEMS", random.Random(number).choice([1, 50, 500]))
        expected = direct_convolution.forward(parts, weight, bias, *options)
        mine = [part.clone() for part in parts]
        found = direct_convolution.forward(mine, weight, bias, *options, over=mine[place])
        assert found.data_ptr() == mine[place].data_ptr()
        assert torch.equal(found, expected), (number, options)
        assert all(torch.equal(mine[n], part) for n, part in enumerate(parts) if n != place)
        first = sum(part.shape[1] for part in parts[:place])
        arguments = (weight, parts[place].shape, *options, first)
        expected = direct_convolution.input_gradient(parts[place], *arguments)
        grad = parts[place].clone()
        found = direct_convolution.input_gradient(grad, *arguments, over=grad)
        assert found.data_ptr() == grad.data_ptr() and torch.equal(found, expected), (number, options)


@pytest.mark.skipif(not levels(), reason="the native library was not built")
def test_over_what_it_convolves_it_takes_a_few_planes() -> None:
    x, weight = torch.randn(1, 16, 48, 32, 32), torch.randn(16, 16, 3, 3, 3)
    _, changes = allocations.record(lambda: direct_convolution.forward(x, weight, None, *SAME, over=x))
    assert allocations.peak_bytes(changes) < 0.8 * x.nbytes
    assert sum(changes) == 0
