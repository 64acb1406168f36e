"""ReLU's gradient from a mask, or from sign bits of codes, is the one from its output, bit for bit, in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels import relu
from shoal.kernels.relu import backward, backward_, note_closed
from shoal.lowlevel import allocations, native
from shoal.lowlevel.dispatch import VARIABLE

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "sliced": lambda x: torch.stack([x, x], 4).flatten(3)[..., ::2],
    "expanded": lambda x: x[:1, :1].expand(x.shape),
    "part of a whole": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}
layouts = st.sampled_from(list(LAYOUTS))
kernels = st.sampled_from(["reference", "native"])
KERNELS = ["reference", pytest.param("native", marks=pytest.mark.skipif(native.library() is None, reason="not built"))]
NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def gradients(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.tuples(*[st.integers(0, 5)] * 4))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    x[x > 1] = draw(st.sampled_from([float("nan"), float("inf"), -0.0, 1.5]))
    return x.to(draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])))


@given(gradients(), layouts, layouts, st.integers(1, 300), kernels)
def test_the_mask_gives_the_gradient_that_the_output_gives(
    grad: torch.Tensor, layout: str, layout_of_mask: str, piece_elems: int, kernel: str
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
        patch.setenv(VARIABLE, kernel)
        found = backward(grad, positive)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.signbit(), expected.signbit())
    if 0 not in grad.shape and layout_of_mask != "expanded":  # which no ReLU makes
        several = [axis for axis, size in enumerate(grad.shape) if size > 1]
        assert [found.stride(axis) for axis in several] == [expected.stride(axis) for axis in several]
    assert torch.equal(grad.nan_to_num(7), kept.nan_to_num(7))


@given(gradients(), layouts, layouts, st.integers(1, 300), kernels)
def test_written_over_the_gradient_it_gives_the_same(
    grad: torch.Tensor, layout: str, layout_of_mask: str, piece_elems: int, kernel: str
) -> None:
    if "expanded" in (layout, layout_of_mask):
        layout = layout_of_mask = "contiguous"  # blocks that overlap themselves are never taken over
    positive = LAYOUTS[layout_of_mask](torch.rand(grad.shape, generator=torch.Generator().manual_seed(2)) > 0.5)
    expected = torch.where(positive, grad, torch.zeros((), dtype=grad.dtype)).nan_to_num(7)
    taken = LAYOUTS[layout](grad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relu, "_PIECE_ELEMS", piece_elems)
        patch.setenv(VARIABLE, kernel)
        assert backward_(taken, positive).data_ptr() == taken.data_ptr()
    assert torch.equal(taken.nan_to_num(7), expected)


def test_only_the_neighbours_of_what_it_writes_stay_as_they_were() -> None:
    whole = torch.ones(2, 6, 4, 4)
    part = whole[:, 2:4]
    backward_(part, torch.zeros(2, 2, 4, 4, dtype=torch.bool))
    assert whole.sum() == whole.numel() - part.numel()
    assert not part.any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_over_the_gradient_it_allocates_a_piece_at_most(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    monkeypatch.setattr(relu, "_PIECE_ELEMS", 64)
    monkeypatch.setenv(VARIABLE, kernel)
    grad = torch.randn(4, 8, 16, 16)
    positive = torch.randn(4, 8, 16, 16) > 0
    _, changes = allocations.record(lambda: backward_(grad, positive))
    assert allocations.peak_bytes(changes) <= 64 * 4
    _, changes = allocations.record(lambda: backward(grad, positive))
    assert grad.nbytes <= allocations.peak_bytes(changes) <= grad.nbytes + 64 * 4


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("above", [math.inf, 6.0, 1e-40])
def test_signs_are_those_of_the_library_and_codes_stay(kernel: str, above: float) -> None:
    @given(st.lists(NUMBERS, min_size=1, max_size=70), st.integers(0, 255))
    def held(numbers: list[float], code: int) -> None:
        output = torch.tensor([*numbers, math.inf, math.nan, -0.0, above]).clamp(0, above)
        if math.isfinite(above):  # of a NaN, hardtanh's own backward pass says one thing in vectors, another at the end
            output = output.nan_to_num(0)
        codes = torch.full(output.shape, code, dtype=torch.uint8)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, kernel)
            note_closed(output, codes, above)
        ones = torch.ones_like(output)
        exact = torch.ops.aten.threshold_backward(ones, output, 0)
        if math.isfinite(above):
            exact = torch.ops.aten.hardtanh_backward(ones, output, 0, above)
        assert torch.equal(codes < 0x80, exact == 1)
        assert (codes & 0x7F == code & 0x7F).all()

    held()


@pytest.mark.parametrize("elems", [1, 4095, 4097, 300_001])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_all_is_noted_on_any_number_of_threads(kernel: str, elems: int, threads: int) -> None:
    output = torch.randn(elems, generator=torch.Generator().manual_seed(elems)).relu()
    codes = torch.zeros(elems, dtype=torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, kernel)
            note_closed(output, codes, math.inf)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(codes == 0x80, output == 0)
