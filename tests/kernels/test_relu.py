"""ReLU's gradient from a mask is the one from its output, bit for bit, in every layout and without a float mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels import relu
from shoal.kernels.relu import backward, backward_
from shoal.lowlevel import allocations

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "sliced": lambda x: torch.stack([x, x], 4).flatten(3)[..., ::2],
    "expanded": lambda x: x[:1, :1].expand(x.shape),
    "part of a whole": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}
layouts = st.sampled_from(list(LAYOUTS))


@st.composite
def gradients(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.tuples(*[st.integers(0, 5)] * 4))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    x[x > 1] = draw(st.sampled_from([float("nan"), float("inf"), -0.0, 1.5]))
    return x.to(draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])))


@given(gradients(), layouts, layouts, st.integers(1, 300))
def test_the_mask_gives_the_gradient_that_the_output_gives(
    grad: torch.Tensor, layout: str, layout_of_mask: str, piece_elems: int
) -> None:
    before = torch.randn(grad.shape, generator=torch.Generator().manual_seed(1)).to(grad.dtype)
    before[before > 1.5] = float("nan")
    if layout == "expanded" and 0 in grad.shape:
        layout = "contiguous"
    if layout_of_mask == "expanded" and 0 in grad.shape:
        layout_of_mask = "contiguous"
    grad, output = LAYOUTS[layout](grad), LAYOUTS[layout_of_mask](torch.relu(before))
    expected = torch.ops.aten.threshold_backward(grad, output, 0)
    kept = grad.clone()
    positive = LAYOUTS[layout_of_mask](torch.relu(before) != 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relu, "_PIECE_ELEMS", piece_elems)
        found = backward(grad, positive)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.signbit(), expected.signbit())
    if 0 not in grad.shape and layout_of_mask != "expanded":  # which no ReLU makes
        several = [axis for axis, size in enumerate(grad.shape) if size > 1]
        assert [found.stride(axis) for axis in several] == [expected.stride(axis) for axis in several]
    assert torch.equal(grad.nan_to_num(7), kept.nan_to_num(7))


@given(gradients(), layouts, layouts, st.integers(1, 300))
def test_written_over_the_gradient_it_gives_the_same(
    grad: torch.Tensor, layout: str, layout_of_mask: str, piece_elems: int
) -> None:
    if "expanded" in (layout, layout_of_mask):
        layout = layout_of_mask = "contiguous"  # blocks that overlap themselves are never taken over
    positive = LAYOUTS[layout_of_mask](torch.rand(grad.shape, generator=torch.Generator().manual_seed(2)) > 0.5)
    expected = torch.where(positive, grad, torch.zeros((), dtype=grad.dtype)).nan_to_num(7)
    taken = LAYOUTS[layout](grad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relu, "_PIECE_ELEMS", piece_elems)
        assert backward_(taken, positive).data_ptr() == taken.data_ptr()
    assert torch.equal(taken.nan_to_num(7), expected)


def test_only_the_neighbours_of_what_it_writes_stay_as_they_were() -> None:
    whole = torch.ones(2, 6, 4, 4)
    part = whole[:, 2:4]
    backward_(part, torch.zeros(2, 2, 4, 4, dtype=torch.bool))
    assert whole.sum() == whole.numel() - part.numel()
    assert not part.any()


def test_over_the_gradient_it_allocates_a_piece_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relu, "_PIECE_ELEMS", 64)
    grad = torch.randn(4, 8, 16, 16)
    positive = torch.randn(4, 8, 16, 16) > 0
    _, changes = allocations.record(lambda: backward_(grad, positive))
    assert allocations.peak_bytes(changes) <= 64 * 4
    _, changes = allocations.record(lambda: backward(grad, positive))
    assert grad.nbytes <= allocations.peak_bytes(changes) <= grad.nbytes + 64 * 4
