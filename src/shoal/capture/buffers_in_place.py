"""Buffers that the forward pass changes are changed where they lie.

AOTAutograd makes the step functional: a batch norm returns new running statistics, and when the forward pass has ended
each buffer is copied over with its new values. For each batch norm that is two copies before and three after. Plain
PyTorch writes into the buffers, once; so does the step after `change_in_place`, and an exception in the middle of the
forward pass leaves them as it does there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

from shoal.capture.fx_nodes import items_of
from shoal.kernels.buffers import add_to

_aten = torch.ops.aten
_FUNCTIONAL, _IN_PLACE = _aten._native_batch_norm_legit_functional.default, _aten._native_batch_norm_legit.default
_STATISTICS = ((3, 3), (4, 4))  # place of a running statistic among the arguments and of its new value in the results
_TRAINING = 5


def change_in_place(joint: fx.GraphModule, backward: set[fx.Node]) -> None:
    """Let batch norms and counters of batches write into their buffers; on CUDA all counters at once, one launch.

    A buffer that anything else reads, as where a layer is called twice, is changed by a copy as before: reordered, the
    two would read one another's values.

    Args:
        joint: the joint graph, functional, in which no batch norm's backward names running statistics; edited.
        backward: its backward nodes.
    """
    graph = joint.graph
    changed = dict(changed_inputs(graph))
    for node in graph.find_nodes(op="call_function", target=_FUNCTIONAL):
        if node not in backward and node.args[_TRAINING] is True:
            _write_statistics(graph, node, changed)
    for node in graph.find_nodes(op="call_function", target=_aten.add.Tensor):
        _count_in_place(graph, node, changed)
    _count_at_once(graph)


def changed_inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each input that gets a new value when the forward pass ends, and that value."""
    output = graph.output_node()
    input_of = {node.meta.get("desc"): node for node in graph.find_nodes(op="placeholder")}
    values: Any = output.args[0]
    for value, note in zip(values, output.meta.get("desc") or (), strict=False):
        if isinstance(note, InputMutationAOTOutput) and isinstance(value, fx.Node) and note.mutated_input in input_of:
            yield input_of[note.mutated_input], value


def _write_statistics(graph: fx.Graph, node: fx.Node, changed: dict[fx.Node, fx.Node]) -> None:
    items = items_of(node)
    if 0 not in items:
        return
    buffers = [node.args[place] for place, _ in _STATISTICS]
    values = [items.get(place) for _, place in _STATISTICS]
    if any(
        not isinstance(buffer, fx.Node) or value is None or not _is_all_there_is(buffer, value, node, changed)
        for buffer, value in zip(buffers, values, strict=True)
    ):
        return
    node.target = _IN_PLACE
    node.meta["val"] = tuple(node.meta["val"][:3])
    for buffer, value in zip(buffers, values, strict=True):
        value.replace_all_uses_with(buffer)  # type: ignore[union-attr,arg-type]  # neither is None
        graph.erase_node(value)  # type: ignore[arg-type]


def _count_in_place(graph: fx.Graph, node: fx.Node, changed: dict[fx.Node, fx.Node]) -> None:
    if len(node.args) != 2 or node.kwargs:
        return
    buffer, count = node.args
    if not isinstance(buffer, fx.Node) or not isinstance(count, int):
        return
    if not _is_all_there_is(buffer, node, node, changed) or buffer.meta["val"].dtype != node.meta["val"].dtype:
        return
    with graph.inserting_before(node):
        counting = graph.call_function(add_to, node.args)
    counting.meta = {key: value for key, value in node.meta.items() if key != "val"}
    node.replace_all_uses_with(buffer)
    graph.erase_node(node)


def _count_at_once(graph: fx.Graph) -> None:
    """On CUDA, where each is a launch: one op for all counters that count alike, where the first of them was."""
    alike: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=add_to):
        buffer, count = node.args
        value = buffer.meta["val"]
        if value.device.type == "cuda":
            alike.setdefault((value.device, value.dtype, count), []).append(node)
    for (_, _, count), nodes in alike.items():
        with graph.inserting_before(nodes[0]):
            counting = graph.call_function(add_to, ([node.args[0] for node in nodes], count))
        counting.meta = dict(nodes[0].meta)
        for node in nodes:
            graph.erase_node(node)


def _is_all_there_is(buffer: fx.Node, value: fx.Node, node: fx.Node, changed: dict[fx.Node, fx.Node]) -> bool:
    """Whether only `node` reads the buffer, whose new value goes nowhere else."""
    return (
        changed.get(buffer) is value
        and set(buffer.users) == {node}
        and buffer in node.args
        and [user.op for user in value.users] == ["output"]
        and node.all_input_nodes.count(buffer) == 1
        and _leaves_once(value)
    )


def _leaves_once(value: fx.Node) -> bool:
    (output,) = value.users
    left: Any = output.args[0]
    return sum(one is value for one in left) == 1
