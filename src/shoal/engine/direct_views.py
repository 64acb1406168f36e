"""Views of tensors whose layouts are known, each made by one call instead of PyTorch's dispatch of a chain of ops.

GPT-2's step has 700 views, which took its host 3.4 of 20 ms: a `view`, a `transpose` or a `split` goes through a dozen
layers of PyTorch, which work out strides that the trace has already. Once the first run has held every tensor against
its trace (`shoal.engine.first_run`), sizes, strides and offset are all that is needed, as in Inductor's code.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import copied_joint
from shoal.kernels.casts import cast_together
from shoal.kernels.compiled_region import CompiledRegion
from shoal.lowlevel.torch_state import new_view

_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.expand.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.alias.default,
        _aten.detach.default,
    }
)
_PIECES = frozenset({_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int})


def with_direct_views(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with its views made from the tensor that was allocated, by `new_view`; what only led to them is gone.

    Storages live as long as before: what is a view's last reader stays one of its storage's.

    Args:
        module: a graph whose inputs and results have the layouts of the tensors in `meta["val"]`.

    Returns:
        The graph, or `module` itself where it has no such view. A view stays as it is where its sizes vary; and where
        it is of an input and is returned, or written to, so that PyTorch's count of an input's versions stays right.
    """
    if not any(_whole(node) is not None for node in module.graph.nodes):
        return module
    direct = copied_joint(module)
    for node in list(direct.graph.nodes):
        whole = _whole(node)
        if whole is None:
            continue
        made_of = _allocated(whole)
        if made_of.op == "placeholder" and not _is_only_read(node):
            continue
        value = node.meta["val"]
        offset = _offset_within(whole, node)
        if offset is None:
            continue
        with direct.graph.inserting_before(node):
            view = direct.graph.call_function(new_view, (made_of, tuple(value.shape), tuple(value.stride()), offset))
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view)
    for node in reversed(list(direct.graph.nodes)):
        if not node.users and _only_looks(node):
            direct.graph.erase_node(node)
    return direct


def _only_looks(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and node.args[0].target in _PIECES
    return node.target is new_view or node.target in _VIEWS or node.target in _PIECES


def _whole(node: fx.Node) -> fx.Node | None:
    """What the node is a view of, where both have sizes and strides that do not vary."""
    if node.op != "call_function":
        return None
    if node.target in _VIEWS:
        whole = node.args[0]
    elif node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].target in _PIECES:
        whole = node.args[0].args[0]
    else:
        return None
    if not isinstance(whole, fx.Node):
        return None
    value: Any = node.meta.get("val")
    base: Any = whole.meta.get("val")
    if not _is_laid_out(value) or not _is_laid_out(base) or value.dtype != base.dtype:
        return None
    return whole


def _offset_within(whole: fx.Node, view: fx.Node) -> int | None:
    """How many elements after the first of what was allocated a view begins; None where its op lays it out otherwise.

    The op itself tells: where a copy was put in after the trace, as of a concatenation's gradient that is cut off, the
    traced views of it still begin where they began in the whole.
    """
    value, base = view.meta["val"], whole.meta["val"]
    empty = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    op = view.args[0] if view.target is operator.getitem else view
    assert isinstance(op, fx.Node)
    if len(op.all_input_nodes) > 1:
        return None
    made: Any = op.target(empty, *op.args[1:], **op.kwargs)  # type: ignore[operator]
    if view.target is operator.getitem:
        made = made[view.args[1]]
    if made.shape != value.shape or made.stride() != value.stride():
        return None
    before: Any = whole.args[3] if whole.target is new_view else 0
    return before + int(made.storage_offset())


def _is_laid_out(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and all(type(number) is int for number in (*value.shape, *value.stride(), value.storage_offset()))
    )


def _allocated(node: fx.Node) -> fx.Node:
    """The node that the views which this one was made by are of."""
    while node.target is new_view:
        node = node.all_input_nodes[0]
    return node


def _is_only_read(view: fx.Node) -> bool:
    """Whether nothing writes to this view, nor gets it: ops of PyTorch say so, regions and casts only read."""
    for user in view.users:
        if user.target in _VIEWS or user.target in _PIECES or user.target is operator.getitem:
            if not _is_only_read(user):
                return False
        elif isinstance(user.target, torch._ops.OpOverload):
            if user.target._schema.is_mutable:
                return False
        elif not isinstance(user.target, CompiledRegion) and user.target is not cast_together:
            return False
    return True
