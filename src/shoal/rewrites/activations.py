"""Activations that save their output, which the next layer saves anyway, or one boolean an element; PReLUs in place.

- A clipped activation (ReLU6, hardtanh) and a leaky ReLU save their output instead of their input. An ELU keeps it: of
  its output PyTorch's kernel makes other bits in one element of seven.
- A ReLU or leaky ReLU whose output is saved for nothing but its own backward waits as one boolean an element. If others
  read it too, it can become that when the last of them is done, at the cost of an op.
- A PReLU's backward writes over the incoming gradient, and adds up its slope's gradient on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import args_of, held_bytes, reaches_output
from shoal.graph.joint import Joint
from shoal.kernels import prelu, relu

_aten = torch.ops.aten
_WORTH_A_MASK_BYTES = 1 << 20
_FORWARDS = {
    _aten.threshold_backward.default: _aten.relu.default,
    _aten.leaky_relu_backward.default: _aten.leaky_relu.default,
}
Reading = tuple[fx.Node, fx.Node]  # a backward op, and the output that it may read, or what its mask is made after


def clipped_outputs(joint: Joint) -> Iterator[Reading]:
    """Backward ops of clipped activations, whose input is strictly inside the bounds if the output is."""
    for node in joint.find(_aten.hardtanh_backward.default):
        clipped_input, low, high = args_of(node)[1:4]
        for user in clipped_input.users:
            if user.target is _aten.hardtanh.default and (*user.args[1:3], -1.0, 1.0)[:2] == (low, high) and low < high:
                yield node, user
                break


def leaky_outputs(joint: Joint) -> Iterator[Reading]:
    """Backward ops of leaky ReLUs, whose output is positive if the input is, whatever the slope."""
    for node in joint.find(_aten.leaky_relu_backward.default):
        x, slope, is_output = args_of(node)[1:4]
        if is_output or slope < 0 or any(user in joint.backward and user is not node for user in x.users):
            continue
        for user in x.users:
            if user.target is _aten.leaky_relu.default and (*user.args[1:], 0.01)[0] == slope:
                yield node, user
                break


def read_output(joint: Joint, site: Reading) -> None:
    """Let the backward op read the output."""
    node, output = site
    node.update_arg(1, output)
    if node.target is _aten.leaky_relu_backward.default:
        node.update_arg(3, True)


def masks(joint: Joint) -> Iterator[Reading]:
    """Backward ops of rectifiers whose results nothing else reads in the backward pass."""
    for node in [node for node in joint.graph.nodes if node.target in _FORWARDS]:
        if _may_read_mask(node, joint.backward) and not _other_readers(node, joint.backward):
            yield node, args_of(node)[1]


def later_masks(joint: Joint) -> Iterator[Reading]:
    """Those whose results others read before: the last of these makes the mask possible."""
    order = {node: number for number, node in enumerate(joint.graph.nodes)}
    for node in [node for node in joint.graph.nodes if node.target in _FORWARDS]:
        others = _other_readers(node, joint.backward) if _may_read_mask(node, joint.backward) else []
        if not others or any(order.get(other, -1) > order[node] for other in others):
            continue
        last = max(others, key=order.__getitem__)
        if held_bytes(args_of(node)[1].meta["val"]) >= _WORTH_A_MASK_BYTES and last.next is not node:
            yield node, last


def read_mask(joint: Joint, site: Reading) -> None:
    """Let the backward op read a mask that is made after another node, in that one's pass of the step."""
    node, after = site
    output = args_of(node)[1]
    value = output.meta["val"]
    target, (make, *arguments), rest = _reading_a_mask(node, output, value.device.type)
    kwargs = {"dtype": torch.bool} if make is _aten._to_copy.default else {}
    mask_value = value.new_empty_strided(value.shape, value.stride(), dtype=torch.bool)
    mask = joint.call(after.next, make, tuple(arguments), mask_value, output, kwargs=kwargs)
    if after in joint.backward:
        joint.backward.add(mask)
    node.target, node.args = target, (node.args[0], mask, *rest)


def _may_read_mask(node: fx.Node, backward: set[fx.Node]) -> bool:
    output: Any = node.args[1]
    computed_forward = output not in backward and output.target is _FORWARDS[node.target]  # type: ignore[index]
    return computed_forward and _reads_sign(node) and not reaches_output(output)


def _other_readers(node: fx.Node, backward: set[fx.Node]) -> list[fx.Node]:
    """Who else reads the result of the rectifier in the backward pass."""
    return [user for user in args_of(node)[1].users if user in backward and user is not node]


def _reads_sign(node: fx.Node) -> bool:
    """Whether it depends only on the sign of the result."""
    arguments: Any = node.args
    return bool(arguments[2] == 0 if node.target is _aten.threshold_backward.default else arguments[3] is True)


def _reading_a_mask(node: fx.Node, output: fx.Node, device: str) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """What reads a mask instead, the call that makes that of the output, and what else it reads."""
    if node.target is _aten.leaky_relu_backward.default:  # NaN takes the slope
        return relu.leaky_backward, (_aten.gt.Scalar, output, 0), (node.args[2],)
    if device == "cuda":
        # Where the gradient is zero, for `zeroed`: `threshold_backward` converts booleans one by one.
        return relu.zeroed, (_aten.le.Scalar, output, 0), ()
    # Where it passes, as it does at NaN; `ne` gives the same in four times the time.
    return relu.backward, (_aten._to_copy.default, output), ()


def prelus_in_place(joint: Joint) -> Iterator[fx.Node]:
    """Backward ops of PReLUs whose second gradient is only summed up."""
    for node in joint.find(_aten._prelu_kernel_backward.default) if joint.runs_here else ():
        grad, x = (operand.meta["val"] for operand in args_of(node)[:2])
        on_cpu = node.meta["val"][0].device.type == "cpu"
        if grad.stride() == x.stride() and on_cpu and slopes_gradient(node) is not None:
            yield node


def slopes_gradient(node: fx.Node) -> fx.Node | None:
    """The sum over what broadcasting a PReLU's slope gave it, if that is all that is made of the second gradient.

    None too if incoming gradient, input and slope differ in dtype or layout. The first may be some channels of a larger
    one, as after a concatenation, if the input's gradient has the input's layout.
    """
    grad, x, weight = (operand.meta["val"] for operand in args_of(node))
    summands = next((user for user in node.users if user.args[1] == 1), None)
    total = next(iter(summands.users), None) if summands is not None else None
    if summands is None or total is None or len(summands.users) > 1 or total.target is not _aten.sum.dim_IntList:
        return None
    result = node.meta["val"][0]
    if total.kwargs or (grad.stride() != x.stride() and not (prelu.is_part(grad, x) and result.stride() == x.stride())):
        return None
    return total if grad.dtype == x.dtype == weight.dtype and weight.dim() == x.dim() else None


def add_up_slopes(joint: Joint, node: fx.Node) -> None:
    """Let a node with `slopes_gradient` be that sum too."""
    total = slopes_gradient(node)
    assert total is not None
    (summands,) = total.all_input_nodes
    _, dims, *keepdim = args_of(total)
    node.target, node.args = prelu.backward, (*args_of(node), dims, bool(keepdim and keepdim[0]))
    node.meta["val"] = (node.meta["val"][0], total.meta["val"])
    summands.meta["val"] = total.meta["val"]
    joint.replace(total, summands)
