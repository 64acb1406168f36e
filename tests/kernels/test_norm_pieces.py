"""A norm's gradient in pieces is the whole one, over the incoming gradient.

CUDA's ops get implementations for the CPU here: what ATen's kernels compute, in ops of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal.kernels import cudnn_batch_norm, norm_pieces
from shoal.kernels.pieces import Cut

aten = torch.ops.aten
NATIVE = aten.native_batch_norm_backward.default
OF_GROUPS = aten.native_group_norm_backward.default


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
        apart, over = norm_pieces.native_backward, norm_pieces.native_backward_
    else:
        whole, arguments = cudnn_batch_norm.backward, (grad, x, weight, mean, invstd, None, 1e-5, wanted)
        apart, over = norm_pieces.cudnn_backward, norm_pieces.cudnn_backward_
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
    assert norm_pieces.choose(NATIVE, call) is None
    elsewhere = norm_pieces.cut_elsewhere(NATIVE, call)  # on a GPU, where that cannot be tried here
    assert elsewhere == Cut(1, 8, x.nbytes - x.nbytes // 8)
    half = tuple(one[:, :3] if one is grad or one is x else one for one in call)
    assert norm_pieces.cut_elsewhere(NATIVE, half) is None  # it is a view, which is not dense


def of_groups(
    *shape: int, groups: int, dtype: torch.dtype = torch.float32, wanted: tuple[bool, ...] = (True,) * 3
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    grad, x = torch.randn(shape, dtype=dtype), 3 * torch.randn(shape, dtype=dtype) + 1
    weight = torch.rand(shape[1], dtype=dtype) + 0.5
    sizes = *shape[:2], x[0, 0].numel(), groups
    _, mean, invstd = aten.native_group_norm(x, weight, weight, *sizes, 1e-5)
    return grad, x, mean, invstd, weight, *sizes, list(wanted)


@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_groups_have_the_bits_of_the_whole_and_only_the_second_form_writes(groups: int, pieces: int) -> None:
    call = of_groups(2, 12, 5, 4, 3, groups=groups)
    expected, before = OF_GROUPS(*call), call[0].clone()
    found = norm_pieces.group_backward(*call, 1, pieces)
    assert torch.equal(call[0], before)
    assert all(map(torch.equal, found, expected))
    over = norm_pieces.group_backward_(*call, 1, pieces)
    assert over[0] is call[0] and all(map(torch.equal, over, expected))


def test_the_gradient_of_groups_is_that_in_float64() -> None:
    call = of_groups(2, 8, 6, 5, groups=4, dtype=torch.float64)
    found = norm_pieces.group_backward(*call, 1, 4)
    x, weight, bias = call[1].requires_grad_(), call[4].clone().requires_grad_(), torch.zeros(8).double()
    torch.nn.functional.group_norm(x, 4, weight, bias.requires_grad_()).backward(call[0])
    for ours, theirs in zip(found, (x.grad, weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_elsewhere_large_contiguous_maps_are_cut_by_their_groups() -> None:
    call = of_groups(1, 16, 32, 32, 64, groups=8)
    nbytes = call[0].nbytes
    assert nbytes == 4 << 20
    assert norm_pieces.cut_elsewhere(OF_GROUPS, call) == Cut(1, 8, nbytes - nbytes // 8)
    assert norm_pieces.choose(OF_GROUPS, call) is None  # this is no GPU
    grad, x, *rest = call
    not_cut = {
        "small": of_groups(1, 16, 32, 32, 8, groups=8),
        "one group of one sample": of_groups(1, 16, 32, 32, 64, groups=1),
        "without a weight": (grad, x, *rest[:2], None, *rest[3:]),
        "one gradient only": (*call[:-1], [True, False, False]),
        "channels_last_3d": (grad.contiguous(memory_format=torch.channels_last_3d), *call[1:]),
    }
    for name, other in not_cut.items():
        assert norm_pieces.cut_elsewhere(OF_GROUPS, other) is None, name


def test_half_precision_with_float32_weights_is_cut_too_to_the_bits_of_the_whole() -> None:
    grad, x, _, _, weight, *sizes = of_groups(1, 8, 64, 64, 64, groups=4)
    grad, x = grad.bfloat16(), x.bfloat16()
    _, mean, invstd = aten.native_group_norm(x, weight, weight, *sizes[:4], 1e-5)
    call = grad, x, mean, invstd, weight, *sizes
    assert norm_pieces.cut_elsewhere(OF_GROUPS, call) == Cut(1, 4, x.nbytes - x.nbytes // 4)
    for ours, theirs in zip(norm_pieces.group_backward(*call, 1, 4), OF_GROUPS(*call), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
