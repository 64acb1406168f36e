"""Buffers that the forward pass changes: written where they lie, not saved unread, copied if that lets ops run again.

AOTAutograd makes the step functional: a batch norm returns new running statistics, and when the forward pass has ended
each buffer is copied over with its new values. For each batch norm that is two copies before and three after. Plain
PyTorch writes into the buffers, once; so does the rewritten step, and an exception in the middle of the forward pass
leaves them as it does there. A buffer that anything else reads, as if a layer is called twice, is changed by a copy as
before: reordered, the two would read one another's values.

In the backward pass a buffer has its new value. A fake quantization reads the range of its input that its observer has
seen so far, a few bytes; without their copy its result, as large as an activation, would have to be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import args_of, changed_inputs, held_bytes, is_view, items_of, readers, tensors_of
from shoal.graph.joint import Joint
from shoal.graph.rerun import can_run_again, second_call
from shoal.kernels.buffers import add_to

_aten = torch.ops.aten
_FUNCTIONAL, _IN_PLACE = _aten._native_batch_norm_legit_functional.default, _aten._native_batch_norm_legit.default
_BACKWARD = _aten.native_batch_norm_backward.default
_STATISTICS = (3, 4)  # places of the running ones among arguments; the results of the forward op have them there too
_TRAINING, _TRAINING_OF_BACKWARD = 5, 7
_LAUNCHES = ("cuda",)  # where each count is a launch
# A copy is kept until the backward pass, whether its readers run again or not: it must take little compared to what
# they make. For the weights of nn.Linear(n, m), quantized with a range for each of m channels, the ratio is 5 n / 4.
_MIN_RATIO = 16


def unread_statistics(joint: Joint) -> Iterator[tuple[fx.Node, Any, tuple[Any, ...]]]:
    """Batch norm's backward names running statistics, which it does not read in training mode."""
    for node in joint.find(_BACKWARD):
        if node.args[_TRAINING_OF_BACKWARD] is True:
            yield node, node.target, tuple(None if i in _STATISTICS else arg for i, arg in enumerate(node.args))


def moved_statistics(joint: Joint) -> Iterator[tuple[fx.Node, list[tuple[fx.Node, fx.Node]]]]:
    """Batch norms whose running statistics nothing else reads: the node, and each buffer with its new value."""
    changed = dict(changed_inputs(joint.graph))
    for node in joint.find(_FUNCTIONAL):
        items = items_of(node)
        if node in joint.backward or node.args[_TRAINING] is not True or 0 not in items:
            continue
        pairs = [(args_of(node)[place], items.get(place)) for place in _STATISTICS]
        if all(value is not None and _is_only_changed(buffer, value, node, changed) for buffer, value in pairs):
            yield node, pairs  # type: ignore[misc]  # none is None


def move_in_place(joint: Joint, site: tuple[fx.Node, list[tuple[fx.Node, fx.Node]]]) -> None:
    """Let the batch norm write into its buffers."""
    node, pairs = site
    node.target = _IN_PLACE
    node.meta["val"] = tuple(node.meta["val"][:3])
    for buffer, value in pairs:
        joint.replace(value, buffer)


def counters(joint: Joint) -> Iterator[fx.Node]:
    """What counts the batches of a layer."""
    changed = dict(changed_inputs(joint.graph))
    for node in joint.find(_aten.add.Tensor):
        if len(node.args) == 2 and not node.kwargs and isinstance(node.args[1], int):
            buffer = args_of(node)[0]
            if _is_only_changed(buffer, node, node, changed) and buffer.meta["val"].dtype == node.meta["val"].dtype:
                yield node


def count_in_place(joint: Joint, node: fx.Node) -> None:
    """Let it write into its buffer."""
    joint.call(node, add_to, node.args, None, node)
    joint.replace(node, args_of(node)[0])


def launched_counters(joint: Joint) -> Iterator[list[fx.Node]]:
    """On CUDA, all counters that count alike."""
    alike: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in joint.find(add_to):
        buffer, count = args_of(node)
        value = buffer.meta["val"]
        if value.device.type in _LAUNCHES:
            alike.setdefault((value.device, value.dtype, count), []).append(node)
    yield from alike.values()


def count_at_once(joint: Joint, nodes: list[fx.Node]) -> None:
    """Let one op count, at the place of the first."""
    buffers = [node.args[0] for node in nodes]
    joint.call(nodes[0], add_to, (buffers, nodes[0].args[1]), None, nodes[0])
    joint.erase_unread(*nodes)


def _is_only_changed(buffer: Any, value: fx.Node, node: fx.Node, changed: dict[fx.Node, fx.Node]) -> bool:
    """Whether only `node` reads the buffer, whose new value goes nowhere else."""
    if not isinstance(buffer, fx.Node) or changed.get(buffer) is not value or set(buffer.users) != {node}:
        return False
    if buffer not in node.args or node.all_input_nodes.count(buffer) != 1:
        return False
    users = list(value.users)
    left: Any = users[0].args[0]
    return [user.op for user in users] == ["output"] and sum(one is value for one in left) == 1


def small_buffers(joint: Joint) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Buffers that change, and ops that would run only once as they read them."""
    for buffer, _ in list(changed_inputs(joint.graph)):
        least_bytes = _MIN_RATIO * held_bytes(buffer.meta["val"])
        blocked = {
            node
            for node in readers(buffer)
            if node.op == "call_function" and node not in joint.backward
            if sum(map(held_bytes, tensors_of(node))) >= least_bytes and _reads_again(node)
        }
        if blocked:
            yield buffer, blocked


def read_copy(joint: Joint, site: tuple[fx.Node, set[fx.Node]]) -> None:
    """Let them read a copy of the buffer."""
    buffer, blocked = site
    first = next(node for node in joint.graph.nodes if node in buffer.users)
    copy = joint.call(first, _aten.clone.default, (buffer,), buffer.meta["val"].clone(), first)
    for node in list(buffer.users):
        if node in blocked or (is_view(node) and node not in joint.backward):
            node.replace_input_with(buffer, copy)


def _reads_again(node: fx.Node) -> bool:
    """Whether a second run of the node would read all that the first one reads."""
    again: list[fx.Node] = []
    fx.node.map_arg((second_call(node)[1], dict(node.kwargs)), again.append)
    return can_run_again(node) and set(node.all_input_nodes) <= set(again)
