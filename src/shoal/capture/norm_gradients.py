"""Rewrites of the backward pass of fused batch norms that save tensors and change no bit of the result.

- The gradient that a normalisation hands on is what the ReLU lets through, times a number a channel. The convolution
  before it multiplies by that number itself, so the product is no tensor of its own; after a residual block what the
  ReLU lets through serves both branches.
- Where a convolution's input gradient is added to another one, as where a residual block begins, it is added while it
  is written.

They hold for float32 on the CPU in channels_last, where both kernels round the product before they go on with it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shoal.capture.fx_nodes import args_of, items_of
from shoal.kernels.norm.norm_rows import native_row_stride
from shoal.kernels.pieces import are_sizes_known
from shoal.lowlevel.native import levels

_aten = torch.ops.aten
_of_norm = torch.ops.shoal.norm_act_backward.default
_of_convolution = torch.ops.shoal.norm_conv_backward.default
_NEEDS_OF_NORM, _NEEDS, _FACTOR, _ONTO = 7, 15, 16, 17  # places of operands


def fold_norm_gradients(joint: fx.GraphModule, backward: set[fx.Node]) -> None:
    """Apply both to `joint`; new nodes are added to `backward`, its backward nodes."""
    if not levels():
        return
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=_of_norm):
        _fold_product(graph, node, backward)
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=_aten.add.Tensor):
        if node in backward:
            _add_while_written(graph, node, order)


def _fold_product(graph: fx.Graph, node: fx.Node, backward: set[fx.Node]) -> None:
    grad, xs, _, scale, _, _, relu, needs, *own = args_of(node)
    if not needs[0] or len(xs) != 1 or (own and own[0] is not None):  # its gradient is whole, and no product
        return
    items = items_of(node)
    product = items.get(1 if needs[2] else 0)
    reader = next(iter(product.users), None) if product is not None else None
    if product is None or reader is None or len(product.users) > 1 or reader.target is not _of_convolution:
        return
    arguments = _all_of_convolution(reader)
    if arguments[0] is not product or arguments[_FACTOR] is not None:
        return
    value = product.meta["val"]
    if arguments[_NEEDS][3]:  # a bias sums up the rounded products
        return
    if not (_is_read_natively(value) and _is_alike(grad.meta["val"], value) and scale.meta["val"].dtype == value.dtype):
        return
    passed = grad
    if relu:
        passed = _with_what_passes(graph, node, items, backward)
    else:
        _without_product(node, items)
    reader.args = (passed, *arguments[1:_FACTOR], scale, *arguments[_ONTO:])
    for unread in (product, *([] if node.users else [node])):
        graph.erase_node(unread)


def _with_what_passes(graph: fx.Graph, node: fx.Node, items: dict[int, fx.Node], backward: set[fx.Node]) -> fx.Node:
    """What the ReLU lets through, of an op that no longer hands on the product."""
    needs, values = args_of(node)[_NEEDS_OF_NORM], list(node.meta["val"])
    passed = items.get(0) if needs[2] else None
    if passed is None:
        with graph.inserting_after(node):
            passed = graph.call_function(operator.getitem, (node, 0))
        passed.meta = dict(items[1 if needs[2] else 0].meta)
        backward.add(passed)
    if needs[2]:
        _renumber(items, 2, 1)
        values.pop(1)
    node.args = (*args_of(node)[:_NEEDS_OF_NORM], [False, needs[1], True])
    node.meta["val"] = values  # what passes has the product's shape and layout
    return passed


def _without_product(node: fx.Node, items: dict[int, fx.Node]) -> None:
    needs = args_of(node)[_NEEDS_OF_NORM]
    _renumber(items, 1, 0)
    node.args = (*args_of(node)[:_NEEDS_OF_NORM], [False, needs[1], False])
    node.meta["val"] = list(node.meta["val"])[1:]


def _renumber(items: dict[int, fx.Node], before: int, now: int) -> None:
    """Let the items from place `before` on be those from place `now` on."""
    for place, item in items.items():
        if place >= before:
            item.update_arg(1, place - before + now)


def _add_while_written(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int]) -> None:
    terms = args_of(node)
    if len(terms) != 2 or node.kwargs or not all(isinstance(term, fx.Node) for term in terms) or terms[0] is terms[1]:
        return
    for gradient, other in sorted((terms, terms[::-1]), key=lambda pair: order.get(pair[0], -1), reverse=True):
        producer = gradient.args[0] if gradient.target is operator.getitem else None
        if not isinstance(producer, fx.Node) or producer.target is not _of_convolution:
            continue
        arguments = _all_of_convolution(producer)
        is_alone = (
            gradient.args[1] == 0 and len(gradient.users) == 1 and arguments[_NEEDS][0] and len(arguments[3]) == 1
        )
        comes_first = order.get(other, len(order)) < order[producer]
        value = gradient.meta["val"]
        if not (is_alone and comes_first and arguments[_ONTO] is None and _is_read_natively(value)):
            continue
        if not (_is_alike(other.meta["val"], value) and _is_alike(node.meta["val"], value)):
            continue
        producer.args = (*arguments[:_ONTO], other, *arguments[_ONTO + 1 :])
        node.replace_all_uses_with(gradient)
        graph.erase_node(node)
        return


def _all_of_convolution(node: fx.Node) -> tuple[Any, ...]:
    return (*node.args, *[None] * (_ONTO + 1 - len(node.args)))


def _is_read_natively(value: torch.Tensor) -> bool:
    return are_sizes_known(value) and native_row_stride(value) is not None


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
