"""Layer norm's gradient over the incoming one: the bits of PyTorch's kernel, and only a piece of scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels import layer_norm
from shoal.lowlevel import allocations

aten = torch.ops.aten


def operands(shape: list[int], normalised: int, dtype: torch.dtype, seed: int = 0) -> tuple[Any, ...]:
    """Gradient, input, normalised shape, statistics, weight and bias."""
    draws = torch.Generator().manual_seed(seed)
    grad, x = (torch.randn(shape, generator=draws).to(dtype) for _ in range(2))
    last = shape[len(shape) - normalised :]
    weight, bias = (torch.randn(last, generator=draws).to(dtype) for _ in range(2))
    _, mean, invstd = aten.native_layer_norm(x, last, weight, bias, 1e-5)
    return grad, x, last, mean, invstd, weight, bias


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 2),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(1, 60),
    st.integers(0, 99),
)
def test_over_the_gradient_it_gives_pytorch_s_bits(
    shape: list[int], normalised: int, dtype: torch.dtype, piece_elems: int, seed: int
) -> None:
    grad, x, *rest = operands(shape, min(normalised, len(shape)), dtype, seed)
    whole = layer_norm.backward(grad, x, *rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_norm, "_PIECE_ELEMS", piece_elems)
        found = layer_norm.backward_(over := grad.clone(), x, *rest)
    assert found[0].data_ptr() == over.data_ptr()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, whole, strict=True))


def test_where_the_layouts_differ_the_library_s_result_is_copied() -> None:
    grad, x, *rest = operands([4, 6, 5], 1, torch.float32)
    turned = grad.transpose(0, 1).contiguous().transpose(0, 1)
    found = layer_norm.backward_(turned.clone(), x, *rest)
    torch.testing.assert_close(found[0], layer_norm.backward(grad, x, *rest)[0], rtol=0, atol=0)


def test_it_takes_a_piece_where_pytorch_s_takes_a_tensor() -> None:
    grad, x, *rest = operands([64, 512, 128], 1, torch.float32)
    _, plain = allocations.record(lambda: layer_norm.backward(grad, x, *rest))
    _, ours = allocations.record(lambda: layer_norm.backward_(grad, x, *rest))
    assert allocations.peak_bytes(ours) + x.nbytes // 2 <= allocations.peak_bytes(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_on_this_machine_finds_the_bits_the_same(dtype: torch.dtype) -> None:
    assert layer_norm.backward_repeats_bits(dtype, dtype, 96)
