"""ReLUs and leaky ReLUs that wait as one boolean an element where nothing else needs their results, or no more."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shoal.capture.fx_nodes import describe_as, held_bytes, reaches_output
from shoal.kernels import relu

_aten = torch.ops.aten
_WORTH_A_MASK_BYTES = 1 << 20
_FORWARDS = {
    _aten.threshold_backward.default: _aten.relu.default,
    _aten.leaky_relu_backward.default: _aten.leaky_relu.default,
}


def save_masks(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """Let the backward ops of those whose results nothing else reads in the backward pass read masks, made forward."""
    for node in [node for node in graph.nodes if node.target in _FORWARDS]:
        if _may_read_mask(node, backward) and not _other_readers(node, backward):
            output: Any = node.args[1]
            _read_mask(graph, node, output)


def shrink_to_masks(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """Let those whose results others read read masks, made where the last of these is done; `backward` gets them."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if node.target in _FORWARDS]:
        others = _other_readers(node, backward) if _may_read_mask(node, backward) else []
        if not others or any(order.get(other, -1) > order[node] for other in others):
            continue
        last = max(others, key=order.__getitem__)
        output: Any = node.args[1]
        if held_bytes(output.meta["val"]) >= _WORTH_A_MASK_BYTES and last.next is not node:
            backward.add(_read_mask(graph, node, last))


def _may_read_mask(node: fx.Node, backward: set[fx.Node]) -> bool:
    output: Any = node.args[1]
    target: Any = node.target
    computed_forward = output not in backward and output.target is _FORWARDS[target]
    return computed_forward and _reads_sign(node) and not reaches_output(output)


def _other_readers(node: fx.Node, backward: set[fx.Node]) -> list[fx.Node]:
    """Who else reads the result of the ReLU in the backward pass."""
    output: Any = node.args[1]
    return [user for user in output.users if user in backward and user is not node]


def _read_mask(graph: fx.Graph, node: fx.Node, after: fx.Node) -> fx.Node:
    """Let a backward op read a mask that is made after another node; the mask."""
    output: Any = node.args[1]
    value = output.meta["val"]
    target, call, rest = _reading_a_mask(node, output, value.device.type)
    with graph.inserting_after(after):
        mask: fx.Node = graph.call_function(*call)
    describe_as(mask, value.new_empty_strided(value.shape, value.stride(), dtype=torch.bool), output)
    node.target, node.args = target, (node.args[0], mask, *rest)
    return mask


def _reads_sign(node: fx.Node) -> bool:
    """Whether it depends only on the sign of the result."""
    arguments: Any = node.args
    return bool(arguments[2] == 0 if node.target is _aten.threshold_backward.default else arguments[3] is True)


def _reading_a_mask(node: fx.Node, output: fx.Node, device: str) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """What reads a mask instead, the call that makes that of the output, and what else it reads."""
    if node.target is _aten.leaky_relu_backward.default:  # NaN takes the slope
        return relu.leaky_backward, (_aten.gt.Scalar, (output, 0)), (node.args[2],)
    if device == "cuda":
        # Where the gradient is zero, for `zeroed`: `threshold_backward` converts booleans one by one.
        return relu.zeroed, (_aten.le.Scalar, (output, 0)), ()
    # Where it passes, as it does at NaN; `ne` gives the same in four times the time.
    return relu.backward, (_aten._to_copy.default, (output,), {"dtype": torch.bool}), ()
