"""What one captured node computes, only from its shapes: a signature, floating-point operations, bytes moved.

A node is a call of an aten op with FakeTensors in `node.meta["val"]`. `shoal.cost` turns these counts into times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from shoal.graph.fx_nodes import tensors_of

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.convolution, _aten._convolution, _aten.cudnn_convolution, _aten.convolution_overrideable)
_ALLOCATIONS = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def signature(node: fx.Node) -> str:
    """A text that is equal for nodes that cost the same: target, shapes, layouts, dtypes and options.

    Names of nodes, values of tensors and addresses leave no trace in it, so it may serve as a key on disk. Layouts
    other than contiguous are written as strides in braces; an operand that comes a second time as `=` and its place.

    Args:
        node: a `call_function` node whose operands carry `meta["val"]`.

    Returns:
        For example `aten.hardtanh.default(f32[8,32,14,14]{6272,1,448,32}, 0.0, 6.0)`.
    """
    places: dict[fx.Node, int] = {}

    def describe(value: Any) -> str:
        if isinstance(value, fx.Node):
            if value in places:
                return f"={places[value]}"
            places[value] = len(places)
            return describe(value.meta["val"]) if "val" in value.meta else "?"
        if isinstance(value, torch.Tensor):
            return _describe_tensor(value)
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(describe(item) for item in value) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{describe(item)}" for key, item in value.items()) + "}"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return str(concrete(value))
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        return _ADDRESS.sub("", str(value))

    arguments = [describe(argument) for argument in node.args]
    arguments += [f"{name}={describe(node.kwargs[name])}" for name in sorted(node.kwargs)]
    return f"{target_name(node.target)}({', '.join(arguments)})"


def target_name(target: Any) -> str:
    """What a node computes, for people: "aten.relu.default", or module and name of a Python function.

    Functions of this package are named only by the file ("shoal.pooling.forward"): plan files hold these names.
    """
    if isinstance(target, str) or not hasattr(target, "__qualname__") or isinstance(target, torch._ops.OpOverload):
        return _ADDRESS.sub("", str(target))
    module = target.__module__
    if module.startswith("shoal."):
        module = f"shoal.{module.rpartition('.')[2]}"
    return f"{module}.{target.__qualname__}"


def flops(node: fx.Node) -> int:
    """Floating-point operations of one node; a multiply-add counts as two.

    Convolutions count every tap, those on padding too: 2 x output elements x kernel elements per output channel, once
    per direction of the backward pass that `output_mask` asks for, plus one addition per output gradient for the bias.
    Matrix products and attention use PyTorch's own formulas. Any other op counts one operation per element of its
    largest tensor: the output of a pointwise op, the input of a reduction. Views and bare allocations count nothing.
    """
    if "flops" in node.meta:  # counted where the node was made from another
        return int(node.meta["flops"])
    if _is_free(node):
        return 0
    packet = _packet(node)
    arguments: Any = fx.node.map_arg((node.args, dict(node.kwargs)), _value)
    args, kwargs = arguments
    if packet in _CONVOLUTIONS:
        inputs, weight = args[:2]
        transposed = packet is not _aten.cudnn_convolution and args[6]
        return int(_convolution_flops(inputs, weight, _value(node), transposed))
    if packet is _aten.convolution_backward:
        return int(convolution_backward_flops(args))
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=_value(node)))
    return max((int(tensor.numel()) for tensor in (*_operands(node), *tensors_of(node))), default=0)


def convolution_backward_flops(args: Sequence[Any]) -> int | torch.SymInt:
    """`flops` of `aten.convolution_backward` of these arguments, tensors for nodes; of symbolic sizes, a symbol."""
    grad, inputs, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    one_way = _convolution_flops(inputs, weight, grad, transposed)
    return one_way * (bool(mask[0]) + bool(mask[1])) + (grad.numel() if mask[2] else 0)


def moved_bytes(node: fx.Node) -> int:
    """The least bytes one node reads and writes: each distinct operand once, each output once, views nothing.

    An operand that is expanded counts the bytes it has, not the bytes it pretends to have.
    """
    if "moved_bytes" in node.meta:  # counted where the node was made from others
        return int(node.meta["moved_bytes"])
    if _is_free(node):
        return 0
    return sum(_bytes(tensor) for tensor in (*_operands(node), *tensors_of(node)))


def _is_view(node: fx.Node) -> bool:
    """Whether every tensor the node returns looks at the memory of an operand that it leaves as it is.

    Such a node costs neither time nor memory: getitem, view, transpose, expand, detach, ...
    """
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return False
    outputs = tensors_of(node)
    memory = {_storage(tensor) for tensor in _operands(node)}
    return bool(outputs) and all(_storage(tensor) in memory for tensor in outputs)


def concrete(value: Any) -> Any:
    """The number a symbolic size stood for when the step was captured; anything else as it is."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return value


def _convolution_flops(
    inputs: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, transposed: bool
) -> int | torch.SymInt:
    # Each element of one side meets one weight slice; with groups the weight's own shape is already the slice.
    meets = inputs if transposed else output
    return 2 * meets.numel() * (int(weight.numel()) // max(int(weight.shape[0]), 1))


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def _is_free(node: fx.Node) -> bool:
    return node.op != "call_function" or _packet(node) in _ALLOCATIONS or _is_view(node)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _operands(node: fx.Node) -> Iterator[torch.Tensor]:
    for operand in node.all_input_nodes:  # each node once, however often it is named
        yield from tensors_of(operand)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> int:
    own_elems = prod(int(size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return own_elems * tensor.element_size() if tensor.numel() else 0


def _describe_tensor(tensor: torch.Tensor) -> str:
    dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    shape = ",".join(str(int(size)) for size in tensor.shape)
    if tensor.layout is not torch.strided:
        return f"{dtype}[{shape}]{tensor.layout}"
    strides = "" if tensor.is_contiguous() else "{" + ",".join(str(int(stride)) for stride in tensor.stride()) + "}"
    # Most kernels copy an operand that is conjugated or negated lazily.
    lazily = ("conj" if tensor.is_conj() else "") + ("neg" if tensor.is_neg() else "")
    return f"{dtype}[{shape}]{strides}{lazily}"
