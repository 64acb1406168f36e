"""Convolutions of volumes and their gradients without unfolding: no scratch but a few hundred KiB.

PyTorch's convolutions of volumes on the CPU unfold 27 columns a voxel for a batch of one with few channels, or convert
every tensor into a blocked layout: 91 MiB of scratch for two tensors of 3.4. `csrc/direct_conv.cpp` copies a few padded
rows at a time into a panel that stays in L2 and multiplies from there. An input gradient is a convolution by the turned
filter, one for each remainder along a stride; so is a transposed convolution.

What is convolved may come in parts, as if concatenated along the channels, which then is never done. A result as large
as what is convolved may lie over it: a few planes of depth at a time, of which a copy is read.

The reference is PyTorch's own convolution of the same arguments, of the concatenated parts.

Known limits: five dimensions, float32 or bfloat16 on the CPU, one group, dense results (N, C, D, H, W). Sums are in
another order than PyTorch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import Any

import torch
from torch import Tensor

from shoal.kernels.convolution import ConvOptions
from shoal.kernels.convolution import input_gradient as library_input_gradient
from shoal.kernels.memory_format import in_traced_layout
from shoal.kernels.norm.norm_act import joined
from shoal.kernels.norm.norm_rows import run_in_workspace
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, level_number, register
from shoal.lowlevel.native import fields, has

_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16)
_SLAB_ELEMS = 1 << 18  # 1 MiB of float32
Tensors = Tensor | Sequence[Tensor]


def forward(x: Tensors, weight: Tensor, bias: Tensor | None, *options: Any, over: Tensor | None = None) -> Tensor:
    """Replaces `aten.convolution` of the same arguments; `x` may be parts that lie side by side along the channels.

    Args:
        over: one of them, of the result's shape and dtype, where the result is to be written over it.

    Returns:
        (N, K, D', H', W'), contiguous, of the dtype of `weight`.

    >>> x, weight = torch.ones(1, 2, 3, 3, 3), torch.ones(1, 2, 3, 3, 3)
    >>> three = [1, 1, 1]
    >>> forward([x[:, :1], x[:, 1:]], weight, None, three, three, three, False, [0, 0, 0], 1)[0, 0, 1]
    tensor([[24., 36., 24.],
            [36., 54., 36.],
            [24., 36., 24.]])
    """
    parts, given = _parts(x), ConvOptions(*options)
    if not choose(_OP, *parts, weight, bias):
        whole: Tensor = _aten.convolution(joined(parts), weight, bias, *given).contiguous()
        return whole if over is None else over.copy_(whole)
    if over is not None:
        return _over(parts, over, weight, bias, _windows(over, weight, given))
    stride, padding, dilation, transposed, extra, _ = given
    sizes = [
        (n - 1) * s - 2 * p + d * (k - 1) + 1 + e if transposed else (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d, e in zip(parts[0].shape[2:], weight.shape[2:], stride, padding, dilation, extra, strict=True)
    ]
    result = weight.new_empty((parts[0].shape[0], weight.shape[1 if transposed else 0], *sizes))
    for place, (part, of_part) in enumerate(_with_weights(parts, weight, 0 if transposed else 1)):
        own = (part, of_part, None if place else bias, given, result, place > 0)
        _scatter(*own) if transposed else _gather(*own)
    return result


def input_gradient(
    grad: Tensor, weight: Tensor, input_shape: Sequence[int], *rest: Any, over: Tensor | None = None
) -> Tensor:
    """The gradient of a convolution's input, or of the part of it that begins at a channel.

    Args:
        over: `grad`, where the result is of its shape and is to be written over it.
        input_shape: of the part, which is all of the input where it has as many channels.
        rest: options of the convolution, and where the part begins, if not at 0.
        The others as of `convolution.input_gradient`.

    Returns:
        Contiguous.
    """
    options, first = ConvOptions(*rest[: len(ConvOptions._fields)]), rest[len(ConvOptions._fields) :]
    part = weight.narrow(0 if options.transposed else 1, first[0] if first else 0, input_shape[1])
    if not choose(_OP, grad, weight):
        strides = torch.empty(tuple(input_shape), device="meta").stride()
        whole = library_input_gradient(grad, part, input_shape, strides, *options).contiguous()
        return whole if over is None else over.copy_(whole)
    if over is not None:
        sizes = zip(input_shape[2:], part.shape[2:], options.padding, options.dilation, strict=True)
        axes = [next(_phases(size, taps, 1, pad, apart)) for size, taps, pad, apart in sizes]
        return _over([grad], grad, part.transpose(0, 1), None, axes)
    result = grad.new_empty(tuple(input_shape))
    (_gather if options.transposed else _scatter)(grad, part, None, options, result, False)
    return result


def weight_gradient(
    grad: Tensor, x: Tensors, weight: Tensor, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[None, Tensor, Tensor | None]:
    """Replaces `aten.convolution_backward` of the same arguments if the input's gradient is not wanted.

    Args:
        rest: options of the convolution, which gradients are wanted, and the strides of the weight's gradient:
            PyTorch's follow the input's memory format and not the weight's.
    """
    *given, wanted, strides = rest
    options, parts = ConvOptions(*given), _parts(x)
    of_bias = grad.sum((0, 2, 3, 4)) if wanted[2] else None
    if not choose(_OP, grad, *parts, weight):
        mask = [False, True, False]
        found: Tensor = _aten.convolution_backward(grad, joined(parts), weight, None, *options, mask)[1]
        return None, in_traced_layout(found, strides), of_bias
    of_weight = weight.new_empty_strided(weight.shape, tuple(strides))
    for part, some in _with_weights(parts, of_weight, 0 if options.transposed else 1):
        source, onto = (grad, part) if options.transposed else (part, grad)
        _gradient_of_weight(source, onto, some, options)
    return None, of_weight, of_bias


def applies(*operands: Tensor | None) -> bool:
    """Whether the kernels can do it here: of all that is read. Tensors may be fake."""
    return has("shoal_direct_conv") and all(
        operand.device.type == "cpu"
        and operand.dtype in _DTYPES
        and operand.layout == torch.strided
        and (operand.dim() == 5 or operand.dim() == 1)
        and 0 not in operand.shape
        for operand in operands
        if operand is not None
    )


_OP: DispatchedOp[bool] = register(
    "direct_convolution", False, Implementation("native", True, applies)
)  # whether they do it


class _DirectConvolutionCall(ctypes.Structure):
    """ShoalDirectConv of csrc/shoal_native.h."""

    _fields_ = fields(
        "int64 images in_channels out_channels, int64*3 in_size out_size kernel stride dilation origin,"
        "int64*5 ld_x ld_y ld_weight, int32 x_bfloat16 y_bfloat16 weight_bfloat16 accumulate threads level,"
        "pointer x weight bias y grad_y grad_weight workspace"
    )


@dataclass(frozen=True)
class _Axis:
    """The results along an axis that one call computes: every `step`-th from `first`, `count` of them.

    They read `taps` elements of the filter from `tap` on, every `tap_step`-th, `dilation` apart from `origin` on.
    """

    first: int
    step: int
    count: int
    origin: int
    taps: int
    tap: int
    tap_step: int
    dilation: int


def _gather(x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvOptions, y: Tensor, add: bool) -> None:
    """`y`, or what is added to it: each result reads a window of `x`. `weight` is (out, in, ...)."""
    _convolve(x, weight, bias, options.stride, _windows(y, weight, options), y, add)


def _windows(y: Tensor, weight: Tensor, options: ConvOptions) -> list[_Axis]:
    _, padding, dilation, *_ = options
    sizes = zip(y.shape[2:], weight.shape[2:], padding, dilation, strict=True)
    return [_Axis(0, 1, size, -pad, taps, 0, 1, apart) for size, taps, pad, apart in sizes]


def _scatter(x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvOptions, y: Tensor, add: bool) -> None:
    """`y`, or what is added to it: each element of `x` is spread over a window of it. `weight` is (in, out, ...)."""
    stride, padding, dilation, *_ = options
    of_axis = [
        list(_phases(y.shape[axis + 2], weight.shape[axis + 2], stride[axis], padding[axis], dilation[axis]))
        for axis in range(3)
    ]
    for axes in product(*of_axis):
        if all(axis.taps for axis in axes):
            _convolve(x, weight.transpose(0, 1), bias, (1, 1, 1), axes, y, add)
        elif not add:
            y[_places(axes)] = 0 if bias is None else bias.view(-1, 1, 1, 1)


def _phases(size: int, kernel: int, stride: int, padding: int, dilation: int) -> Iterator[_Axis]:
    """Results i with i + padding = stride * m + r, for each r: they read taps k of k * dilation = r modulo stride."""
    common = gcd(stride, dilation)
    for remainder in range(stride):
        start = -((remainder - padding) // stride)  # the least m of a result
        first = remainder + stride * start - padding
        count = -(-(size - first) // stride) if size > first else 0
        taps = [k for k in range(kernel) if k * dilation % stride == remainder]
        if count == 0:
            continue
        if not taps:
            yield _Axis(first, stride, count, 0, 0, 0, 0, 1)
            continue
        apart = dilation // common
        furthest = (taps[-1] * dilation - remainder) // stride
        yield _Axis(first, stride, count, start - furthest, len(taps), taps[-1], -(stride // common), apart)


def _places(axes: Sequence[_Axis]) -> tuple[slice, ...]:
    return slice(None), slice(None), *(slice(axis.first, None, axis.step) for axis in axes)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], axes: Sequence[_Axis], y: Tensor, add: bool
) -> None:
    """`weight` is (out, in, ...)."""
    into, (over_out, over_in, *tap_strides) = y[_places(axes)], weight.stride()
    own_bias = None if bias is None else bias.to(weight.dtype).contiguous()
    call = _call(x, into, weight, stride, axes)
    call.ld_weight[:] = over_out, over_in, *(s * axis.tap_step for s, axis in zip(tap_strides, axes, strict=True))
    offset = sum(axis.tap * step for axis, step in zip(axes, tap_strides, strict=True))
    call.weight = weight.data_ptr() + offset * weight.element_size()
    call.bias = None if own_bias is None else own_bias.data_ptr()
    call.y, call.accumulate = into.data_ptr(), add
    run_in_workspace("shoal_direct_conv", call, "shoal_direct_conv_workspace_bytes", 0)


def _over(parts: Sequence[Tensor], over: Tensor, weight: Tensor, bias: Tensor | None, axes: Sequence[_Axis]) -> Tensor:
    """The convolution of the parts by `weight`, (out, in, ...), over one of them; a result reads `axes`, stride 1."""
    deep = axes[0]
    depth, before = over.shape[2], max(0, -deep.origin)  # planes that a result reads in front of its own
    behind = max(0, deep.origin + deep.dilation * (deep.taps - 1))
    step = max(1, _SLAB_ELEMS * depth // over.numel())
    last = over[:, :, :0]  # planes in front of what is next, as they were
    for begin in range(0, depth, step):
        end = min(depth, begin + step)
        first = begin - last.shape[2]
        kept = torch.cat([last, over[:, :, begin : min(depth, end + behind)]], 2)
        last = kept[:, :, max(first, end - before) - first : end - first].clone()
        for place, (x, of_part) in enumerate(_with_weights(parts, weight, 1)):
            source, origin = (kept, begin - first) if x is over else (x, begin)
            slab = [replace(deep, count=end - begin, origin=deep.origin + origin), *axes[1:]]
            own_bias = None if place else bias
            _convolve(source, of_part, own_bias, (1, 1, 1), slab, over[:, :, begin:end], place > 0)
        del kept, source
    return over


def _gradient_of_weight(x: Tensor, grad: Tensor, of_weight: Tensor, options: ConvOptions) -> None:
    call = _call(x, grad, of_weight, options.stride, _windows(grad, of_weight, options))
    call.ld_weight[:] = of_weight.stride()
    call.grad_y, call.grad_weight = grad.data_ptr(), of_weight.data_ptr()
    run_in_workspace("shoal_direct_conv_weight_grad", call, "shoal_direct_conv_workspace_bytes", 1)


def _call(x: Tensor, y: Tensor, weight: Tensor, stride: Sequence[int], axes: Sequence[_Axis]) -> _DirectConvolutionCall:
    """What all have in common; it points into `x`. `weight` is (out, in, ...)."""
    call = _DirectConvolutionCall(
        images=x.shape[0],
        in_channels=weight.shape[1],
        out_channels=weight.shape[0],
        x_bfloat16=x.dtype == torch.bfloat16,
        y_bfloat16=y.dtype == torch.bfloat16,
        weight_bfloat16=weight.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
        level=level_number(),
        x=x.data_ptr(),
    )
    call.in_size[:], call.out_size[:] = x.shape[2:], [axis.count for axis in axes]
    call.kernel[:], call.stride[:] = [axis.taps for axis in axes], stride
    call.dilation[:], call.origin[:] = [axis.dilation for axis in axes], [axis.origin for axis in axes]
    call.ld_x[:], call.ld_y[:] = x.stride(), y.stride()
    return call


def _parts(x: Tensors) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


def _with_weights(parts: Sequence[Tensor], weight: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part with what it is convolved by: its channels along a dimension of the weight."""
    return zip(parts, weight.split([part.shape[1] for part in parts], dim), strict=True)
