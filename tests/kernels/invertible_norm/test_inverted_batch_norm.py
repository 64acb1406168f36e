"""Batch norm and activation that save their result only: the plain formula's values, gradients and statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.kernels import pieces
from shoal.kernels.invertible_norm.inverted_norms import BATCH_NORM, kept_from_zero, reconstruction_error, run
from shoal.kernels.norm.norm_operands import Activation
from shoal.lowlevel import allocations

LAYERS: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
ACTIVATIONS = [("leaky_relu", 0.01), ("leaky_relu", 0.3), ("elu", 1.0), ("elu", 0.5), ("identity", 1.0)]
ops = torch.ops.shoal


def activated(z: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    if activation == "identity":
        return z
    return F.elu(z, slope) if activation == "elu" else F.leaky_relu(z, slope)


def plain(layer: Any, x: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    """The same in PyTorch's ops, which save whatever they like."""
    again = copy.copy(layer)
    again._parameters = dict(layer._parameters)
    if layer.weight is not None:
        weight = layer.weight
        scale = weight + torch.where(weight < 0, -layer.eps, layer.eps)
        del again._parameters["weight"]
        again.weight = scale
    return activated(again(x), activation, slope)


def layout(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    if not channels_last or x.dim() < 4:
        return x
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def layer_for(x: torch.Tensor, seed: int = 0, **options: Any) -> Any:
    layer = LAYERS[x.dim()](x.shape[1], dtype=x.dtype, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


@st.composite
def inputs(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A batch (N, C, ...) of no to three spatial dimensions, in either layout, now and then far from 0."""
    spatial = draw(st.lists(st.integers(1, 6), max_size=3))
    shape = (draw(st.integers(2, 4)), draw(st.integers(1, 20)), *spatial)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) + draw(st.sampled_from([0.0, 0.5, -20.0]))
    return layout(x.to(dtype), draw(st.booleans()))


def trained(
    call: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, activation: str, slope: float
) -> list[torch.Tensor]:
    """Result, gradients and buffers of one step."""
    x = x.detach().requires_grad_()
    y = call(layer, x, activation, slope)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype)
    gradients = torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])
    return [y.detach(), *gradients, *layer.buffers()]


@settings(max_examples=50)
@given(inputs(torch.float64), st.sampled_from(ACTIVATIONS), st.integers(0, 99), st.booleans(), st.booleans())
def test_it_is_the_plain_formula_forward_and_backward(
    x: torch.Tensor, activation: tuple[str, float], seed: int, affine: bool, training: bool
) -> None:
    layer = layer_for(x, seed, affine=affine).train(training)
    layer.running_mean.fill_(0.25)
    theirs = copy.deepcopy(layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "TILE_ELEMS", 1 + seed)
        found = trained(run, layer, x, *activation)
    expected = trained(plain, theirs, x, *activation)
    # Normalised values of few elements can be anything up to eps^-1/2 apart; reconstruction is exact to digits of y.
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-7, atol=1e-7)
    assert found[0].stride() == x.stride() or x.numel() == 0


@settings(max_examples=50)
@given(inputs(), st.sampled_from(ACTIVATIONS[:-1]), st.integers(0, 99))
def test_in_float32_it_is_about_as_close_to_float64_as_pytorch_is(
    x: torch.Tensor, activation: tuple[str, float], seed: int
) -> None:
    layer = layer_for(x, seed)
    with torch.no_grad():
        layer.weight.copy_(kept_from_zero(layer.weight, 0.1))  # smaller ones have a law of their own
    exact = trained(plain, copy.deepcopy(layer).double(), x.double(), *activation)
    theirs = trained(plain, copy.deepcopy(layer), x, *activation)
    ours = trained(run, copy.deepcopy(layer), x, *activation)
    for name, mine, other, right in zip(("y", "x", "weight", "bias", "mean", "variance"), ours, theirs, exact):  # noqa: B905
        scale = right.abs().max().clamp(min=1e-3)
        if name == "x" and x.numel() // x.shape[1] <= 4:
            continue  # nearly all cancels: both are noise
        allowed = 4 * (other.double() - right).abs().max() + 1e-4 * scale
        assert (mine.double() - right).abs().max() <= allowed, name


@st.composite
def hard_cases(draw: st.DrawFn) -> tuple[torch.Tensor, Any]:
    """A batch, often of one image, and a layer: channels that fill no vector, means up to a thousand deviations away,
    scales of either sign down to none."""
    channels = draw(st.sampled_from([1, 3, 7, 17, 33, 65, 513]))
    shape = (draw(st.sampled_from([1, 1, 2, 5])), channels, draw(st.integers(2, 9)), draw(st.integers(2, 9)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    deviation = 10 ** draw(st.floats(-2, 2))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * deviation
    x = (x + deviation * draw(st.sampled_from([0.0, 1.0, -30.0, 1e3]))).float()
    layer = layer_for(x, draw(st.integers(0, 9999)), eps=1e-5 * deviation**2)
    with torch.no_grad():
        layer.weight[:: draw(st.sampled_from([2, 3, 1000]))] *= draw(st.sampled_from([-1.0, 0.0, 1e-3, -1e-6]))
    return layout(x, draw(st.booleans())), layer


@settings(max_examples=50)
@given(hard_cases(), st.sampled_from(ACTIVATIONS))
def test_gradients_are_off_by_no_more_than_pytorch_s_and_what_the_bound_tells(
    case: tuple[torch.Tensor, Any], activation: tuple[str, float]
) -> None:
    x, layer = case
    rows, dims = x.numel() // x.shape[1], (0, 2, 3)
    wide = copy.deepcopy(layer).double()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    y = plain(copy.deepcopy(wide), x.double(), *activation)
    weights *= (y.abs() > 1e-3 * y.abs().amax(dims, keepdim=True)).float()  # which side of the kink is no error

    def gradients(call: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
        layer, x = copy.deepcopy(layer), x.detach().requires_grad_()
        return list(torch.autograd.grad(call(layer, x, *activation), [x, *layer.parameters()], weights.to(x.dtype)))

    exact = gradients(plain, wide, x.double())
    theirs, ours = gradients(plain, layer, x), gradients(run, layer, x)
    inexact = reconstruction_error(
        kept_from_zero(layer.weight.double(), layer.eps), layer.bias, activation[0], torch.float32
    )
    # What each channel's gradients can be off where each normalised input is off by that.
    summed = weights.abs().double().sum(dims)
    gamma_invstd = kept_from_zero(wide.weight.detach(), layer.eps).abs() / x.double().std(dims, correction=0)
    told = [gamma_invstd * inexact * (exact[1].abs() + 6 * summed) / rows, inexact * summed, torch.zeros(())]
    if activation[0] == "elu":  # its slope is another where z is, and that is as inexact as the mean's rounding
        misplaced = 2**-23 * gamma_invstd * x.double().mean(dims).abs()
        most = weights.abs().double().amax(dims)
        told = [told[0] + 40 * gamma_invstd * misplaced * most, told[1] + 6 * misplaced * summed, misplaced * summed]
    for name, mine, other, right, bound in zip(("x", "weight", "bias"), ours, theirs, exact, told, strict=True):
        allowed = (other.double() - right).abs().max() + bound.max() + 3e-6 * right.abs().max()
        assert (mine.double() - right).abs().max() <= allowed, name


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(4, 3), (1, 2, 4), (3, 2, 4), (2, 3, 3, 2), (2, 2, 3, 2, 2)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_its_gradients_are_those_of_finite_differences(
    activation: tuple[str, float], shape: tuple[int, ...], overwrite: bool
) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    layer = layer_for(x, track_running_stats=False)
    weight, bias = (parameter.detach().requires_grad_() for parameter in layer.parameters())

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        layer._parameters = {"weight": weight, "bias": bias}
        return run(layer, x * 1.0, *activation, overwrite)

    assert torch.autograd.gradcheck(call, (x, weight, bias))


@pytest.mark.parametrize("weight", [0.0, 1e-7, -1e-7])
def test_a_scale_at_zero_is_kept_from_it_and_has_a_gradient(weight: float) -> None:
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    layer = layer_for(x)
    nn.init.constant_(layer.weight, weight)
    found = trained(run, layer, x, "leaky_relu", 0.01)
    expected = trained(plain, copy.deepcopy(layer), x, "leaky_relu", 0.01)
    assert all(ours.isfinite().all() for ours in found)
    for ours, other in zip(found[:4], expected[:4], strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-9)
    assert found[2].abs().min() > 0


@settings(max_examples=100)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(ACTIVATIONS),
    st.floats(-4, 4),
    st.floats(-4, 1),
    st.integers(0, 999),
)
def test_what_is_made_again_is_within_the_bound(
    dtype: torch.dtype, activation: tuple[str, float], shift: float, scale_exponent: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    normalised = (torch.rand(1000, generator=generator, dtype=torch.float64) * 2 - 1) * 4
    weight = torch.tensor([10.0**scale_exponent]) * (-1) ** seed
    bias = torch.tensor([shift])
    scale = kept_from_zero(weight.double(), 1e-5)
    bound = reconstruction_error(scale, bias, activation[0], dtype)
    y = activated(normalised * scale + bias.double(), *activation).to(dtype).float()
    z = Activation(*activation).undone(y)
    again = (z - bias) * (1 / scale).float()
    error = (again.double() - normalised).abs().max()
    if dtype == torch.float16 and activation[0] == "leaky_relu":
        error = error - 1e-3 / float(scale.abs())  # its smallest numbers have few digits
    if activation[0] != "elu" or bound < 0.1:  # where ELU is flat the bound is infinite for what it is worth
        assert error <= bound


def test_the_bound_grows_with_shift_over_scale() -> None:
    weight, bias = torch.tensor([1.0, 0.1, 0.01, 0.0]), torch.ones(4)
    errors = reconstruction_error(kept_from_zero(weight.double(), 1e-5), bias, "leaky_relu", torch.float32)
    assert errors[0] < errors[1] < errors[2] < errors[3]
    assert errors[3] / errors[1] == pytest.approx(1e4 / 1.4, rel=0.1)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_statistics_move_as_batch_norms_do(momentum: float | None, dtype: torch.dtype) -> None:
    batches = [torch.randn(4, 3, 5, 5, dtype=dtype) * 2 + 3 for _ in range(10)]
    ours, theirs = (nn.BatchNorm2d(3, momentum=momentum, dtype=dtype) for _ in range(2))
    for batch in batches:
        run(ours, batch, "leaky_relu", 0.01)
        theirs(batch)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def test_without_running_statistics_eval_mode_takes_the_batch_s() -> None:
    x = torch.randn(4, 3, 5)
    layer = nn.BatchNorm1d(3, track_running_stats=False).eval()
    torch.testing.assert_close(run(layer, x, "identity", 1.0), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1), (1, 3, 1)])
def test_a_single_value_per_channel_is_refused_as_by_the_layer(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    layer = layer_for(x)
    with pytest.raises(ValueError) as theirs:
        layer(x)
    with pytest.raises(ValueError) as ours:
        run(layer, x, "leaky_relu", 0.01)
    assert str(ours.value) == str(theirs.value)
    assert run(layer.eval(), x, "leaky_relu", 0.01).shape == shape


def test_other_dimensions_are_refused_as_by_the_layer() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        run(nn.BatchNorm2d(3), torch.randn(4, 3, 5), "leaky_relu", 0.01)


@pytest.mark.parametrize("overwrite", [False, True])
def test_only_the_result_and_vectors_are_saved(overwrite: bool) -> None:
    x = torch.randn(4, 8, 6, 6, requires_grad=True) * 1.0
    layer, saved = nn.BatchNorm2d(8), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = run(layer, x, "leaky_relu", 0.01, overwrite)
    assert sorted(t.numel() for t in saved) == [8, 8, 8, y.numel()]
    assert {t.data_ptr() for t in saved if t.numel() > 8} == {y.data_ptr()}
    assert (y.data_ptr() == x.data_ptr()) == overwrite


def test_a_leaf_and_a_view_are_not_written_over() -> None:
    layer = nn.BatchNorm2d(8)
    leaf = torch.randn(4, 8, 6, 6, requires_grad=True)
    view = (leaf * 1.0).view(4, 8, 6, 6)
    for x in (leaf, view):
        before = x.detach().clone()
        run(layer, x, "leaky_relu", 0.01, overwrite=True)
        assert torch.equal(x, before)


def test_who_else_needs_what_was_written_over_is_told_by_autograd() -> None:
    x = torch.randn(4, 8, 6, 6, requires_grad=True).exp()  # saves its result
    y = run(nn.BatchNorm2d(8), x, "leaky_relu", 0.01, overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the second has no native kernel
@pytest.mark.parametrize("channels_last", [False, True])
def test_no_more_is_allocated_than_the_result_and_some_pieces(
    channels_last: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "TILE_ELEMS", 512)
    x, grad = (layout(torch.randn(8, 16, 12, 12, dtype=dtype), channels_last) for _ in range(2))
    small_bytes = (
        4 * dtype.itemsize * 16 * 12 * 12 + 20 * 8 * 16
    )  # four pieces, of one image each at least, and vectors
    arguments = (torch.ones(16, dtype=dtype), torch.zeros(16, dtype=dtype))
    options = (1e-5, "leaky_relu", 0.01)
    taken = x.clone()
    (y, _, variance), changes = allocations.record(lambda: BATCH_NORM.forward_(taken, *arguments, None, None, *options))
    assert y.data_ptr() == taken.data_ptr()
    assert allocations.peak_bytes(changes) <= small_bytes
    deviation = torch.rsqrt(variance + 1e-5)
    expected = ops.inverted_batch_norm_backward(grad, y, *arguments, deviation, False, *options)
    found, changes = allocations.record(lambda: BATCH_NORM.backward_(grad, y, *arguments, deviation, False, *options))
    assert found[0].data_ptr() == grad.data_ptr()
    assert allocations.peak_bytes(changes) <= small_bytes
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_half_precision_has_statistics_in_float32(dtype: torch.dtype, channels_last: bool) -> None:
    x = layout((torch.randn(8, 6, 7, 7) + 2).to(dtype), channels_last)
    layer = nn.BatchNorm2d(6)
    exact = trained(plain, nn.BatchNorm2d(6).double(), x.double(), "leaky_relu", 0.1)
    found = trained(run, layer, x, "leaky_relu", 0.1)
    assert [t.dtype for t in found] == [dtype, dtype, *[torch.float32] * 4, torch.int64]
    torch.testing.assert_close(found[4].double(), exact[4], rtol=1e-5, atol=1e-5)
    for ours, right in zip(found[:4], exact[:4], strict=True):
        assert (ours.double() - right).abs().max() <= 0.02 * right.abs().max()


def test_under_autocast_the_result_keeps_the_convolution_s_dtype() -> None:
    x, conv, layer = torch.randn(4, 3, 8, 8), nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(layer, conv(x), "leaky_relu", 0.01, overwrite=True)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert conv.weight.grad is not None and conv.weight.grad.isfinite().all()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("activation", ACTIVATIONS[::2])
@pytest.mark.parametrize("training", [False, True])
def test_compiled_it_is_one_op_and_the_same(activation: tuple[str, float], training: bool) -> None:
    x = torch.randn(2, 3, 5, 5)
    layer = layer_for(x, momentum=None if training else 0.1).train(training)
    ours, theirs = copy.deepcopy(layer), copy.deepcopy(layer)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for found, expected in zip(
        trained(compiled, ours, x, *activation), trained(run, theirs, x, *activation), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_whoever_traces_sees_the_ops() -> None:
    layer = nn.BatchNorm2d(3).eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = run(layer, x * 1.0, "leaky_relu", 0.1, overwrite=True)
        return torch.autograd.grad(y.sum(), x)[0]

    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    traced = make_fx(step, tracing_mode="real")(x)
    targets = {node.target for node in traced.graph.nodes}
    assert {ops.inverted_batch_norm.default, ops.inverted_batch_norm_backward.default} <= targets
    torch.testing.assert_close(traced(x + 1), step((x + 1).detach().requires_grad_()))


def test_the_ops_keep_to_the_rules_of_custom_ops() -> None:
    x = layout(torch.randn(2, 3, 4, 4), True).requires_grad_()
    weight, bias = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    for vectors in (
        (weight, bias, None, None),
        (None, None, None, None),
        (weight, bias, torch.zeros(3), torch.ones(3)),
    ):
        torch.library.opcheck(ops.inverted_batch_norm.default, (x, *vectors, 1e-5, "leaky_relu", 0.1))


def test_under_checkpointing_the_gradients_are_the_same_and_statistics_move_once() -> None:
    conv, layer, x = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), torch.randn(2, 3, 8, 8)

    def block(x: torch.Tensor) -> torch.Tensor:
        return run(layer, conv(x), "leaky_relu", 0.01, overwrite=True)

    parameters = [*conv.parameters(), *layer.parameters()]
    expected = torch.autograd.grad(block(x).square().sum(), parameters)
    once = copy.deepcopy(layer.state_dict())
    layer.reset_running_stats()
    found = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).square().sum(), parameters)
    assert all(torch.equal(value, once[name]) for name, value in layer.state_dict().items())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_gradient_that_is_expanded_or_of_another_layout_is_taken_too() -> None:
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    layer = layer_for(x)
    (ours,), (theirs,) = (
        torch.autograd.grad(call(copy.deepcopy(layer), layout(x, True), "leaky_relu", 0.1).sum(), x)
        for call in (run, plain)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    expected = trained(plain, copy.deepcopy(layer), x.transpose(2, 3), "leaky_relu", 0.1)
    found = trained(run, copy.deepcopy(layer), x.transpose(2, 3), "leaky_relu", 0.1)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(run(nn.BatchNorm2d(3), x, "elu", 1.0).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_an_empty_batch_and_a_transform_of_torch_func_have_the_same_function() -> None:
    layer = nn.BatchNorm2d(3).double().eval()
    with torch.no_grad():
        layer.weight.uniform_(-1, 1)
        layer.bias.uniform_(-1, 1)
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)

    def one(image: torch.Tensor) -> torch.Tensor:
        return run(layer, image.unsqueeze(0), "leaky_relu", 0.1).squeeze(0)

    torch.testing.assert_close(torch.func.vmap(one)(x), run(layer, x, "leaky_relu", 0.1))
    assert run(layer, x[:0], "elu", 1.0).shape == (0, 3, 2, 2)
