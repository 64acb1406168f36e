"""The gradient of what is written through a boolean mask, `x[mask] = value`, as one op of a size that is known.

Autograd selects what the mask does of the incoming gradient, in a tensor whose size depends on the mask's values, and
sums it to the size of the value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from shoal.capture.fx_nodes import describe_as
from shoal.kernels.masked_sum import masked_sum

_aten = torch.ops.aten


def sum_through_masks(graph: fx.Graph) -> None:
    """Put one op in the place of each selection by a mask that is only summed over.

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
            with graph.inserting_before(user):
                total = graph.call_function(masked_sum, (source, indices[0], dims, *keepdim))
            describe_as(total, user.meta["val"], user)
            user.replace_all_uses_with(total)
            graph.erase_node(user)
        if not selected.users:
            graph.erase_node(selected)


def _is_boolean(index: Any) -> bool:
    return isinstance(index, fx.Node) and index.meta["val"].dtype == torch.bool


def _sums_all_selected(user: fx.Node) -> bool:
    """Whether a node is a sum over the axis whose size is not known, in the dtype of what it sums."""
    is_sum = user.target in (_aten.sum.default, _aten.sum.dim_IntList) and not user.kwargs
    return is_sum and not free_unbacked_symbols(user.meta["val"])
