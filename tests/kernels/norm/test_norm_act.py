"""`shoal::norm_act`: gradients, layouts, dtypes, what it saves, and that its kernels do what PyTorch's own do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.kernels.norm.norm_act import activated, activated_backward, norm_act
from shoal.kernels.norm.norm_operands import NormAffine
from shoal.lowlevel.native import levels
from tests.norm_reference import assert_no_worse, row


def _leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_gradcheck(relu: bool, adds: bool) -> None:
    xs = [_leaf(2, 2, 3, 3, seed=1), _leaf(2, 1, 3, 3, seed=2)]
    vectors = [_leaf(3, seed=seed) for seed in (3, 4, 5)]
    residual = [_leaf(2, 3, 3, 3, seed=6)] if adds else []

    def call(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return norm_act([a, b], *rest[:3], rest[3] if adds else None, relu)

    assert torch.autograd.gradcheck(call, [*xs, *vectors, *residual])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("relu", "adds", "learns"), [(True, False, True), (True, True, False), (False, True, True)])
def test_with_a_variance_of_its_own_its_gradient_is_batch_norms(
    layout: torch.memory_format, relu: bool, adds: bool, learns: bool
) -> None:
    """On images larger than the pieces that it is made in."""
    xs = [_leaf(2, channels, 500, 300, seed=channels).detach().to(memory_format=layout) for channels in (2, 1)]
    weight, bias, residual = _leaf(3, seed=3), _leaf(3, seed=4), _leaf(2, 3, 500, 300, seed=5) if adds else None
    leaves = [*(x.requires_grad_() for x in xs), *([weight, bias] if learns else []), *([residual] if adds else [])]
    x = torch.cat(xs, 1)
    z = F.batch_norm(x, None, None, weight, bias, True, 0.0, 0.1)
    z = z if residual is None else z + residual
    z = z.relu() if relu else z
    grad = _leaf(2, 3, 500, 300, seed=6).detach()
    expected = [z, *torch.autograd.grad(z, leaves, grad)]
    with torch.no_grad():
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    scale = weight * torch.rsqrt(variance + 0.1)
    z = norm_act(xs, mean, scale, bias, residual, relu, variance, 0.1)
    for own, other in zip([z, *torch.autograd.grad(z, leaves, grad)], expected, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("adds", [False, True])
def test_what_the_compiler_believes_is_so(dtype: torch.dtype, layout: torch.memory_format, adds: bool) -> None:
    def tensor(channels: int) -> torch.Tensor:
        x = _leaf(2, channels, 3, 3, seed=channels, dtype=dtype).detach()
        return x.contiguous(memory_format=layout).requires_grad_()

    vectors = [_leaf(3, seed=seed, dtype=torch.float32) for seed in (3, 4, 5)]
    arguments: Any = ([tensor(2), tensor(1)], *vectors, tensor(3) if adds else None, True)
    torch.library.opcheck(torch.ops.shoal.norm_act.default, arguments)
    if dtype == torch.bfloat16:
        torch.library.opcheck(torch.ops.shoal.norm_act.default, (*arguments, vectors[1].detach().square(), 0.1))
    z = torch.ops.shoal.norm_act(*arguments)
    assert z.is_contiguous(memory_format=layout) and z.dtype == dtype


def test_its_result_is_saved_only_after_a_residual() -> None:
    x, residual = _leaf(2, 3, 8, 8, seed=1), _leaf(2, 3, 8, 8, seed=2)
    vectors = [_leaf(3, seed=seed) for seed in (3, 4, 5)]
    for other, tensors in ((None, 1), (residual, 2)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):  # noqa: B023
            norm_act([x], *vectors, other, True)
        assert sum(nbytes == x.nbytes for nbytes in saved) == tensors


def _by_hand(
    xs: Sequence[torch.Tensor],
    vectors: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    relu: bool,
    grad: torch.Tensor,
    dtype: torch.dtype,
) -> list[torch.Tensor | None]:
    """The result and all gradients in plain PyTorch."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (*xs, *vectors, *([] if residual is None else [residual]))]
    mean, scale, shift = (row(vector) for vector in leaves[len(xs) : len(xs) + 3])
    z = (torch.cat(leaves[: len(xs)], 1) - mean) * scale + shift
    z = z if residual is None else z + leaves[-1]
    z = z.relu() if relu else z
    return [z.detach(), *torch.autograd.grad(z, leaves, grad.to(dtype))]


@pytest.mark.parametrize(
    ("ours", "layout", "offset"),
    [
        # PyTorch's own draw the mean into the shift, which costs three digits where it is a thousand deviations.
        pytest.param(False, torch.contiguous_format, 0.0, id="PyTorch's own"),
        pytest.param(False, torch.channels_last, 0.0, id="PyTorch's own, channels_last"),
        pytest.param(True, torch.channels_last, 0.0, id="kernels"),
        pytest.param(
            True,
            torch.channels_last,
            1e3,
            id="kernels, far from zero",
            marks=pytest.mark.skipif(not levels(), reason="the native library was not built"),
        ),
    ],
)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_no_worse_than_plain_float32(
    monkeypatch: pytest.MonkeyPatch, ours: bool, layout: torch.memory_format, offset: float, relu: bool, adds: bool
) -> None:
    if not ours:
        monkeypatch.setenv("SHOAL_KERNELS", "reference")
    channels, shape = (19, 1, 13), (3, 33, 9, 7)
    xs = [_leaf(3, count, 9, 7, seed=count, dtype=torch.float32).detach() + offset for count in channels]
    xs = [x.contiguous(memory_format=layout) for x in xs]
    mean, scale, shift = (_leaf(33, seed=seed, dtype=torch.float32).detach() for seed in (1, 2, 3))
    mean, scale[::5] = mean + offset, 0.0
    residual = _leaf(*shape, seed=5, dtype=torch.float32).detach() if adds else None
    grad = _leaf(*shape, seed=6, dtype=torch.float32).detach()  # contiguous, whatever the layout
    leaves = [t.clone().requires_grad_() for t in (*xs, mean, scale, shift, *([] if residual is None else [residual]))]
    z = norm_act(leaves[:3], *leaves[3:6], leaves[6] if adds else None, relu)
    found: list[torch.Tensor | None] = [z.detach(), *torch.autograd.grad(z, leaves, grad)]
    plain, exact = (
        _by_hand(xs, [mean, scale, shift], residual, relu, grad, dtype) for dtype in (torch.float32, torch.float64)
    )
    names = ("z", "x", "x1", "x2", "mean", "scale", "shift", "residual")[: len(found)]
    assert_no_worse(names, found, plain, exact, dict.fromkeys(("mean", "scale", "shift"), (3 * 9 * 7) ** 0.5))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_of_a_slice_of_channels_and_from_a_gradient_that_was_expanded(layout: torch.memory_format) -> None:
    whole = _leaf(2, 9, 5, 6, seed=1, dtype=torch.float32).detach().contiguous(memory_format=layout)
    mean, scale, shift = (_leaf(4, seed=seed, dtype=torch.float32).detach() for seed in (2, 3, 4))
    part = whole[:, 2:6].requires_grad_()
    z = norm_act([part], mean, scale, shift)
    assert z.is_contiguous(memory_format=layout)
    (found,) = torch.autograd.grad(z.mean((2, 3)).sum(), part)
    expected = ((part - row(mean)) * row(scale) + row(shift)).relu()
    torch.testing.assert_close(z, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.mean((2, 3)).sum(), part)[0])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("relu", [False, True])
def test_activated_and_its_backward_are_norm_act_without_autograd(layout: torch.memory_format, relu: bool) -> None:
    x = _leaf(2, 5, 3, 4, seed=1, dtype=torch.float32).detach().contiguous(memory_format=layout)
    vectors = [_leaf(5, seed=seed, dtype=torch.float32) for seed in (2, 3, 4)]
    grad, leaf = torch.ones_like(x), x.clone().requires_grad_()
    z = norm_act([leaf], *vectors, None, relu)
    expected = torch.autograd.grad(z, [leaf, *vectors], grad)
    plain = NormAffine(*(vector.detach() for vector in vectors))
    torch.testing.assert_close(activated(x, plain, relu, torch.float32), z.detach())
    assert activated(x, plain, relu, torch.bfloat16).dtype == torch.bfloat16
    of_x, of_vectors = activated_backward(grad, x, plain, relu, [True, True])
    assert of_x is not None and of_vectors is not None
    for found, other in zip((of_x, *of_vectors), expected, strict=True):
        torch.testing.assert_close(found, other)
    assert activated_backward(grad, x, plain, relu, [False, False]) == (None, None)
    assert torch.equal(activated(x, None, True, torch.float32), x.relu())
