"""`tensor.data = value` and `tensor.set_(value)` in a forward pass, as copies into the tensor.

Max-norm layers and momentum encoders assign the `.data` of their parameters in every call. Dynamo traces that as
an op which AOTAutograd takes only as part of the forward graph. `tensor.data.copy_(value)` gives the same values,
and the tensor keeps the storage that the budget, the optimizer and DDP's buckets know.

A copy is the same if no other tensor shares the value's storage, and if the value has the tensor's shape.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shoal.capture.failed_traces import place_in
from shoal.errors import CaptureError
from shoal.lowlevel.dynamo_state import assign_data_of, data_of
from shoal.lowlevel.torch_versions import DATA_ASSIGNMENTS

_COUNTS_BACK = "_lower_version_count_by_1"  # Dynamo's: assigning `.data` counts no version, `set_` does


def copy_assigned_data(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Replace what a graph of Dynamo's assigns to its inputs by copies into them; the graph is edited.

    Args:
        gm, inputs: as Dynamo passes them to a backend.

    Raises:
        CaptureError: the value has another shape, or shares its storage with another tensor.
    """
    assigning = [node for node in gm.graph.nodes if node.target in DATA_ASSIGNMENTS]
    if not assigning:
        return
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in assigning:
        if reason := _why_no_copy(node, given):
            raise CaptureError(
                f"{reason} at {place_in(node.stack_trace or '')}: a planned step cannot repeat that; use "
                "tensor.data.copy_(value)"
            )
    tensors = {node.args[0] for node in assigning}
    for node in assigning:
        _copy(gm.graph, node)
    for tensor in tensors:
        # Dynamo's trace assigned to the input's fake tensor, with which AOTAutograd traces too.
        assign_data_of(tensor.meta["example_value"], given[tensor])
    gm.recompile()


def _copy(graph: fx.Graph, node: fx.Node) -> None:
    tensor, value = node.args
    with graph.inserting_before(node):
        into, source = (graph.call_function(data_of, (one,)) for one in (tensor, value))
        copied = graph.call_method("copy_", (into, source))
    for new, like in ((into, tensor), (source, value), (copied, tensor)):
        new.meta = {**node.meta, "example_value": like.meta["example_value"]}  # type: ignore[union-attr]
    for user in list(node.users):
        if getattr(user.target, "__name__", "") == _COUNTS_BACK:
            graph.erase_node(user)
    node.replace_all_uses_with(tensor)  # type: ignore[arg-type]
    graph.erase_node(node)


def _why_no_copy(node: fx.Node, given: dict[fx.Node, Any]) -> str:
    """Why a copy would not be the same; "" if it is."""
    tensor, value = node.args
    if tensor not in given:
        return "set_() of a tensor that is computed"
    assert isinstance(tensor, fx.Node) and isinstance(value, fx.Node)
    shapes = given[tensor].shape, value.meta["example_value"].shape
    if shapes[0] != shapes[1]:
        return f"data of shape {list(shapes[1])} is assigned to a tensor of shape {list(shapes[0])}"
    storage, through, assigned = _storage(value), {tensor, node}, False
    for other in node.graph.nodes:
        assigned = assigned or other is node
        if other in through:
            continue
        if assigned and _storage(other) == storage and through.intersection(other.all_input_nodes):
            through.add(other)  # a view of the tensor, which sees the copy
        shared = any(_storage(one) == storage and one not in through for one in (other, *other.all_input_nodes))
        if shared and (other.op in ("placeholder", "output") or (assigned and _changes(other))):
            return "data that shares its storage with another tensor is assigned"
    return ""


def _changes(node: fx.Node) -> bool:
    """Whether it changes an operand in place, by its name: `add_`, `iadd`, `out=`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    augmented = name.startswith("i") and any(hasattr(operator, name[1:] + end) for end in ("", "_"))
    return augmented or (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs


def _storage(node: fx.Node) -> int | None:
    tensors = [one for one in tree_leaves(node.meta.get("example_value")) if isinstance(one, torch.Tensor)]
    return tensors[0].untyped_storage()._cdata if len(tensors) == 1 else None
