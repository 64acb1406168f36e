"""A captured step that holds fewer bytes between the ops of its backward pass, each time at the cost of an op.

- The result of a ReLU or leaky ReLU that others read too becomes one boolean an element when the last of them is done
  (`activation_masks`).
- The part of a concatenation's gradient that waits long for its reader (a U-Net's skip) waits as a copy of its own, so
  that it does not hold the whole gradient.

Neither lowers what is in use when the backward pass begins, where a step has its peak as long as all it saves is kept:
so they are for budgets in which little is kept. No bit of the result changes.
"""

from __future__ import annotations

import torch
from torch import fx

from shoal.capture.activation_masks import shrink_to_masks
from shoal.capture.captured import Captured
from shoal.capture.fx_nodes import copied_joint, describe_as, held_bytes
from shoal.capture.step_reader import read_joint
from shoal.capture.symbolic_sizes import usual

_aten = torch.ops.aten
_LONG_WAIT_NODES = 24
_PART_OF_WHOLE = 0.75


def shrunk(captured: Captured) -> Captured | None:
    """The step rewritten so; None where there is nothing to rewrite. `captured` stays as it is."""
    joint = copied_joint(captured.joint)
    backward = {node for node in joint.graph.nodes if node.name in captured.backward_names}
    shrink_to_masks(joint.graph, backward)
    _copy_what_waits(joint.graph, backward)
    joint.graph.lint()
    names = {node.name for node in backward}
    return read_joint(joint, names, captured.read_with) if names != captured.backward_names else None


def _copy_what_waits(graph: fx.Graph, backward: set[fx.Node]) -> None:
    order: dict[fx.Node, float] = {node: number for number, node in enumerate(graph.nodes)}

    def last_reader(node: fx.Node) -> fx.Node:
        readers = [last_reader(user) if _is_slice(user) else user for user in node.users]
        return max(readers, key=order.__getitem__)

    for node in [node for node in graph.nodes if node in backward]:  # in order: names are given in turn
        parts = [user for user in node.users if _is_slice(user) and user.users]
        if len(parts) < 2 or len(parts) < len(node.users):
            continue
        *sooner, longest = sorted(parts, key=lambda part: order[last_reader(part)])
        done = last_reader(sooner[-1])
        first_read = min(order[user] for user in longest.users)
        part_bytes = usual(longest.meta["val"].numel()) * longest.meta["val"].element_size()
        whole_bytes = held_bytes(node.meta["val"])
        if first_read - order[done] < _LONG_WAIT_NODES or part_bytes > _PART_OF_WHOLE * whole_bytes:
            continue
        with graph.inserting_after(done):
            view = graph.node_copy(longest)
        with graph.inserting_after(view):
            copy = graph.call_function(_aten.clone.default, (view,))
        order[view] = order[copy] = order[done] + 0.5  # a slice of a slice looks for its last reader among them
        describe_as(copy, longest.meta["val"].clone(), longest)
        longest.replace_all_uses_with(copy)
        graph.erase_node(longest)
        backward.difference_update({longest})
        backward.update({view, copy})


def _is_slice(node: fx.Node) -> bool:
    return node.target is _aten.slice.Tensor
