"""Gradients of `as_strided` that reach every element once are views of what comes in.

Average pooling to one pixel, of a channels_last map, ends in an `as_strided`. Autograd writes its gradient into zeros
and reads it from there again: two allocations and three kernels for elements that are there already, in their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shoal.capture.fx_nodes import reaches_output
from shoal.kernels.pieces import are_sizes_known

_aten = torch.ops.aten
_SCATTER, _STRIDED, _ZEROS = (
    _aten.as_strided_scatter.default,
    _aten.as_strided.default,
    (_aten.new_zeros.default, _aten.zeros.default),
)


def view_whole_scatters(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """Put a view in place of each `as_strided` of such a gradient.

    Args:
        graph: the joint graph; edited.
        backward: its backward nodes; new ones are added.
    """
    for scatter in list(graph.find_nodes(op="call_function", target=_SCATTER)):
        written = _written_whole(scatter)
        if written is None:
            continue
        for user in list(scatter.users):
            if user.target is _STRIDED and _is_a_view(user, written):
                with graph.inserting_before(user):
                    view = graph.call_function(_aten.view.default, (written, list(user.meta["val"].shape)))
                view.meta = dict(user.meta)
                user.replace_all_uses_with(view)
                if user in backward:
                    backward.add(view)
                graph.erase_node(user)
        zeros = scatter.args[0]
        if not scatter.users and isinstance(zeros, fx.Node):
            graph.erase_node(scatter)
            for view in [user for user in zeros.users if user.target is _STRIDED and not user.users]:
                graph.erase_node(view)  # AOTAutograd's, of what was to be written
            if not zeros.users and zeros.target in _ZEROS:
                graph.erase_node(zeros)


def _written_whole(scatter: fx.Node) -> fx.Node | None:
    """What a scatter writes, where that is all of its result, in the order in which it lies."""
    written, base = scatter.args[1], scatter.args[0]
    if not isinstance(written, fx.Node) or not isinstance(base, fx.Node) or reaches_output(scatter):
        return None
    value, whole = written.meta["val"], base.meta["val"]
    sizes, strides = (tuple(place) if isinstance(place, (list, tuple)) else () for place in scatter.args[2:4])
    if not all(type(number) is int for number in (*value.shape, *value.stride(), *whole.shape, *sizes, *strides)):
        return None
    starts = scatter.args[4] if len(scatter.args) > 4 else scatter.kwargs.get("storage_offset")
    same = sizes == tuple(value.shape) and strides == value.stride() and value.is_contiguous() and not starts
    alike = (whole.dtype, whole.numel()) == (value.dtype, value.numel()) and whole.is_contiguous()
    lazy = value.is_conj() or value.is_neg()
    return written if same and alike and not lazy else None


def _is_a_view(strided: fx.Node, written: fx.Node) -> bool:
    """Whether `strided`, of a tensor in which `written` lies from the first element on, is a view of all of it."""
    value: Any = strided.meta["val"]
    starts = strided.args[3] if len(strided.args) > 3 else strided.kwargs.get("storage_offset")
    if starts or not are_sizes_known(value):
        return False
    return bool(
        value.numel() == written.meta["val"].numel()
        and value.stride() == torch.empty(value.shape, device="meta").stride()
    )
