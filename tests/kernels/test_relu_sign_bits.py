"""Native and torch note the same signs: those of what lets no gradient through."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels.relu import note_closed
from shoal.lowlevel import native
from shoal.lowlevel.dispatch import VARIABLE

KERNELS = ["reference", pytest.param("native", marks=pytest.mark.skipif(native.library() is None, reason="not built"))]
NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


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
