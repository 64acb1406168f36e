"""The mathematics of one split layer: cuts that lose nothing, paddings that give each patch exactly its outputs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F

from shoal.transforms.split.sliding_window import SlidingWindow


@st.composite
def windows(draw: st.DrawFn, *, ceil: bool = False) -> SlidingWindow:
    kernel = draw(st.integers(1, 7))
    begin, end = draw(st.integers(0, kernel)), draw(st.integers(0, kernel))
    return SlidingWindow(
        kernel, draw(st.integers(1, 5)), draw(st.integers(1, 3)), begin, end, ceil and draw(st.booleans())
    )


@given(windows(), st.integers(1, 40))
def test_a_convolution_has_as_many_outputs(window: SlidingWindow, length: int) -> None:
    assume(length + window.begin + window.end >= window.reach)
    x = F.pad(torch.zeros(1, 1, length), (window.begin, window.end))
    made = F.conv1d(x, torch.zeros(1, 1, window.kernel), stride=window.stride, dilation=window.dilation)
    assert window.out_length(length) == made.shape[-1]


@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 3), st.integers(4, 40), st.booleans())
def test_so_has_a_pooling(kernel: int, stride: int, padding: int, length: int, ceil: bool) -> None:
    assume(2 * padding <= kernel <= length + 2 * padding)
    made = F.max_pool1d(torch.zeros(1, 1, length), kernel, stride, padding, ceil_mode=ceil)
    assert SlidingWindow(kernel, stride, 1, padding, padding, ceil).out_length(length) == made.shape[-1]


@given(windows(), st.integers(2, 60), st.data())
def test_every_cut_within_the_bounds_gives_each_patch_its_outputs(
    window: SlidingWindow, length: int, data: st.DataObject
) -> None:
    made = window.out_length(length)
    assume(made >= 2)
    cuts = sorted(data.draw(st.sets(st.integers(1, made - 1), min_size=1, max_size=3)))
    inner = [cut * window.stride + data.draw(st.integers(*window.cuts)) for cut in cuts]
    outs, ins = [0, *cuts, made], [0, *inner, length]
    assume(all(a < b for a, b in pairwise(ins)))
    for i in range(len(outs) - 1):
        begin, end = window.padding((ins[i], ins[i + 1]), (outs[i], outs[i + 1]))
        patch = SlidingWindow(window.kernel, window.stride, window.dilation, begin, end)
        assert patch.out_length(ins[i + 1] - ins[i]) == outs[i + 1] - outs[i]
        if window.reach >= window.stride:  # nothing that a window reads is cropped
            assert begin >= 0
            assert end >= 0 or i == len(outs) - 2


@given(windows(), st.integers(1, 30))
def test_the_bounds_are_the_papers(window: SlidingWindow, cut: int) -> None:
    lb = cut * window.stride - window.begin
    ub = (cut - 1) * window.stride + window.reach - window.begin
    assert [cut * window.stride + moved for moved in window.cuts] == [min(lb, ub), max(lb, ub)]


def test_the_begin_padding_is_not_the_one_that_is_printed() -> None:
    window = SlidingWindow(3, 1, begin=1, end=1)
    begin, _ = window.padding((8, 16), (8, 16))
    assert begin == 1
    assert begin != 8 + window.begin - (8 - 1) * window.stride  # section 3.1 as printed: 2, one output too many


@pytest.mark.parametrize(("outputs", "reads"), [((0, 4), (0, 5)), ((4, 8), (3, 8))])
def test_what_outputs_read_is_inside_the_input(outputs: tuple[int, int], reads: tuple[int, int]) -> None:
    assert SlidingWindow(3, 1, begin=1, end=1).reads(outputs, 8) == reads
