"""A captured step with casts of parameters, and of their gradients, several to an op.

Autocast casts each weight by itself, forward, and each weight's gradient, backward: in ResNet-50 108 launches of a few
microseconds each on the device, which take longer than that on the host. Parameters are there all step, and gradients
stay: so the casts of a few layers may as well run where the first of them is needed, or the last gradient is known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.step_reader import storage_bytes
from shoal.capture.step_writer import StepWriter
from shoal.kernels.casts import cast_together
from shoal.kernels.memory_format import is_same_order

_aten = torch.ops.aten
_CAST = _aten._to_copy.default
_ON = ("cuda",)
_MOST_BYTES = 8 << 20  # of the results of an op: that much may be there earlier than it is needed


def with_gathered_casts(captured: Captured) -> Captured:
    """The step with its casts gathered, on CUDA; on the CPU, where a launch is a call, it stays as it is."""
    if captured.device.type not in _ON:
        return captured
    writer = StepWriter(captured)
    kind_of = {node.name: captured.graph.storages[storage].kind for node, storage in captured.storage_of.items()}

    def of_parameter(node: fx.Node) -> bool:
        return node not in writer.backward and kind_of.get(node.all_input_nodes[0].name) == "parameter"

    def of_gradient(node: fx.Node) -> bool:
        (cast,) = node.all_input_nodes
        given = cast.op != "placeholder" and len(cast.users) == 1
        return node in writer.backward and given and all(user.op == "output" for user in node.users)

    forward = _groups(writer.graph, of_parameter)
    # Gradients that are handed over early are cast one by one.
    backward = [] if captured.read_with.early else _groups(writer.graph, of_gradient)
    if not forward and not backward:
        return captured
    for group in forward:
        _gather(writer, group, before=group[0])
    for group in backward:
        _gather(writer, group, before=group[-1])
    return writer.read()


def _groups(graph: fx.Graph, wanted: Callable[[fx.Node], bool]) -> list[list[fx.Node]]:
    """Casts from one dtype to another, in the order of the graph, as many as keep their results small."""
    open_groups: dict[tuple[torch.dtype, torch.dtype], list[fx.Node]] = {}
    found: list[list[fx.Node]] = []
    for node in graph.find_nodes(op="call_function", target=_CAST, sort=True):
        if not _is_plain(node) or not wanted(node):
            continue
        key = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
        group = open_groups.setdefault(key, [])
        if group and sum(storage_bytes(one.meta["val"]) for one in [*group, node]) > _MOST_BYTES:
            found.append(group)
            group = open_groups[key] = []
        group.append(node)
    return [group for group in [*found, *open_groups.values()] if len(group) > 1]


def _is_plain(node: fx.Node) -> bool:
    """Whether a cast changes the dtype only, of a tensor of known size."""
    read, made = node.all_input_nodes[0].meta["val"], node.meta["val"]
    as_it_is = {"dtype": made.dtype, "device": made.device, "layout": torch.strided, "non_blocking": False}
    if any(value not in (None, as_it_is.get(key)) for key, value in node.kwargs.items()):
        return False
    if any(type(size) is not int for size in (*read.shape, *read.stride())):
        return False
    return read.device == made.device and made.dtype != read.dtype and is_same_order(read, made.stride())


def _gather(writer: StepWriter, group: list[fx.Node], *, before: fx.Node) -> None:
    values = [node.meta["val"] for node in group]
    operands = [node.args[0] for node in group]
    strides = [tuple(value.stride()) for value in values]
    together = writer.call(before, cast_together, (operands, values[0].dtype, strides), tuple(values), group[0])
    for place, (node, value) in enumerate(zip(group, values, strict=True)):
        item = writer.call(before, operator.getitem, (together, place), value, node)
        node.replace_all_uses_with(item)
    for node in group:
        writer.graph.erase_node(node)
