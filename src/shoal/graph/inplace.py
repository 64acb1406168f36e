"""Ops that can write their result over one of their operands, bit for bit the same.

An op qualifies where each element of the result depends on the element of the operand at the same place only, and
the library has a form that writes into a given tensor. So do ops that write into a tensor, or add to it, at some
places: autograd's gradients of `gather`, `topk`, `sort` and of indexing, which eager PyTorch writes in place into new
zeros. `operands` says which operands may be overwritten and `overwriting` gives the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import held_bytes
from shoal.graph.symbolic_sizes import at_numbers, expression_of
from shoal.kernels import (
    batch_norm,
    direct_convolution,
    dropout,
    encoded_activation,
    group_norm,
    layer_norm,
    norm_again,
    norm_pieces,
    prelu,
    relu,
)
from shoal.kernels.compiled_region import CompiledRegion
from shoal.kernels.invertible_norm.inverted_norms import BATCH_NORM, SAMPLE_NORM
from shoal.kernels.norm import joined_statistics, norm_act, norm_conv

_aten, _ours = torch.ops.aten, torch.ops.shoal
_POINTWISE = "hardtanh leaky_relu elu gelu hardswish hardsigmoid hardshrink softshrink softplus mish silu sigmoid tanh"
_GRADIENTS = "threshold hardtanh leaky_relu elu gelu hardsigmoid hardshrink softshrink softplus silu sigmoid tanh"
_IN_PLACE = (
    "relu.default div.Scalar copy.default scatter.src scatter.value scatter_add.default scatter_reduce.two "
    "index_add.default index_copy.default index_fill.int_Scalar index_put.default put.default masked_fill.Scalar "
    "masked_fill.Tensor masked_scatter.default"
)
_OWN: dict[Any, str] = {  # module → functions, of which it has another with an underscore that overwrites
    norm_again: "normalise",
    batch_norm: "backward",
    group_norm: "backward",
    layer_norm: "backward",
    prelu: "backward in_pieces",
    relu: "backward zeroed leaky_backward",
    encoded_activation: "relu_backward",
    dropout: "dropout dropout_backward",
    norm_pieces: "native_backward cudnn_backward group_backward",
}
# What writes a view of its first operand → that view.
WRITTEN_VIEW: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.select_scatter.default: _aten.select.int,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
    _aten.as_strided_scatter.default: _aten.as_strided.default,
}


def _writing(target: Any) -> Callable[..., torch.Tensor]:
    """Writes a view of a tensor where it lies."""
    view = WRITTEN_VIEW[target]

    def write(x: torch.Tensor, part: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        view(x, *args, **kwargs).copy_(part)
        return x

    write.__name__ = write.__qualname__ = f"write_{target.overloadpacket.__name__}"
    return write


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return grad.mul_(mask).mul_(scale)


def _aten_op(name: str, suffix: str, overload: str) -> Any:
    return getattr(getattr(_aten, f"{name}{suffix}"), overload)


# target → (places of the operands that may be overwritten, form that overwrites, name of its keyword for the result)
_OUT: dict[Any, tuple[tuple[int, ...], Callable[..., Any], str]] = {
    **{_aten_op(one, "", "default"): ((0,), _aten_op(one, "", "out"), "out") for one in _POINTWISE.split()},
    **{
        _aten_op(one, "_backward", "default"): ((0,), _aten_op(one, "_backward", "grad_input"), "grad_input")
        for one in _GRADIENTS.split()
    },
    **{_aten_op(one, "", "Tensor"): ((0, 1), _aten_op(one, "", "out"), "out") for one in ("add", "sub", "mul", "div")},
    _aten.mul.Scalar: ((0,), _aten.mul.out, "out"),  # mul_.Scalar rounds the factor to bfloat16 first
    # Not pointwise, but each row is read as a whole before an element of it is written, and then at its own place.
    _aten._softmax.default: ((0,), _aten._softmax.out, "out"),
    _aten._softmax_backward_data.default: ((0,), _aten._softmax_backward_data.out, "grad_input"),
}
# Where the library's `out` form makes the result elsewhere first, or where there is none.
_CALLS: dict[Any, tuple[tuple[int, ...], Callable[..., Any]]] = {
    **{
        _aten_op(name, "", overload): ((0,), _aten_op(name, "_", overload))
        for name, overload in (one.split(".") for one in _IN_PLACE.split())
    },
    **{
        getattr(module, name): ((0,), getattr(module, f"{name}_"))
        for module, names in _OWN.items()
        for name in names.split()
    },
    **{target: ((0,), _writing(target)) for target in WRITTEN_VIEW},
    _aten.native_dropout_backward.default: ((0,), _dropout_backward),
    _aten._prelu_kernel.default: ((0,), prelu.forward_),
    _ours.norm_act_backward.default: ((0,), norm_act.backward_),
    _ours.norm_conv_backward.default: ((17,), norm_conv.backward_onto),
    _ours.sliced_norm.default: ((0,), joined_statistics.sliced_norm_),
    _ours.sliced_norm_gradient.default: ((0,), joined_statistics.sliced_norm_gradient_),
    _ours.inverted_batch_norm.default: ((0,), BATCH_NORM.forward_),
    _ours.inverted_batch_norm_backward.default: ((0,), BATCH_NORM.backward_),
    _ours.inverted_norm.default: ((0,), SAMPLE_NORM.forward_),
    _ours.inverted_norm_backward.default: ((0,), SAMPLE_NORM.backward_),
}
# Convolutions with a keyword `over` → place of their stride. They read a copy of a few planes at a time, which is worth
# it for large operands only.
_OVER: dict[Any, int] = {direct_convolution.forward: 3, direct_convolution.input_gradient: 3}
_WORTH_PLANES_BYTES = 4 << 20
_WITH_SCRATCH = (
    *_OVER,
    layer_norm.backward,
    group_norm.backward,
    prelu.backward,
    _aten._prelu_kernel.default,
    torch.ops.shoal.norm_act_backward.default,
)
# How a complex product is rounded depends on whether the compiler's loop may take its result for one of its operands.
_COMPLEX = (
    *(_aten.add.Tensor, _aten.sub.Tensor, _aten.copy.default, _aten.scatter.src, _aten.scatter.value, *WRITTEN_VIEW),
    *(_aten.scatter_add.default, _aten.index_add.default, _aten.index_copy.default, _aten.index_fill.int_Scalar),
    *(_aten.index_put.default, _aten.put.default, _aten.masked_fill.Scalar, _aten.masked_fill.Tensor),
)
_NORMS = (
    _aten._native_batch_norm_legit_functional.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten.native_group_norm.default,
)


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands of `node` whose block its first result may take, by shape, dtype and layout; lifetimes decide."""
    places: tuple[int, ...]
    if node.target in _NORMS:
        places = (0,)  # only its second run, `normalise`, can
    elif node.target in _OUT:
        places = _OUT[node.target][0]
    elif node.target in _CALLS:
        places = _CALLS[node.target][0]
    elif isinstance(node.target, CompiledRegion):
        places = node.target.overwritable or ()
    elif node.target in _OVER:
        return _convolved(node)
    else:
        return ()
    value = node.meta["val"]
    if node.target is _aten._prelu_kernel.default and value.device.type != "cpu":
        return ()  # it would be made elsewhere first
    result = value[0] if isinstance(value, (tuple, list)) else value
    if isinstance(result, torch.Tensor) and result.is_complex() and (node.target not in _COMPLEX or node.kwargs):
        return ()
    found = []
    for place in places:
        operand = node.args[place] if place < len(node.args) else None
        if isinstance(operand, fx.Node) and _same_block(operand.meta.get("val"), result):
            found.append(operand)
    return tuple(found)


def _convolved(node: fx.Node) -> tuple[fx.Node, ...]:
    """What a convolution may write its result over: it, or a part of it."""
    arguments: Any = node.args
    result = node.meta["val"]
    place = _OVER[node.target]
    stride, transposed, groups = (arguments[place + further] for further in (0, 3, 5))
    if any(step != 1 for step in stride) or transposed or groups != 1 or held_bytes(result) < _WORTH_PLANES_BYTES:
        return ()
    parts = arguments[0] if isinstance(arguments[0], (list, tuple)) else [arguments[0]]
    return tuple(part for part in parts if _same_block(part.meta.get("val"), result))


def writes_elsewhere(node: fx.Node) -> bool:
    """Whether a node writes a view of its first operand, and what it writes there is a view of other places of it."""
    if node.target not in WRITTEN_VIEW:
        return False
    (base, part), view = node.args[:2], node.args[2:]
    if not isinstance(base, fx.Node) or not isinstance(part, fx.Node):
        return False
    values = base.meta["val"], part.meta["val"]
    numbers = [number for value in values for number in (*value.shape, *value.stride(), value.storage_offset())]
    fx.node.map_arg((view, dict(node.kwargs)), numbers.append)
    if not all(type(number) is int for number in numbers):
        return False
    written = _places(WRITTEN_VIEW[node.target](values[0], *view, **node.kwargs), values[0])
    read = _places(values[1], values[0])
    if written is None or read is None:
        return False
    return any(one[1] < other[0] or other[1] < one[0] for one, other in zip(written, read, strict=True))


def _places(view: torch.Tensor, base: torch.Tensor) -> list[tuple[int, int]] | None:
    """The first and last index of a view of `base` along each of the base's axes; None if it is not such a part."""
    axes = sorted(range(base.dim()), key=base.stride, reverse=True)
    found = {}
    left, span = view.storage_offset() - base.storage_offset(), base.numel()
    for axis in axes:
        stride, size = base.stride(axis), base.shape[axis]
        if size > 1 and (stride * size > span or stride < 1):
            return None  # of a base that is not dense
        span = stride if size > 1 else span
        found[axis], left = (left // stride, left % stride) if size > 1 else (0, left)
    last = dict(found)
    for size, step in zip(view.shape, view.stride(), strict=True):
        along = next((axis for axis in axes if base.shape[axis] > 1 and step and step % base.stride(axis) == 0), None)
        if size == 1:
            continue
        if along is None or last[along] != found[along]:
            return None
        last[along] += (size - 1) * (step // base.stride(along))
        if last[along] >= base.shape[along]:
            return None
    return None if left else [(found[axis], last[axis]) for axis in range(base.dim())]


def usually_overwrites(target: Any) -> bool:
    """Whether most runs of an op that has `operands` overwrite one: a norm's gradient reads what a norm would."""
    known = target in _OUT or target in _CALLS or target is direct_convolution.input_gradient
    return known and target is not norm_again.normalise


def needs_scratch_to_overwrite(target: Any) -> bool:
    """Whether a run that overwrites an operand needs more scratch than one that does not."""
    return target in _WITH_SCRATCH


def overwriting(target: Any, kwargs: Mapping[str, Any], operand: fx.Node) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Target and keyword arguments of the call that writes its first result over `operand`, one of `operands`."""
    if isinstance(target, CompiledRegion) or target in _OVER:
        return target, {**kwargs, "over": operand}
    if target in _CALLS:
        return _CALLS[target][1], dict(kwargs)
    _, form, keyword = _OUT[target]
    return form, {**kwargs, keyword: operand}


def _same_block(operand: Any, result: Any) -> bool:
    return (
        isinstance(operand, torch.Tensor)
        and isinstance(result, torch.Tensor)
        and operand.dtype == result.dtype
        and (operand.is_conj(), operand.is_neg()) == (result.is_conj(), result.is_neg())
        and _block_of(operand) == _block_of(result)
        and at_numbers((operand.storage_offset(),), {}) == (0,)
    )


def _block_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides and storage; equal ones are so whatever symbolic sizes stand for, and no guard is added."""
    sizes = (tensor.dim(), *tensor.shape, *tensor.stride(), tensor.untyped_storage().nbytes())
    return tuple(expression_of(size) if isinstance(size, torch.SymInt) else size for size in sizes)
