"""The native gradient of a weight only: no less exact than plain float32, on every instruction set and shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.kernels.norm import norm_conv_native
from shoal.kernels.norm.norm_conv_native import ConvWindow, NormConv
from shoal.kernels.norm.norm_operands import affine_of
from shoal.lowlevel import allocations
from shoal.lowlevel.native import levels
from tests.kernels.kernel_choice import only
from tests.norm_reference import assert_no_worse, row

pytestmark = pytest.mark.skipif(not levels(), reason="the native library was not built")
each_level = pytest.mark.parametrize("level", levels())


def window(kernel: int, stride: int = 1) -> ConvWindow:
    return ConvWindow((stride, stride), (kernel // 2,) * 2, (1, 1), 1)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class Case:
    """A convolution of relu((x - mean) * scale + shift), and the gradient that reaches it."""

    def __init__(
        self,
        kernel: int,
        stride: int,
        images: int,
        channels: tuple[int, int],
        size: tuple[int, int],
        relu: bool = True,
        normalise: bool = True,
        gap: int = 0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        inner, outer = channels
        wide = channels_last(draw(images, inner + gap, *size))
        self.x = wide[:, gap // 2 : gap // 2 + inner]
        self.vectors = [draw(inner) if normalise else None for _ in range(3)]
        self.weight, self.relu, self.window = draw(outer, inner, kernel, kernel), relu, window(kernel, stride)
        sides = [(side - 1) // stride + 1 for side in size]
        self.grad = channels_last(draw(images, outer + gap, *sides))[:, :outer]

    def native(self, level: str | None = None) -> torch.Tensor:
        layer = NormConv(affine_of(*self.vectors), self.relu, self.weight, None, self.window)
        with only(f"native,{level}" if level else "native"):
            return norm_conv_native.weight_grad(self.grad, self.x, layer)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        # Contiguous: without AVX-512, strided 1x1 convolutions of few channels in channels_last may end the process.
        a, weight = self.x.to(dtype).contiguous(), self.weight.to(dtype).requires_grad_()
        mean, scale, shift = self.vectors
        if mean is not None and scale is not None and shift is not None:
            a = (a - row(mean)) * row(scale) + row(shift)
        a = a.relu() if self.relu else a
        stride, padding = list(self.window.stride), list(self.window.padding)
        y = torch.nn.functional.conv2d(a.to(dtype), weight, None, stride, padding)
        return torch.autograd.grad(y, weight, self.grad.to(dtype).contiguous())[0]

    def expect(self, level: str | None = None) -> None:
        # Pixels are added up, whose own rounding may all go one way.
        walk = (self.x.numel() / self.x.shape[1]) ** 0.5
        naive, exact = self.plain(torch.float32), self.plain(torch.float64)
        assert_no_worse(["weight"], [self.native(level)], [naive], [exact], {"weight": walk})


@each_level
@settings(deadline=None, max_examples=40)
@given(
    kernel=st.sampled_from([1, 3]),
    stride=st.integers(1, 3),
    images=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    size=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    relu=st.booleans(),
    normalise=st.booleans(),
    gap=st.sampled_from([0, 1, 16]),
    seed=st.integers(0, 999),
    threads=st.integers(1, 3),
)
@example(1, 1, 1, (1, 1), (1, 1), True, True, 0, 0, 2)
@example(3, 2, 1, (17, 33), (1, 2), True, True, 0, 0, 2)
def test_it_is_as_exact_as_plain_float32(
    level: str,
    kernel: int,
    stride: int,
    images: int,
    channels: tuple[int, int],
    size: tuple[int, int],
    relu: bool,
    normalise: bool,
    gap: int,
    seed: int,
    threads: int,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        Case(kernel, stride, images, channels, size, relu, normalise, gap, seed).expect(level)
    finally:
        torch.set_num_threads(before)


@each_level
@pytest.mark.parametrize(
    ("kernel", "stride", "images", "channels", "size"),
    [
        (1, 1, 2, (530, 270), (9, 7)),  # several blocks of channels in both directions, the last of each not full
        (3, 1, 2, (150, 130), (9, 7)),
        (3, 2, 1, (130, 70), (15, 16)),
        (1, 1, 1, (8, 4), (200, 130)),  # several patches of pixels in both directions, likewise
        (3, 1, 1, (8, 4), (30, 150)),
        (3, 2, 1, (8, 4), (31, 150)),
        (1, 2, 1, (8, 4), (31, 150)),
    ],
)
def test_blocks_and_patches_meet(
    level: str, kernel: int, stride: int, images: int, channels: tuple[int, int], size: tuple[int, int]
) -> None:
    Case(kernel, stride, images, channels, size).expect(level)


@each_level
def test_each_thread_adds_the_same_pixels_in_the_same_order(level: str) -> None:
    case, found = Case(3, 1, 2, (40, 64), (9, 8)), []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(case.native(level))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_nan_stays_where_it_belongs() -> None:
    case = Case(1, 1, 1, (3, 4), (2, 2), normalise=False)
    case.x[0, 1] = torch.nan
    found = case.native()
    assert found[:, 1].isnan().all() and not found[:, 0].isnan().any() and not found[:, 2].isnan().any()


def test_it_says_which_cases_it_does() -> None:
    x, weight = channels_last(torch.ones(2, 4, 5, 6)), torch.ones(3, 4, 3, 3)
    applies = norm_conv_native.weight_grad_applies
    assert applies(x, weight, window(3)) and applies(x, weight, window(3, 2))
    assert applies(x[:, 1:], weight[:, 1:], window(3))
    assert not applies(x.contiguous(), weight, window(3))
    assert not applies(x.double(), weight.double(), window(3))
    assert not applies(x, weight, ConvWindow((2, 1), (1, 1), (1, 1), 1))
    assert not applies(x, weight, ConvWindow((1, 1), (0, 0), (1, 1), 1))
    assert not applies(x, weight, ConvWindow((1, 1), (1, 1), (1, 2), 1))
    assert not applies(x, weight[:, :2], ConvWindow((1, 1), (1, 1), (1, 1), 2))
    assert not applies(x, torch.ones(3, 4, 5, 5), window(5))


def test_all_it_needs_beside_its_result_is_a_workspace() -> None:
    case = Case(3, 1, 8, (256, 256), (8, 8), normalise=False)
    _, changes = allocations.record(case.native)
    assert sum(changes) == case.weight.nbytes
    assert allocations.peak_bytes(changes) <= case.weight.nbytes + torch.get_num_threads() * (1 << 19)
