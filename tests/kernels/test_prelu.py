"""PReLU over its operands, piece by piece: the bits of PyTorch's kernels, and one tensor of scratch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels import pieces, prelu
from shoal.lowlevel import allocations

aten = torch.ops.aten


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Gradient, input, slopes and the dims that these broadcast over."""
    shape = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    draws = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    grad, x = (torch.randn(shape, generator=draws).to(dtype) for _ in range(2))
    x.flatten()[::5] = draw(st.sampled_from([0.0, -0.0, float("nan"), float("-inf")]))
    if len(shape) == 4 and draw(st.booleans()):
        grad, x = (one.contiguous(memory_format=torch.channels_last) for one in (grad, x))
    single = draw(st.booleans())
    weight = torch.randn(1 if single else shape[1], generator=draws).to(dtype)
    dims = [dim for dim in range(len(shape)) if single or dim != 1]
    return grad, x, weight.view(1, -1, *[1] * (len(shape) - 2)), dims


@given(cases(), st.integers(1, 40))
def test_over_its_operands_it_gives_pytorch_s_bits(
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]], piece_elems: int
) -> None:
    grad, x, weight, dims = case
    of_input, summands = aten._prelu_kernel_backward(grad, x, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "TILE_ELEMS", piece_elems)
        over = grad.clone()
        found, of_weight = prelu.backward_(over, x, weight, dims, True)
        result = prelu.forward_(x.clone(), weight)
    assert found.data_ptr() == over.data_ptr()
    for ours, theirs in (
        (found, of_input),
        (of_weight, summands.sum(dims, True)),
        (result, aten._prelu_kernel(x, weight)),
    ):
        assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9)) and torch.equal(ours.isnan(), theirs.isnan())


def test_the_backward_pass_takes_one_tensor_where_pytorch_s_takes_two() -> None:
    grad, x, weight = torch.randn(1, 4, 64, 64, 64), torch.randn(1, 4, 64, 64, 64), torch.full((1, 1, 1, 1, 1), 0.25)
    dims = [0, 1, 2, 3, 4]
    _, plain = allocations.record(lambda: prelu.backward(grad, x, weight, dims, True))
    _, ours = allocations.record(lambda: prelu.backward_(grad, x, weight, dims, True))
    assert allocations.peak_bytes(plain) >= 2 * x.nbytes
    assert allocations.peak_bytes(ours) <= 1.6 * x.nbytes  # the summands, and pieces of 1 MiB
