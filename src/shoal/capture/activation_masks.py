"""ReLUs and leaky ReLUs that wait as one boolean an element where nobody else needs their results by then."""

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
    """Let their backward ops read masks, made where the last other reader is done; `backward` is kept up to date."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if node.target in _FORWARDS]:
        output: Any = node.args[1]
        if not _reads_sign(node) or output in backward or output.target is not _FORWARDS[node.target]:
            continue
        others = [user for user in output.users if user in backward and user is not node]
        if reaches_output(output) or any(order.get(other, -1) > order[node] for other in others):
            continue
        value = output.meta["val"]
        last = max(others, key=order.__getitem__, default=output)
        if others and (held_bytes(value) < _WORTH_A_MASK_BYTES or last.next is node):
            continue
        target, call, rest = _reading_a_mask(node, output, value.device.type)
        with graph.inserting_after(last):
            mask = graph.call_function(*call)
        describe_as(mask, value.new_empty_strided(value.shape, value.stride(), dtype=torch.bool), output)
        if others:
            backward.add(mask)
        node.target, node.args = target, (node.args[0], mask, *rest)


def _reads_sign(node: fx.Node) -> bool:
    """Whether it depends on the sign of the result alone."""
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
