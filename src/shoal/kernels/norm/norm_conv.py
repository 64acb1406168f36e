"""`shoal::norm_conv`: a convolution that normalises its input, applies ReLU, and computes the statistics of its output.

Batch norm split in two (Jung et al., MLSys'19, section 3): the statistics of a convolution's result come from the
convolution, and the normalisation happens where the next one reads. The backward pass recomputes the normalised
tensor, so that it is never saved. Gradients of the statistics are summed over all their readers by autograd and reach
the producer as two vectors, one affine map for all; but not those of tensors narrower than float32, see `norm_act`.

The reference here is PyTorch's own kernels around its convolution; `norm_conv_native` runs where it applies and pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shoal.kernels.memory_format import dense_in_format, memory_format_of, suggested_memory_format
from shoal.kernels.norm import norm_conv_native
from shoal.kernels.norm.norm_act import activated, activated_backward, joined, own_variance, parted, parted_fake
from shoal.kernels.norm.norm_conv_native import ConvWindow, NormConv, weight_grad, weight_grad_applies, weight_grad_pays
from shoal.kernels.norm.norm_operands import affine_of, by_channel, wide
from shoal.kernels.norm.norm_rows import native_row_stride
from shoal.kernels.norm.statistics import MeasuredNorm, detached_statistics, is_narrow, measure, whole_gradient
from shoal.lowlevel.direct_call import in_places, register_op
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register

_aten = torch.ops.aten
_ONTO = 17  # place of an operand of the backward op
_Vector = Tensor | None

_FORWARD: DispatchedOp[ModuleType | None] = register(
    "norm_conv",
    None,
    Implementation("native", norm_conv_native, norm_conv_native.applies, norm_conv_native.forward_pays),
)
_BACKWARD: DispatchedOp[ModuleType | None] = register(
    "norm_conv_backward",
    None,
    Implementation("native", norm_conv_native, norm_conv_native.applies, norm_conv_native.backward_pays),
)
# Of the backward pass where that one does not run.
_WEIGHT_GRAD: DispatchedOp[Callable[..., Tensor] | None] = register(
    "norm_conv_weight_grad", None, Implementation("native", weight_grad, weight_grad_applies, weight_grad_pays)
)


def norm_conv(
    xs: Sequence[Tensor],
    mean: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    relu: bool,
    weight: Tensor,
    bias: Tensor | None,
    window: ConvWindow,
    statistics: bool,
    variance: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces `y = conv(relu((torch.cat(xs, 1) - mean) * scale + shift))` and `torch.var_mean(y)`.

    Args:
        xs: tensors of (N, C_i, ...) that are read as one of C = sum of C_i channels; they are saved as they are.
        mean, scale, shift: (C,), in float32 or float64; all None: nothing is normalised.
        relu: whether a ReLU comes before the convolution.
        weight, bias: of the convolution; its dtype is that of the result.
        window: of the convolution.
        statistics: whether mean and biased variance of the result's channels are wanted.
        variance, eps: as for `norm_act`.

    Returns:
        y, (N, K, ...), and its mean and variance, (K,), in float32 (float64 for float64); (0,) where not wanted.
        Differentiable once; but mean and variance of a y narrower than float32 are numbers that lead back to nothing.

    Under autocast the convolution runs in its dtype, as PyTorch's own does; statistics stay in float32.

    >>> window = ConvWindow([1], [0], [1], 1)
    >>> x, weight, one = torch.tensor([[[1.0, 5.0]]]), torch.ones(1, 1, 1), torch.ones(1)
    >>> norm_conv([x], 3 * one, 2 * one, one, True, weight, None, window, True)
    (tensor([[[0., 5.]]]), tensor([2.5000]), tensor([6.2500]))
    """
    device = weight.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        kind = torch.get_autocast_dtype(device)
        weight, bias = weight.to(kind), None if bias is None else bias.to(kind)
    alone = statistics and is_narrow(weight.dtype)
    rest = statistics and not alone, variance, eps
    y, mean_y, variance_y = _norm_conv(list(xs), mean, scale, shift, relu, weight, bias, *window, *rest)
    if alone:
        mean_y, variance_y = detached_statistics(y)
    return y, mean_y, variance_y


def convolve(x: Tensor, layer: NormConv, statistics: bool, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_conv` of one tensor without autograd; the result goes to `out` where there is one."""
    affine, relu, weight, bias, window, _ = layer
    native = choose(_FORWARD, x, weight, bias, window)
    if native is not None:
        rows = out if out is not None and native_row_stride(out) is not None else None
        y, mean_y, variance_y = native.forward(x, layer, statistics, out=rows)
        return y if out is None or out is rows else out.copy_(y), mean_y, variance_y
    a = activated(x, affine, relu, weight.dtype)
    y = torch.convolution(a, weight, bias, *window.options)
    del a
    nothing = y.new_empty(0, dtype=wide(y.dtype))
    mean_y, variance_y = measure(y) if statistics else (nothing, torch.empty_like(nothing))
    return y if out is None else out.copy_(y), mean_y, variance_y


def runs_winograd(x: Tensor, weight: Tensor, bias: Tensor | None, window: ConvWindow) -> bool:
    """Whether `convolve` is native here and uses Winograd's algorithm."""
    return choose(_FORWARD, x, weight, bias, window) is not None and norm_conv_native.winograd_pays(x, weight)


def _forward(
    xs: list[Tensor], mean: _Vector, scale: _Vector, shift: _Vector, relu: bool, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    bias, *moves, statistics = rest[:6]
    window, x = ConvWindow(*moves), joined(xs)
    layer = NormConv(affine_of(mean, scale, shift), relu, weight, bias, window)
    y, mean_y, variance_y = convolve(x, layer, statistics)
    if choose(_FORWARD, x, weight, bias, window) is not None:
        read = memory_format_of(x) if relu or mean is not None else suggested_memory_format(x)
        y = dense_in_format(y, suggested_memory_format(weight) if read == torch.contiguous_format else read)
    return y, mean_y, variance_y


def _forward_fake(
    xs: list[Tensor], mean: _Vector, scale: _Vector, shift: _Vector, relu: bool, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    bias, *moves, statistics = rest[:6]
    a = joined(xs).to(weight.dtype)
    if relu or mean is not None:
        a = torch.empty_like(a, memory_format=memory_format_of(a))
    # In the layout that PyTorch's own has, which depends on dtype, sizes and the kernel that it chooses.
    y = torch.convolution(a, weight, bias, *ConvWindow(*moves).options)
    channels = y.shape[1] if statistics else 0
    return y, y.new_empty(channels, dtype=wide(y.dtype)), y.new_empty(channels, dtype=wide(y.dtype))


def _backward(*arguments: Any) -> list[Tensor]:
    operands = _with_defaults(arguments)
    if operands[_ONTO] is not None:
        operands[_ONTO] = operands[_ONTO].clone(memory_format=memory_format_of(operands[_ONTO]))
    return backward_onto(*operands)


def _with_defaults(operands: Sequence[Any]) -> list[Any]:
    """Those of the backward op, of which a call may leave out the last."""
    return [*operands, *(None, None, None, 0.0)[len(operands) - _ONTO + 1 :]]


def backward_onto(*operands: Any) -> list[Tensor]:
    """`norm_conv_backward` of the same operands, which writes over `onto`.

    What is needed comes in the order of `needs`: of xs, of the vectors, of the weight, of the bias. `onto` is what the
    gradient of a single x is added to; it is the first result.
    """
    given = _with_defaults(operands)
    grad, of_mean, of_variance, xs, y, mean_y, *vectors, relu, weight = given[:11]
    *moves, needs, factor, onto, variance, eps = given[11:]
    measured = (
        None if y is None or of_mean is None or of_variance is None else MeasuredNorm(y, mean_y, of_mean, of_variance)
    )
    layer = NormConv(affine_of(*vectors), relu, weight, None, ConvWindow(*moves), own_variance(variance, eps))
    of_x, *of_vectors, of_weight, of_bias = convolve_backward(grad, measured, joined(xs), layer, needs, onto, factor)
    found = [] if of_x is None else parted(of_x, xs)
    if of_weight is not None:
        of_weight = dense_in_format(of_weight, suggested_memory_format(weight))
    return found + [gradient for gradient in (*of_vectors, of_weight, of_bias) if gradient is not None]


def convolve_backward(
    grad: Tensor,
    measured: MeasuredNorm | None,
    x: Tensor,
    layer: NormConv,
    needs: Sequence[bool],
    grad_x: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of `convolve`: of x, mean, scale, shift, weight and bias, None for what `needs` leaves out.

    Args:
        needs: of x, of the three vectors, of the weight, of the bias.
        grad_x: the gradient of x is added to it and it is returned; None: a new tensor.
        factor: (K,), what `grad` is multiplied with; None: nothing.
        The others as for `norm_conv_native.backward`.
    """
    affine, relu, weight, _, window, own = layer
    native = choose(_BACKWARD, x, weight, None, window) if own is None else None
    if native is not None:
        rows = grad_x if grad_x is not None and native_row_stride(grad_x) is not None else None
        of_input, *others = native.backward(grad, measured, x, layer, needs, factor=factor, grad_x=rows)
        if grad_x is not None and grad_x is not rows and of_input is not None:
            of_input = grad_x.add_(of_input)
        return of_input, *others
    if measured is not None:
        grad = whole_gradient(grad, measured, measured.x.dtype, factor)
    elif factor is not None:
        grad = grad * by_channel(factor, grad)
    alone = choose(_WEIGHT_GRAD, x, weight, window) if needs[2] else None
    # The gradient of its input needs but the shape of what was convolved, and the ReLU's the signs.
    a = x if alone is not None else activated(x, affine, relu, weight.dtype)
    through = needs[0] or needs[1]
    sizes, mask = [weight.shape[0]] if needs[3] else None, [through, needs[2] and alone is None, needs[3]]
    da, of_weight, of_bias = _aten.convolution_backward(grad, a, weight, sizes, *window.options, mask)
    if alone is not None:
        of_weight = alone(grad, x, layer)
    del grad
    of_x = da
    vectors: tuple[Tensor | None, ...] | None = None
    if through and affine is not None:
        del a
        of_x, vectors = activated_backward(da, x, affine, relu, needs[:2], own)
    elif through and relu:
        of_x = _aten.threshold_backward(da, a, 0)
    del da
    if grad_x is not None and of_x is not None:
        of_x = grad_x.add_(of_x)
    return (
        of_x if needs[0] else None,
        *(vectors or (None, None, None)),
        of_weight if needs[2] else None,
        of_bias if needs[3] else None,
    )


def _backward_fake(*operands: Any) -> list[Tensor]:
    xs, vectors, weight, needs = operands[3], operands[6:9], operands[10], operands[15]
    found = parted_fake(xs) if needs[0] else []
    found += [torch.empty_like(vector) for vector in vectors if vector is not None] if needs[1] else []
    found += [torch.empty_like(weight)] if needs[2] else []
    return [*found, weight.new_empty(weight.shape[0])] if needs[3] else found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    xs, mean, scale, shift, relu, weight, _, *window, statistics = inputs[:12]
    ctx.n, ctx.relu, ctx.window = len(xs), relu, window
    variance, ctx.eps = own_variance(*inputs[12:]) or (None, 0.0)
    ctx.save_for_backward(*xs, weight, mean, scale, shift, *(output[:2] if statistics else (None, None)), variance)


def _differentiate(ctx: Any, grad: Tensor, of_mean: Tensor, of_variance: Tensor) -> tuple[Any, ...]:
    *xs, weight, mean, scale, shift, y, mean_y, variance = ctx.saved_tensors
    of_xs, *of_vectors = ctx.needs_input_grad[:4]
    of_weight, of_bias = ctx.needs_input_grad[5:7]
    needs = [any(of_xs), any(of_vectors), of_weight, of_bias]
    of_statistics = (None, None) if y is None else (of_mean, of_variance)
    operands = grad, *of_statistics, xs, y, mean_y, mean, scale, shift, ctx.relu, weight, *ctx.window, needs
    found = _norm_conv_backward(*operands, None, None, variance, ctx.eps)
    grads = in_places(found, [*[needs[0]] * ctx.n, *[needs[1]] * 3, of_weight, of_bias])
    of_affine, of_layer = grads[ctx.n : -2], grads[-2:]
    return grads[: ctx.n], *of_affine, None, *of_layer, *[None] * (len(ctx.needs_input_grad) - 7)


_norm_conv = register_op(
    "norm_conv(Tensor[] xs, Tensor? mean, Tensor? scale, Tensor? shift, bool relu, Tensor weight, Tensor? bias,"
    " SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, bool statistics, Tensor? variance=None,"
    " float eps=0.0)"
    " -> (Tensor, Tensor, Tensor)",
    *(_forward, _forward_fake, _setup, _differentiate),
)
_norm_conv_backward = register_op(
    "norm_conv_backward(Tensor grad, Tensor? of_mean, Tensor? of_variance, Tensor[] xs, Tensor? y, Tensor? mean_y,"
    " Tensor? mean, Tensor? scale, Tensor? shift, bool relu, Tensor weight, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, SymInt groups, bool[] needs, Tensor? factor=None, Tensor? onto=None, Tensor? variance=None,"
    " float eps=0.0) -> Tensor[]",
    *(_backward, _backward_fake),
)


@register_flop_formula(torch.ops.shoal.norm_conv, get_raw=True)
def _flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    weight, y = args[5], out_val[0]
    return 2 * y.numel() * (weight.numel() // max(weight.shape[0], 1))


@register_flop_formula(torch.ops.shoal.norm_conv_backward, get_raw=True)
def _backward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    grad, weight, needs = args[0], args[10], args[15]
    one_way = 2 * grad.numel() * (weight.numel() // max(weight.shape[0], 1))
    return one_way * ((needs[0] or needs[1]) + needs[2]) + (grad.numel() if needs[3] else 0)
