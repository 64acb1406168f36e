"""Which convolutions of a step native kernels compute, and which concatenations are left out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.step_writer import with_technique
from shoal.core.step import StepGraph
from shoal.core.variant import Pieces
from shoal.kernels.convolution import input_gradient
from shoal.rewrites.concatenations import can_be_left_out
from shoal.rewrites.convolutions import can_be_native, parts_of

_aten = torch.ops.aten
_WORTH_BYTES = 4 << 20  # of scratch, or of a concatenation
_SLOWER = 1.25  # by how much a kernel that needs less scratch may be slower where that sets the peak
_NEAR_WHAT_STAYS = 0.5
_NEAR_OF_CONCATENATIONS = 0.2  # what else is held while another op runs differs by much


def choose_direct(captured: Captured, graph: StepGraph, costed: Callable[[Captured], StepGraph]) -> tuple[Pieces, ...]:
    """Which convolutions of a step to compute by direct kernels, in the order of the step.

    Those that are no slower by it, and those whose scratch is near what sets the step's smallest peak and that are not
    slower by more than a quarter.

    Args:
        captured: the step, to be run on this machine.
        graph: the same with times and workspaces.
        costed: measures those.
    """
    able = [Pieces(name, direct=True) for name, node in captured.node_of.items() if can_be_native(node)]
    if not able or captured.largest_nodes:
        return ()
    direct = costed(with_technique(captured, "direct", [one.op for one in able]))
    theirs, ours = ({op.name: op for op in each.ops} for each in (graph, direct))
    held = {op.name: sum(graph.storages[one].nbytes for one in {*op.reads, *op.writes}) for op in graph.ops}
    stays_bytes = max(held.values())
    chosen = []
    for one in able:
        before, after = theirs[one.op], ours.get(one.op)
        if after is None:
            continue  # a gradient that falls into parts
        saved_bytes = before.workspace_bytes - after.workspace_bytes
        near = before.workspace_bytes + held[one.op] > _NEAR_WHAT_STAYS * stays_bytes
        faster = after.longer_seconds <= before.longer_seconds
        if faster or (near and saved_bytes > _WORTH_BYTES and after.longer_seconds <= _SLOWER * before.longer_seconds):
            chosen.append(one)
    return _with_concatenations(captured, able, chosen, theirs, ours)


def _with_concatenations(
    captured: Captured, able: Collection[Pieces], chosen: list[Pieces], theirs: Any, ours: Any
) -> tuple[Pieces, ...]:
    """With the other readers of concatenations that then need not be computed."""
    found = {one.op for one in chosen}
    names = {one.op for one in able}
    for node in captured.joint.graph.find_nodes(op="call_function", target=_aten.cat.default):
        readers = [user.name for user in node.users]
        if parts_of(node) is None or not all(name in names for name in readers):
            continue
        before, after = (sum(each[name].longer_seconds for name in readers if name in each) for each in (theirs, ours))
        if after <= _SLOWER * (before + theirs[node.name].longer_seconds):
            found.update(readers)
            found.update(name for name in _input_gradients_of(captured, node) if name in names)
    return tuple(one for one in able if one.op in found)


def _input_gradients_of(captured: Captured, node: fx.Node) -> list[str]:
    weights = {user.args[1] for user in node.users if user.target is _aten.convolution.default}
    gradients = captured.joint.graph.find_nodes(op="call_function", target=input_gradient)
    return [one.name for one in gradients if one.args[1] in weights]


def choose_concatenations(captured: Captured, graph: StepGraph) -> tuple[Pieces, ...]:
    """Which concatenations not to compute: those that are large, and near the most that any op holds.

    Args:
        captured: the step.
        graph: the same.
    """
    held = {op.name: sum(graph.storages[one].nbytes for one in {*op.reads, *op.writes}) for op in graph.ops}
    most_bytes = max(held.values(), default=0)
    cats = captured.joint.graph.find_nodes(op="call_function", target=_aten.cat.default)
    able = [node.name for node in cats if can_be_left_out(node)]
    near = [name for name in able if held.get(name, 0) > max(_WORTH_BYTES, _NEAR_OF_CONCATENATIONS * most_bytes)]
    return tuple(Pieces(name, parts=True) for name in near)
