"""Batch norm's gradient in pieces is the whole one, over the incoming gradient.

CUDA's ops get implementations for the CPU here: what ATen's kernels compute, in ops of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shoal.kernels import batch_norm_pieces, cudnn_batch_norm
from shoal.kernels.pieces import Cut

aten = torch.ops.aten
NATIVE = aten.native_batch_norm_backward.default


def reduce(grad, x, mean, invstd, weight, of_input, of_weight, of_bias):  # type: ignore[no-untyped-def]
    shape, dims = (1, -1, *[1] * (x.dim() - 2)), [0, *range(2, x.dim())]
    of_grad = grad.sum(dims)
    of_grad_x = (grad * (x - mean.view(shape))).sum(dims)
    return of_grad, of_grad_x, of_grad_x * invstd, of_grad.clone()


def elemt(grad, x, mean, invstd, weight, of_grad, of_grad_x, count):  # type: ignore[no-untyped-def]
    n = count.sum()
    scale = invstd if weight is None else invstd * weight
    return (grad - of_grad / n - (x - mean) * invstd**2 * of_grad_x / n) * scale


def cudnn(x, grad, weight, running_mean, running_var, mean, invstd, eps, reserve):  # type: ignore[no-untyped-def]
    assert grad.is_contiguous() == x.is_contiguous() and grad.stride() == x.stride()
    return NATIVE(grad, x, weight, None, None, mean, invstd, True, eps, [True] * 3)


@pytest.fixture(autouse=True)
def ops_of_cuda_on_the_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm_backward_reduce", reduce, "CPU")
    library.impl("batch_norm_backward_elemt", elemt, "CPU")
    library.impl("cudnn_batch_norm_backward", cudnn, "CPU")
    yield
    library._destroy()


def operands(*shape: int, channels_last: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    grad, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64).contiguous(memory_format=layout) for _ in "gx"
    )
    weight = torch.rand(shape[1], generator=generator, dtype=torch.float64) + 0.5
    _, mean, invstd = aten._native_batch_norm_legit.no_stats(x, weight, weight, True, 0.1, 1e-5)
    return grad, x, weight, mean, invstd


@pytest.mark.parametrize("wanted", [[True, True, True], [True, False, True], [True, False, False]])
@pytest.mark.parametrize(
    ("of", "channels_last", "dim"),
    [("native", True, 0), ("native", True, 1), ("native", False, 1), ("cudnn", True, 1), ("cudnn", False, 1)],
)
def test_pieces_give_the_whole_gradient_and_only_the_second_form_writes(
    of: str, channels_last: bool, dim: int, wanted: list[bool]
) -> None:
    grad, x, weight, mean, invstd = operands(3, 10, 5, 7, channels_last=channels_last)
    if of == "native":
        whole, arguments = NATIVE, (grad, x, weight, None, None, mean, invstd, True, 1e-5, wanted)
        apart, over = batch_norm_pieces.native_backward, batch_norm_pieces.native_backward_
    else:
        whole, arguments = cudnn_batch_norm.backward, (grad, x, weight, mean, invstd, None, 1e-5, wanted)
        apart, over = batch_norm_pieces.cudnn_backward, batch_norm_pieces.cudnn_backward_
    expected, before = whole(*arguments), grad.clone()
    for pieces in (1, 3, 8):
        found = apart(*arguments, dim, pieces)
        assert torch.equal(grad, before)
        assert found[0].stride() == grad.stride()
        for one, other, asked in zip(found, expected, wanted, strict=True):
            assert (one is not None) == asked
            if asked:
                torch.testing.assert_close(one, other)
    result, *_ = over(*arguments, dim, 3)
    assert result is grad
    torch.testing.assert_close(grad, expected[0])


def test_on_the_cpu_nothing_is_cut() -> None:
    grad, x, weight, mean, invstd = operands(4, 64, 64, 64, channels_last=False)
    assert x.nbytes >= 4 << 20
    call = (grad, x, weight, None, None, mean, invstd, True, 0.0, [True] * 3)
    assert batch_norm_pieces.choose(NATIVE, call) is None
    elsewhere = batch_norm_pieces.cut_elsewhere(NATIVE, call)  # on a GPU, where that cannot be tried here
    assert elsewhere == Cut(1, 8, x.nbytes - x.nbytes // 8)
    half = tuple(one[:, :3] if one is grad or one is x else one for one in call)
    assert batch_norm_pieces.cut_elsewhere(NATIVE, half) is None  # it is a view, which is not dense
