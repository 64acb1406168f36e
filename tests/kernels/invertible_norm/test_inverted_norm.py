"""Instance norm and group norm with an activation that save their result only: PyTorch's values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.kernels import pieces
from shoal.kernels.invertible_norm.inverted_norms import MIN_SCALE, SAMPLE_NORM, at_least, reconstruction_error, run

ACTIVATIONS = [("leaky_relu", 0.01), ("leaky_relu", 0.3), ("elu", 1.0), ("elu", 0.5), ("identity", 1.0)]
INSTANCE: dict[int, Any] = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
ops = torch.ops.shoal


def activated(z: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    if activation == "identity":
        return z
    return F.elu(z, slope) if activation == "elu" else F.leaky_relu(z, slope)


def plain(layer: nn.Module, x: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    return activated(layer(x), activation, slope)


def layout(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    if not channels_last or x.dim() < 4:
        return x
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Any]:
    """A batch (N, C, ...) of one to three spatial dimensions, in either layout, and a norm of its samples."""
    in_group, groups = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    spatial = draw(st.lists(st.integers(2, 7), min_size=1, max_size=3))
    shape, seed = (draw(st.integers(1, 3)), in_group * groups, *spatial), draw(st.integers(0, 9999))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) + draw(st.sampled_from([0.0, 0.5, -20.0]))
    affine = draw(st.booleans())
    layer: Any
    if draw(st.booleans()):
        layer = INSTANCE[x.dim()](shape[1], affine=affine, dtype=dtype)
    else:
        layer = nn.GroupNorm(groups, shape[1], affine=affine, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(torch.where(drawn < 0, drawn - 0.1, drawn + 0.1))
    return layout(x.to(dtype), draw(st.booleans())), layer


def step(call: Any, layer: nn.Module, x: torch.Tensor, activation: str, slope: float) -> list[torch.Tensor]:
    """Result and gradients."""
    x = x.detach().requires_grad_()
    y = call(layer, x, activation, slope)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])]


@settings(max_examples=60)
@given(cases(torch.float64), st.sampled_from(ACTIVATIONS), st.integers(0, 99))
def test_it_is_pytorch_s_norm_and_activation_forward_and_backward(
    case: tuple[torch.Tensor, Any], activation: tuple[str, float], seed: int
) -> None:
    x, layer = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "TILE_ELEMS", 1 + seed)
        found = step(run, layer, x, *activation)
    for ours, other in zip(found, step(plain, layer, x, *activation), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-7, atol=1e-7)
    assert found[0].stride() == x.stride()


@settings(max_examples=60)
@given(cases(), st.sampled_from(ACTIVATIONS[:-1]))
def test_in_float32_it_is_about_as_close_to_float64_as_pytorch_is(
    case: tuple[torch.Tensor, Any], activation: tuple[str, float]
) -> None:
    x, layer = case
    exact = step(plain, copy.deepcopy(layer).double(), x.double(), *activation)
    theirs, ours = step(plain, layer, x, *activation), step(run, layer, x, *activation)
    in_group = x[0].numel() // getattr(layer, "num_groups", x.shape[1])
    for name, mine, other, right in zip(("y", "x", "weight", "bias"), ours, theirs, exact):  # noqa: B905
        if name == "x" and in_group <= 4:
            continue  # nearly all cancels: both are noise
        scale = right.abs().max().clamp(min=1e-3)
        allowed = 4 * (other.double() - right).abs().max() + 1e-4 * scale
        assert (mine.double() - right).abs().max() <= allowed, name


@settings(max_examples=30)
@given(cases(), st.sampled_from(ACTIVATIONS[:-1]))
def test_over_its_operands_it_gives_the_same_bits(
    case: tuple[torch.Tensor, Any], activation: tuple[str, float]
) -> None:
    x, layer = case
    groups = getattr(layer, "num_groups", x.shape[1])
    vectors = [None if one is None else one.detach() for one in (layer.weight, layer.bias)]
    y, mean, invstd = ops.inverted_norm(x, *vectors, groups, 1e-5, *activation)
    over = x.clone()
    assert all(map(torch.equal, SAMPLE_NORM.forward_(over, *vectors, groups, 1e-5, *activation), (y, mean, invstd)))
    assert torch.equal(over, y)
    grad = torch.randn_like(y)
    gradients = ops.inverted_norm_backward(grad, y, *vectors, invstd, *activation)
    assert all(map(torch.equal, SAMPLE_NORM.backward_(grad, y, *vectors, invstd, *activation), gradients))
    assert torch.equal(grad, gradients[0])


@settings(max_examples=40)
@given(cases(), st.integers(0, 2))
def test_what_was_normalised_is_made_again_as_exactly_as_is_promised(
    case: tuple[torch.Tensor, Any], small: int
) -> None:
    """The gradient of a scale is the sum of grad * xhat, so that a gradient of one element reads xhat there."""
    x, layer = case
    if layer.weight is None:
        return
    with torch.no_grad():
        layer.weight[0] = (1e-3, 1e-7, 0.0)[small]
    groups = getattr(layer, "num_groups", x.shape[1])
    y, mean, invstd = ops.inverted_norm(x, layer.weight, layer.bias, groups, layer.eps, "leaky_relu", 0.1)
    grad = torch.zeros_like(y)
    grad[0, 0].view(-1)[0] = 1
    slope_there = 1.0 if y[0, 0].reshape(-1)[0] > 0 else 0.1
    found = ops.inverted_norm_backward(grad, y, layer.weight, layer.bias, invstd, "leaky_relu", 0.1)[1][0] / slope_there
    xhat = (x[0, 0].reshape(-1)[0].double() - mean[0, 0]) * invstd[0, 0]
    allowed = reconstruction_error(at_least(layer.weight), layer.bias, "leaky_relu", torch.float32)[0]
    allowed = allowed + 1e-6 * mean.abs().max()
    assert abs(found - xhat) <= allowed * max(1.0, float(xhat.abs()) / 4) + 1e-5


def test_a_scale_of_zero_learns_again() -> None:
    layer = nn.InstanceNorm2d(3, affine=True)
    nn.init.zeros_(layer.weight)
    x = torch.randn(2, 3, 5, 5)
    ours, theirs = step(run, layer, x, "leaky_relu", 0.01), step(plain, layer, x, "leaky_relu", 0.01)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=4 * MIN_SCALE)
    assert ours[2].abs().min() > 0


@pytest.mark.parametrize("channels_last", [False, True])
def test_it_saves_its_result_and_vectors_and_nothing_else(channels_last: bool) -> None:
    layer = nn.InstanceNorm3d(8, affine=True)
    saved: list[torch.Tensor] = []
    x = layout(torch.randn(2, 8, 6, 6, 6), channels_last).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        y = run(layer, x, "leaky_relu", 0.01)
    assert sorted(one.numel() for one in saved) == [8, 8, 16, y.numel()]
    assert any(one.data_ptr() == y.data_ptr() for one in saved)


def test_it_writes_over_its_input_where_it_is_told_to_and_may() -> None:
    layer, x = nn.GroupNorm(2, 4), torch.randn(2, 4, 5, requires_grad=True)
    made = x * 1
    assert run(layer, made, "leaky_relu", 0.01, overwrite=True).data_ptr() == made.data_ptr()
    assert run(layer, x, "leaky_relu", 0.01, overwrite=True).data_ptr() != x.data_ptr()
    transposed = (torch.randn(2, 5, 4, 3, requires_grad=True) * 1).permute(0, 2, 3, 1)[:, :, ::2]
    torch.testing.assert_close(run(layer, transposed, "elu", 1.0, True), F.elu(layer(transposed)))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.InstanceNorm2d(3), (3, 4, 4)),  # without a batch
        (nn.InstanceNorm2d(3), (0, 3, 4, 4)),
        (nn.GroupNorm(3, 6), (4, 6)),
        (nn.GroupNorm(2, 6), (2, 6, 0)),
    ],
)
def test_unusual_inputs_are_taken_as_the_layer_takes_them(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    torch.testing.assert_close(run(layer, x, "leaky_relu", 0.1), F.leaky_relu(layer(x), 0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.InstanceNorm2d(3), (2, 3, 4, 4, 4)),
        (nn.InstanceNorm2d(3), (2, 3, 1, 1)),
        (nn.InstanceNorm2d(3, affine=True), (2, 4, 5, 5)),
        (nn.GroupNorm(2, 4), (2, 3, 5, 5)),
        (nn.GroupNorm(4, 4), (1, 4)),
    ],
)
def test_what_the_layer_refuses_it_refuses_in_the_same_words(layer: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        layer(torch.randn(shape))
    with pytest.raises(theirs.type) as ours:
        run(layer, torch.randn(shape), "leaky_relu", 0.1)  # type: ignore[arg-type]
    assert str(ours.value) == str(theirs.value)


def test_it_runs_under_checkpointing_and_transforms_of_functions() -> None:
    layer, x = nn.GroupNorm(2, 4), torch.randn(3, 4, 5, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return run(layer, x, "leaky_relu", 0.1).square().sum()

    (again,) = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), x)
    torch.testing.assert_close(again, torch.autograd.grad(loss(x), x)[0])
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    layer, x = nn.InstanceNorm3d(4, affine=True), torch.randn(1, 4, 5, 5, 5)
    ours = run(layer, x.to(dtype), "leaky_relu", 0.01)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), F.leaky_relu(layer(x.to(dtype).float())), rtol=1e-2, atol=1e-2)


def test_compilers_see_one_op_in_each_pass() -> None:
    x = torch.randn(2, 6, 5, 5, 5, requires_grad=True)
    torch.library.opcheck(ops.inverted_norm.default, (x, torch.ones(6), None, 3, 1e-5, "leaky_relu", 0.1))
    last = layout(x.detach(), True).requires_grad_()
    torch.library.opcheck(ops.inverted_norm.default, (last, None, torch.ones(6), 6, 1e-5, "elu", 1.0))
