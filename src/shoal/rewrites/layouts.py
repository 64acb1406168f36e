"""Results otherwise than their fake kernels say: the trace has what kernels really do, and no storage is too large.

- Results that PyTorch leaves in a larger storage, such as the mean of all squares, get one of their own size.
- Group norm's gradient of a half-precision input with float32 weights, as under autocast, is float32 to the fake
  kernel, and converted after it; every kernel returns it in the input's precision.
- On CUDA, `native_batch_norm_backward` lays its gradient out as the input if one of input and incoming gradient is
  contiguous and the other in channels_last, the fake kernel as the incoming gradient; element by element the first
  operand decides, a decomposition may have another order, and cuDNN's gradient is laid out as the input. Otherwise the
  first run would copy such results into the traced layout, and the step would be planned a second time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.graph.fx_nodes import args_of, reaches_output
from shoal.graph.joint import Joint
from shoal.graph.symbolic_sizes import usual
from shoal.kernels import cudnn_batch_norm
from shoal.kernels.memory_format import channels_last_format
from shoal.kernels.own_storage import OWN
from shoal.lowlevel.torch_internals import with_real_tensors

_aten = torch.ops.aten
_ON = ("cuda",)
_OF_TWO_OPERANDS = {  # right wherever both are laid out alike
    _aten.native_batch_norm_backward.default,
    _aten.hardswish_backward.default,
    _aten.elu_backward.default,
    _aten.threshold_backward.default,
    _aten.leaky_relu_backward.default,
    _aten.gelu_backward.default,
    _aten._prelu_kernel_backward.default,
}
_OF_ONE_OPERAND = {
    _aten.upsample_bilinear2d.default,
    _aten.upsample_bilinear2d.vec,
    _aten.upsample_trilinear3d.default,
    _aten.upsample_trilinear3d.vec,
    _aten.pixel_unshuffle.default,
}


def small_results(joint: Joint) -> Iterator[tuple[fx.Node, Any, tuple[Any, ...]]]:
    """Results that are smaller than an operand, in whose storage PyTorch leaves them."""
    for target, own in OWN.items():
        for node in joint.find(target):
            elems = usual(node.meta["val"].numel())
            if any(elems < usual(operand.meta["val"].numel()) for operand in node.all_input_nodes):
                yield node, own, node.args


def converted_gradients(joint: Joint) -> Iterator[fx.Node]:
    """Gradients of group norms that are only converted to what kernels return."""
    for node in joint.find(_aten.native_group_norm_backward.default):
        grad, x = (operand.meta["val"] for operand in args_of(node)[:2])
        item = next((user for user in node.users if user.args[1] == 0), None)
        if item is None or node.meta["val"][0].dtype == x.dtype or grad.dtype != x.dtype:
            continue
        if all(one.target is _aten._to_copy.default and one.meta["val"].dtype == x.dtype for one in item.users):
            yield node


def type_as_kernel_does(joint: Joint, node: fx.Node) -> None:
    """Drop the conversion."""
    of_input, *others = node.meta["val"]
    item = next(user for user in node.users if user.args[1] == 0)
    item.meta["val"] = torch.empty_like(of_input, dtype=args_of(node)[1].meta["val"].dtype)
    node.meta["val"] = (item.meta["val"], *others)
    for cast in list(item.users):
        joint.replace(cast, item)


def laid_out_otherwise(joint: Joint) -> Iterator[tuple[fx.Node, Any]]:
    """Nodes whose kernels lay their results out otherwise, with these."""
    for node in joint.graph.nodes:
        value = _as_run(node) if node.op == "call_function" else None
        if value is not None and _strides(value) != _strides(node.meta["val"]):
            yield node, value


def lay_out_as_kernel_does(joint: Joint, site: tuple[fx.Node, Any]) -> None:
    """Give it that layout, and what follows from it.

    If a later op would not run with such a layout, or a caller would get it, the trace stays as it is.
    """
    changed = values_that_follow(*site)
    if all(one in joint.backward or not reaches_output(one) for one in changed):
        for one, new in changed.items():
            one.meta["val"] = new


def values_that_follow(node: fx.Node, value: Any) -> dict[fx.Node, Any]:
    """The nodes whose values change with that of a node, as their fake kernels say; none where one of them refuses."""
    changed = {node: value}

    def now(operand: Any) -> Any:
        return changed.get(operand, operand.meta.get("val"))

    later = node.next
    while later.op != "output":
        if later.op == "call_function" and not changed.keys().isdisjoint(later.all_input_nodes):
            new = later.meta["val"]
            if later.target is operator.getitem:
                new = now(later.args[0])[later.args[1]]
            elif isinstance(later.target, OpOverload):
                args, kwargs = fx.node.map_arg((later.args, dict(later.kwargs)), now)
                try:
                    new = later.target(*args, **kwargs)
                except (RuntimeError, ValueError):  # a view that this layout does not have
                    return {}
            if _strides(new) != _strides(later.meta["val"]):
                changed[later] = new
        later = later.next
    return changed


def _as_run(node: fx.Node) -> Any:
    """What a node's kernel returns on its device, as fake tensors; None where its fake kernel is right about it."""
    if node.target is cudnn_batch_norm.backward:
        of_input, *others = node.meta["val"]
        return None if of_input is None else (torch.empty_like(args_of(node)[1].meta["val"]), *others)
    if node.target not in _OF_TWO_OPERANDS and node.target not in _OF_ONE_OPERAND:
        return None
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: operand.meta["val"])
    operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    if any(one.device.type not in _ON for one in operands):
        return None
    with with_real_tensors(), torch.no_grad():
        images = [one for one in (_uninitialised(one, "meta") for one in operands) if one.dim() in (4, 5)]
        if all(one.is_contiguous() for one in images):
            return None
        in_channels_last = (one.is_contiguous(memory_format=channels_last_format(one.dim())) for one in images)
        if node.target in _OF_TWO_OPERANDS and all(in_channels_last):
            return None
        args, kwargs = tree_map_only(torch.Tensor, _uninitialised, (args, kwargs))
        try:
            real = node.target(*tree_map_only(torch.SymInt, usual, args), **kwargs)
        except torch.OutOfMemoryError:
            return None
    values = node.meta["val"]
    if isinstance(values, torch.Tensor):
        return _laid_out(values, real)
    return tuple(value if value is None else _laid_out(value, one) for value, one in zip(values, real, strict=True))


def _uninitialised(value: torch.Tensor, device: str = "") -> torch.Tensor:
    shape, strides = ([int(usual(size)) for size in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=device or value.device)


def _laid_out(value: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """A fake tensor with the order of dimensions of a real one of its shape; `value` where it has it."""
    if value.stride() == real.stride():
        return value
    strides = real.stride()
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    dense = value.new_empty([value.shape[dim] for dim in order])
    return dense.permute([order.index(dim) for dim in range(value.dim())])


def _strides(values: Any) -> list[tuple[int, ...]]:
    return [value.stride() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
