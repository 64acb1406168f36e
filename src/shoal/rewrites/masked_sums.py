"""The gradient of a value that is written through a boolean mask or an index, as one op of a size that is known.

For `x[mask] = value` autograd selects what the mask does of the incoming gradient, in a tensor whose size depends on
the mask's values, and sums it to the size of the value. For `index_fill(dim, index, value)` it does so for each place
of the index once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from shoal.graph.fx_nodes import args_of
from shoal.graph.joint import Joint
from shoal.kernels.masked_sum import indexed_sum, masked_sum

_aten = torch.ops.aten
_SUM = _aten.sum.default
# A sum, what computes it from which arguments, and what it was computed from.
_Site = tuple[fx.Node, Callable[..., torch.Tensor], tuple[Any, ...], tuple[fx.Node, ...]]


def sums_through_masks(joint: Joint) -> Iterator[_Site]:
    """Sums of what a mask selects, over the axis whose size is not known."""
    for selected in joint.find(_aten.index.Tensor):
        source, indices = args_of(selected)
        known = not free_unbacked_symbols(selected.meta["val"]) or len(indices) != 1
        if known or not isinstance(indices[0], fx.Node) or indices[0].meta["val"].dtype != torch.bool:
            continue
        for user in list(selected.users):
            is_sum = user.target in (_SUM, _aten.sum.dim_IntList) and not user.kwargs
            if is_sum and not free_unbacked_symbols(user.meta["val"]):
                dims, *keepdim = user.args[1:] or (None,)
                yield user, masked_sum, (source, indices[0], dims, *keepdim), (selected,)


def sums_through_indices(joint: Joint) -> Iterator[_Site]:
    """Sums of what a unique index selects."""
    for selected in joint.find(_aten.index_select.default):
        source, dim, places = args_of(selected)
        unique = places.args[0] if places.target is operator.getitem else places
        if unique.target is _aten._unique.default and all(user.target is _SUM for user in selected.users):
            for user in list(selected.users):
                yield user, indexed_sum, (source, dim, unique.args[0]), (selected, places, unique)


def sum_at_once(joint: Joint, site: _Site) -> None:
    """Put one op in the place of the selection and the sum, before its size is asked for."""
    node, target, arguments, selection = site
    joint.replace(node, joint.call(node, target, arguments, node.meta["val"], node))
    joint.erase_unread(*selection)
