"""Convolutions: gradients that are ops of their own, weights' gradients a few channels at a time, native kernels.

- A convolution's gradients of weight and input are two ops, the second without the input, so that the input can be
  freed before its gradient is computed.
- The gradient of a weight larger than its images comes a few output channels at a time if that saves scratch.
- Native kernels need no scratch and may be faster than the library's. A concatenation along the channels that only such
  convolutions read is not computed: they read its parts, and the gradient of each part is a convolution of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import args_of, values_of
from shoal.graph.joint import Joint
from shoal.graph.op_counts import convolution_backward_flops, flops
from shoal.graph.symbolic_sizes import as_arguments
from shoal.kernels import direct_convolution
from shoal.kernels.convolution import can_do_without_input, input_gradient
from shoal.kernels.convolution_pieces import cut_of_large_weight, weight_gradient
from shoal.kernels.pieces import are_sizes_known

_aten = torch.ops.aten
_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_TENSORS = 3  # the first arguments of a convolution and of its gradients
_CHANNELS = 1
DIRECT: Mapping[Any, Callable[..., Any]] = {
    _FORWARD: direct_convolution.forward,
    input_gradient: direct_convolution.input_gradient,
    _BACKWARD: direct_convolution.weight_gradient,
}
"""What computes each without scratch."""


def joint_gradients(joint: Joint) -> Iterator[fx.Node]:
    """Gradients of input and weight in one."""
    for node in joint.find(_BACKWARD):
        wanted = args_of(node)[-1]
        if wanted[0] and any(wanted[1:]):
            yield node


def split_gradients(joint: Joint, node: fx.Node) -> None:
    """Take the weight's gradient out, before that of the input."""
    *arguments, wanted = args_of(node)
    of_input_value, *of_weight_values = node.meta["val"]
    values = (None, *of_weight_values)
    of_weight = joint.call(node, _BACKWARD, (*arguments, [False, *wanted[1:]]), values, node)
    joint.backward.add(of_weight)
    node.args = (*arguments, [True, False, False])
    node.meta["val"] = (of_input_value, None, None)
    for item in list(node.users):
        if item.args[1] != 0:
            item.args = (of_weight, item.args[1])
    joint.erase_unread(node)  # nothing wants the gradient of an input of the model


def large_weights(joint: Joint) -> Iterator[tuple[fx.Node, Any, tuple[Any, ...]]]:
    """Gradients of weights larger than their images."""
    for node in joint.find(_BACKWARD) if joint.runs_here else ():
        arguments = values_of(node)
        wanted = arguments[-1]
        cut = cut_of_large_weight(*arguments) if wanted[1] and not wanted[0] else None
        if cut is not None:
            node.meta["flops"] = convolution_backward_flops(arguments)
            yield node, weight_gradient, (*node.args, cut.dim, cut.count)


def input_gradients(joint: Joint) -> Iterator[fx.Node]:
    """Gradients of inputs by themselves that need not read them."""
    for node in joint.find(_BACKWARD):
        grad, x, weight, *_, groups, wanted = values_of(node)
        on_cpu = joint.runs_here and x.device.type == "cpu"
        alone = wanted[0] and not any(wanted[1:]) and len(node.users) == 1
        if alone and can_do_without_input(grad, x, weight, groups, on_cpu=on_cpu):
            yield node


def leave_input_out(joint: Joint, node: fx.Node) -> None:
    """Read the input's sizes only."""
    arguments = args_of(node)
    (of_input,) = node.users
    value = arguments[1].meta["val"]
    with joint.graph.inserting_before(node):
        shape, stride = as_arguments(joint.graph, value.shape), as_arguments(joint.graph, value.stride())
    operands = (arguments[0], arguments[2], shape, stride, *arguments[4:-1])
    alone = joint.call(node, input_gradient, operands, of_input.meta["val"], node)
    joint.backward.add(alone)
    alone.meta["flops"] = convolution_backward_flops(values_of(node))
    joint.replace(of_input, alone)
    joint.graph.erase_node(node)


def able(joint: Joint) -> Iterator[fx.Node]:
    """Convolutions and gradients that a native kernel can compute, with a result of the same layout."""
    return (node for node in list(joint.graph.nodes) if can_be_native(node))


def can_be_native(node: fx.Node) -> bool:
    """Whether a node is one of `able`."""
    if node.target not in DIRECT:
        return False
    arguments, result = values_of(node), node.meta["val"]
    tensors = [one for one in arguments[:_TENSORS] if isinstance(one, torch.Tensor)]
    if node.target is _BACKWARD:
        wanted, groups = arguments[10], arguments[9]
        if wanted[0] or not wanted[1] or not _is_plain(arguments[2]):
            return False
    else:
        groups = arguments[8 if node.target is _FORWARD else 9]
        if not _is_plain(result):
            return False
    return bool(groups == 1 and are_sizes_known(*tensors) and direct_convolution.applies(*tensors))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 5 and tensor.is_contiguous()


def compute_natively(joint: Joint, node: fx.Node) -> None:
    """Let the native kernel compute it."""
    node.meta["flops"] = flops(node)
    arguments = args_of(node)
    if node.target is input_gradient:
        arguments = (*arguments[:3], *arguments[4:])  # without the strides
    elif node.target is _BACKWARD:
        arguments = (*arguments, list(node.meta["val"][1].stride()))
    node.target, node.args = DIRECT[node.target], arguments


def parts_read_natively(joint: Joint) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Concatenations that only native convolutions read, once each: the node, and what it puts side by side."""
    for node in joint.find(_aten.cat.default):
        parts = parts_of(node)
        if parts is not None and all(_reads_once(user, node) for user in node.users):
            yield node, parts


def _reads_once(user: fx.Node, node: fx.Node) -> bool:
    is_native = user.target in DIRECT.values() and args_of(user)[_place_of_input(user)] is node
    return is_native and sum(one is node for one in user.all_input_nodes) == 1


def _place_of_input(user: fx.Node) -> int:
    return 1 if user.target is direct_convolution.weight_gradient else 0


def read_parts(joint: Joint, site: tuple[fx.Node, list[fx.Node]]) -> None:
    """Let them read the parts."""
    node, parts = site
    for user in list(node.users):
        user.args = tuple(parts if at == _place_of_input(user) else one for at, one in enumerate(user.args))
    joint.graph.erase_node(node)


def parts_of(node: fx.Node) -> list[fx.Node] | None:
    """The volumes that a node puts side by side along the channels, each once."""
    parts, dim = list(args_of(node)[0]), (*args_of(node)[1:], 0)[0]
    alone = len(set(parts)) == len(parts) and all(isinstance(part, fx.Node) for part in parts)
    same = alone and all(part.meta["val"].dim() == 5 for part in parts)
    return parts if same and dim in (_CHANNELS, -4) and 0 not in [part.meta["val"].shape[1] for part in parts] else None


def gradients_of_parts(joint: Joint) -> Iterator[fx.Node]:
    """Native gradients of which only slices along the channels are read."""
    for node in reversed(joint.find(direct_convolution.input_gradient)):
        if node.users and all(_is_of_channels(one) for one in node.users):
            yield node


def give_parts(joint: Joint, node: fx.Node) -> None:
    """Compute each slice by an op of its own."""
    grad, weight, shape, *options = args_of(node)
    for one in list(node.users):
        first: Any = one.args[2]
        own_shape = [*shape]
        own_shape[1] = int(one.meta["val"].shape[1])
        value = torch.empty_like(one.meta["val"], memory_format=torch.contiguous_format)
        call = (grad, weight, own_shape, *options, first)
        part = joint.call(one, direct_convolution.input_gradient, call, value, one, f"{node.name}_of_{first}")
        part.meta["flops"] = node.meta["flops"] * own_shape[1] // int(shape[1])
        joint.stand_for_slice(one, part)
    joint.graph.erase_node(node)


def _is_of_channels(node: fx.Node) -> bool:
    if node.target is not _aten.slice.Tensor or len(node.args) != 4:
        return False
    dim, first = node.args[1:3]
    return bool(dim == _CHANNELS and isinstance(first, int) and not node.kwargs)
