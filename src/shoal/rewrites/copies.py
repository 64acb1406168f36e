"""Copies that a step does not need: those that functional graphs make, results computed twice, gradients written whole.

- A copy of what the step made itself, such as an in-place activation's, is the tensor itself.
- A view of a view is written at once: functional graphs make a copy of each view that is written through.
- Ops of the forward pass that compute what an earlier one has are that one (each layer of a transformer makes the same
  mask), if it waits for the backward pass anyway, or is small: then no more bytes wait at any time.
- Average pooling to one pixel, of a channels_last map, ends in an `as_strided`, whose gradient autograd writes into
  zeros and reads from there again: two allocations and three kernels for elements that are already in their order.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from shoal.graph.fx_nodes import args_of, is_handed_out, is_tensor, reaches_output, readers, source, value_bytes
from shoal.graph.inplace import WRITTEN_VIEW
from shoal.graph.joint import Joint
from shoal.graph.rerun import is_random
from shoal.kernels.pieces import are_sizes_known

_aten = torch.ops.aten
_COPIES: dict[Any, int] = {_aten.clone.default: 0, _aten.copy.default: 1}  # → place of what is copied
_SCATTER, _STRIDED = _aten.as_strided_scatter.default, _aten.as_strided.default
_ZEROS = (_aten.new_zeros.default, _aten.zeros.default)
_SMALL_BYTES = 1 << 9  # what an allocator hands out for one number
Copy = tuple[fx.Node, fx.Node]  # a node, and what stands for it


def copies(joint: Joint) -> Iterator[Copy]:
    """What only copies a result, which the caller does not get."""
    for node in list(joint.graph.nodes):
        if (kept := _kept_as_it_is(node)) is not None:
            yield node, kept


def _kept_as_it_is(node: fx.Node) -> fx.Node | None:
    if node.target is _aten.detach.default:
        return node.args[0]  # type: ignore[return-value]  # fx types an argument as a union of all it may be
    place = _COPIES.get(node.target)
    if place is None or is_handed_out(node):
        return None
    copied_node = args_of(node)[place]
    copied, value = copied_node.meta.get("val"), node.meta["val"]
    same = (
        copied_node.op == "call_function"
        and isinstance(copied, torch.Tensor)
        and (copied.dtype, copied.device, copied.shape) == (value.dtype, value.device, value.shape)
        and (copied.is_conj(), copied.is_neg()) == (value.is_conj(), value.is_neg())
        and copied.stride() == value.stride()
        and copied.untyped_storage().nbytes() == value.untyped_storage().nbytes()
    )
    return copied_node if same else None


def uncopied_writes(joint: Joint) -> Iterator[Copy]:
    """Copies that are only written into other tensors: autograd's of the gradient of a strided view."""
    for target, place in _COPIES.items():
        for node in joint.find(target):
            copied, value = args_of(node)[place], node.meta["val"]
            if (copied.meta["val"].dtype, copied.meta["val"].device) != (value.dtype, value.device):
                continue
            written = all(user.target in WRITTEN_VIEW and user.all_input_nodes.index(node) == 1 for user in node.users)
            if copied.meta["val"].shape == value.shape and node.users and written:
                yield node, copied


def drop_copy(joint: Joint, site: Copy) -> None:
    """Let what is copied stand for a copy, and free what was allocated for that."""
    read = site[0].all_input_nodes
    joint.replace(*site)
    joint.erase_unread(*(node for node in read if node.target is _aten.new_empty_strided.default))


def nested_writes(joint: Joint) -> Iterator[tuple[fx.Node, fx.Node, torch.Tensor, list[fx.Node]]]:
    """Writes of a view of a view: the node, what is written in the end, as which view of the base, through which."""
    for node in list(joint.graph.nodes):
        if node.target in WRITTEN_VIEW and (found := _written_through(node)) is not None:
            yield node, *found


def _written_through(node: fx.Node) -> tuple[fx.Node, torch.Tensor, list[fx.Node]] | None:
    base = args_of(node)[0]
    whole = base.meta["val"]
    outer: fx.Node = node
    views: list[fx.Node] = []
    region: Any = whole
    while True:
        operands = args_of(outer)[2:]
        if any(type(number) is not int for number in (*region.shape, *region.stride(), region.storage_offset())):
            return None
        if outer.kwargs or any(isinstance(operand, fx.Node) for operand in operands):
            return None
        region = WRITTEN_VIEW[outer.target](region, *operands)
        inner = args_of(outer)[1]
        if inner.target not in WRITTEN_VIEW or len(inner.users) > 1:
            break
        view = args_of(inner)[0]
        viewed = views[-1] if views else base
        if view.target is not WRITTEN_VIEW[outer.target] or view.args != (viewed, *operands) or view.kwargs:
            break
        views.append(view)
        outer = inner
    fits = whole.is_contiguous() and whole.numel() * whole.element_size() == whole.untyped_storage().nbytes()
    if outer is node or not fits or whole.is_conj() or whole.is_neg():
        return None
    return inner, region, views


def write_at_once(joint: Joint, site: tuple[fx.Node, fx.Node, torch.Tensor, list[fx.Node]]) -> None:
    """Write the base itself."""
    node, written, region, views = site
    base, part = args_of(node)[:2]
    node.target = _SCATTER
    node.args = (base, written, list(region.shape), list(region.stride()), region.storage_offset())
    while part is not written:
        inner = args_of(part)[1]
        joint.graph.erase_node(part)
        part = inner
    joint.erase_unread(*reversed(views))


def duplicates(joint: Joint) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """Nodes that another one may stand for, and then those that nothing reads any more."""
    backward = joint.backward
    first_of: dict[Any, fx.Node] = {}
    alike: dict[fx.Node, fx.Node] = {}  # node → the first one that computes the same
    stays: dict[fx.Node, fx.Node] = {}  # of these → the one that may stand for all
    merged: list[fx.Node] = []
    for node in joint.graph.nodes:
        if node in backward or not _computes_the_same_again(node) or is_handed_out(node):
            continue
        first = alike[node] = first_of.setdefault(_key(node, alike), node)
        if first in stays:
            merged.append(node)
        elif _waits_anyway(node, backward):
            stays[first] = node
    yield from ((node, stays[alike[node]]) for node in merged)
    yield from ((node, None) for node in reversed(list(alike)) if not node.users and alike[node] is not node)
    # Each result of an op is one node, also if only the backward pass reads it, as a pooling's indices.
    ops = {stays[alike[node]] for node in merged}
    first_of = {}
    for node in joint.find(operator.getitem) if ops else ():
        if node.args[0] in ops and (first := first_of.setdefault(node.args, node)) is not node:
            yield node, first
            yield node, None


def merge(joint: Joint, site: tuple[fx.Node, fx.Node | None]) -> None:
    """Let the other node be read instead, or none."""
    node, other = site
    if other is None:
        joint.graph.erase_node(node)
    else:
        node.replace_all_uses_with(other)


def _computes_the_same_again(node: fx.Node) -> bool:
    if node.op != "call_function" or not is_tensor(node):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable or is_random(node):
        return False
    return "empty" not in node.target._schema.name  # which is there to be written


def _key(node: fx.Node, alike: Mapping[fx.Node, fx.Node]) -> Any:
    """Equal for calls of the same on the same; numbers of different types differ."""

    def key_of(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(key_of, value))
        if isinstance(value, fx.Node):
            return alike.get(value, value)
        return type(value), repr(value)

    return node.target, key_of(node.args), tuple((name, key_of(value)) for name, value in sorted(node.kwargs.items()))


def _waits_anyway(node: fx.Node, backward: Collection[fx.Node]) -> bool:
    """Whether what a node holds, or looks at, is alive until the backward pass, or is next to nothing."""
    held = source(node)
    if held.op != "call_function" or any(reader in backward for reader in readers(held, of_items=True)):
        return True
    value = held.meta["val"]
    return isinstance(value, torch.Tensor) and type(value.numel()) is int and value_bytes(held) <= _SMALL_BYTES


def whole_scatters(joint: Joint) -> Iterator[tuple[fx.Node, fx.Node, list[fx.Node]]]:
    """Scatters that write all of their result, in its order: the node, what is written, the views of all of it."""
    for scatter in joint.find(_SCATTER):
        written = _written_whole(scatter)
        if written is not None:
            views = [user for user in scatter.users if user.target is _STRIDED and _is_a_view(user, written)]
            if views or not scatter.users:
                yield scatter, written, views


def view_what_is_written(joint: Joint, site: tuple[fx.Node, fx.Node, list[fx.Node]]) -> None:
    """Put a view of what is written in place of each `as_strided`."""
    scatter, written, views = site
    for user in views:
        value = user.meta["val"]
        joint.replace(user, joint.call(user, _aten.view.default, (written, list(value.shape)), value, user))
    zeros = scatter.args[0]
    if not scatter.users and isinstance(zeros, fx.Node):
        joint.graph.erase_node(scatter)
        # Views of zeros are of what was to be written, by AOTAutograd.
        joint.erase_unread(*(user for user in list(zeros.users) if user.target is _STRIDED))
        joint.erase_unread(*([zeros] if zeros.target in _ZEROS else ()))


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
