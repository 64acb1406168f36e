"""Where a kernel's result does not have the strides of the trace, and a captured step with copies that put it right.

Kernels, views and in-place forms of the step are chosen by traced strides. A kernel that returns others than its fake
kernel said would make the next one read the wrong elements, or take another path than was captured.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.step_reader import needed_by, read_joint
from shoal.graph.fx_nodes import is_view
from shoal.graph.symbolic_sizes import as_arguments
from shoal.kernels.memory_format import copied

_JOINT_NAME = "joint_name"  # in a node's meta: what it is called in the joint graph, whatever lowering calls it
_PLACE = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr")


@dataclass(frozen=True)
class Departure:
    """A tensor whose real layout cannot be that of the trace without a copy.

    Attributes:
        node: the name of its node in the joint graph.
        target: what returned it.
        shape: of the tensor.
        traced, real: its strides in the trace and those it came with.
        nbytes: what the copy takes.
    """

    node: str
    target: str
    shape: tuple[int, ...]
    traced: tuple[int, ...]
    real: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.target} returns {list(self.shape)} with strides {list(self.real)}, traced {list(self.traced)}"


def joint_name(node: fx.Node) -> str:
    """The name of a lowered node's origin in the joint graph."""
    return str(node.meta.get(_JOINT_NAME, node.name))


def is_put_right(node: fx.Node) -> bool:
    """Whether a planned copy into the traced layout is all that reads the node."""
    return bool(node.users) and all(user.target is copied for user in node.users)


def with_copies(captured: Captured, departures: Mapping[str, Departure]) -> Captured:
    """The step with a copy into the traced layout after each node that departs; edits the joint graph in place.

    Nodes of the joint graph learn their names, by which `joint_name` finds them again.

    Args:
        captured: the step.
        departures: by name of the node.
    """
    graph = captured.joint.graph
    for node in graph.nodes:
        node.meta[_JOINT_NAME] = node.name
    found = [node for node in graph.nodes if node.name in departures]
    if not found:
        return captured
    forward = needed_by(captured.forward_outputs)
    backward = set(captured.backward_names)
    for node in found:
        traced = node.meta["val"]
        with graph.inserting_after(node):
            copy = graph.call_function(copied, (node, as_arguments(graph, traced.stride())))
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
        copy.meta = {key: node.meta[key] for key in _PLACE if key in node.meta}
        copy.meta["val"] = traced.new_empty_strided(traced.shape, traced.stride())
        if node not in forward:
            backward.add(copy.name)
        if not any(isinstance(size, torch.SymInt) for size in traced.shape):
            _describe(node, traced.new_empty_strided(traced.shape, departures[node.name].real))
    graph.lint()
    return read_joint(captured.joint, backward, captured.read_with)


def _describe(node: fx.Node, real: torch.Tensor) -> None:
    """Note what a kernel really returns; a view stays a view of the storage that it was traced to look at."""
    if node.target is not operator.getitem:
        if not is_view(node):
            node.meta["val"] = real
        return
    whole: Any = node.args[0]
    if not is_view(whole):
        node.meta["val"] = real
        whole.meta["val"] = tuple(
            real if place == node.args[1] else part for place, part in enumerate(whole.meta["val"])
        )
