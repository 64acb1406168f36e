"""Ops that read a small buffer that the forward pass changes read a copy of it, which makes them recomputable.

In the backward pass the buffer has its new value. A fake quantization reads the range of its input that its observer
has seen so far, a few bytes; without their copy its result, as large as an activation, would have to be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shoal.capture.buffers_in_place import changed_inputs
from shoal.capture.fx_nodes import describe_as, held_bytes, is_view
from shoal.capture.rerun import can_run_again, second_call

# A copy is kept until the backward pass, whether its readers run again or not: it must take little compared to what
# they make. For the weights of nn.Linear(n, m), quantized with a range for each of m channels, the ratio is 5 n / 4.
_LEAST_RATIO = 16


def copy_small_buffers(joint: fx.GraphModule, backward: set[fx.Node]) -> None:
    """Put copies of buffers that the forward pass changes before ops that would otherwise run only once.

    Args:
        joint: the joint graph; edited.
        backward: its backward nodes.
    """
    graph = joint.graph
    for buffer, _ in list(changed_inputs(graph)):
        least_bytes = _LEAST_RATIO * held_bytes(buffer.meta["val"])
        readers = {
            node
            for node in _readers(buffer)
            if node not in backward and _made_bytes(node) >= least_bytes and _reads_again(node)
        }
        if not readers:
            continue
        first = next(node for node in graph.nodes if node in buffer.users)
        with graph.inserting_before(first):
            copy = graph.call_function(torch.ops.aten.clone.default, (buffer,))
        describe_as(copy, buffer.meta["val"].clone(), first)
        for node in list(buffer.users):
            if node in readers or (is_view(node) and node not in backward):
                node.replace_input_with(buffer, copy)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a tensor, itself or a view of it."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        elif user.op == "call_function":
            yield user


def _reads_again(node: fx.Node) -> bool:
    """Whether a second run of the node would read all that the first one reads."""
    again: list[fx.Node] = []
    fx.node.map_arg((second_call(node)[1], dict(node.kwargs)), again.append)
    return can_run_again(node) and set(node.all_input_nodes) <= set(again)


def _made_bytes(node: fx.Node) -> int:
    values: Any = tree_leaves(node.meta.get("val"))
    return sum(held_bytes(value) for value in values if isinstance(value, torch.Tensor))
