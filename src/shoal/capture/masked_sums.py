"""The gradient of a value that is written through a boolean mask or an index, as one op of a size that is known.

For `x[mask] = value` autograd selects what the mask does of the incoming gradient, in a tensor whose size depends on
the mask's values, and sums it to the size of the value. For `index_fill(dim, index, value)` it does so for each place
of the index once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from shoal.capture.fx_nodes import describe_as
from shoal.kernels.masked_sum import indexed_sum, masked_sum

_aten = torch.ops.aten
_SUM = _aten.sum.default


def sum_through_masks(graph: fx.Graph) -> None:
    """Put one op in the place of each selection by a mask, or by a unique index, that is only summed over.

    Args:
        graph: the joint graph; edited.
    """
    for selected in graph.find_nodes(op="call_function", target=_aten.index.Tensor):
        source, indices = selected.args
        if not free_unbacked_symbols(selected.meta["val"]) or len(indices) != 1 or not _is_boolean(indices[0]):
            continue
        for user in list(selected.users):
            if not _sums_all_selected(user):
                continue
            dims, *keepdim = user.args[1:] or (None,)
            _replace(user, masked_sum, (source, indices[0], dims, *keepdim))
        if not selected.users:
            graph.erase_node(selected)
    for selected in graph.find_nodes(op="call_function", target=_aten.index_select.default):
        source, dim, places = selected.args
        unique = places.args[0] if places.target is operator.getitem else places
        if unique.target is not _aten._unique.default or not all(user.target is _SUM for user in selected.users):
            continue
        for user in list(selected.users):
            _replace(user, indexed_sum, (source, dim, unique.args[0]))
        for node in (selected, places, unique):
            if not node.users:
                graph.erase_node(node)


def _replace(user: fx.Node, function: Callable[..., torch.Tensor], arguments: tuple[Any, ...]) -> None:
    with user.graph.inserting_before(user):
        total = user.graph.call_function(function, arguments)
    describe_as(total, user.meta["val"], user)
    user.replace_all_uses_with(total)
    user.graph.erase_node(user)


def _is_boolean(index: Any) -> bool:
    return isinstance(index, fx.Node) and index.meta["val"].dtype == torch.bool


def _sums_all_selected(user: fx.Node) -> bool:
    """Whether a node is a sum over the axis whose size is not known, in the dtype of what it sums."""
    is_sum = user.target in (_SUM, _aten.sum.dim_IntList) and not user.kwargs
    return is_sum and not free_unbacked_symbols(user.meta["val"])
