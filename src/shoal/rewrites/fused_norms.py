"""Rewrites of the backward pass of fused batch norms that save tensors and change no bit of the result.

- The gradient that a normalisation hands on is what the ReLU lets through, times a number a channel. The convolution
  before it multiplies by that number itself, so the product is no tensor of its own; after a residual block what the
  ReLU lets through serves both branches.
- If a convolution's input gradient is added to another one, as where a residual block begins, it is added while it is
  written.

They hold for float32 on the CPU in channels_last, where both kernels round the product before they go on with it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import args_of, items_of
from shoal.graph.joint import Joint
from shoal.kernels.norm.norm_rows import native_row_stride
from shoal.kernels.pieces import are_sizes_known
from shoal.lowlevel.native import levels

_of_norm = torch.ops.shoal.norm_act_backward.default
_of_convolution = torch.ops.shoal.norm_conv_backward.default
_NEEDS_OF_NORM, _NEEDS, _FACTOR, _ONTO = 7, 15, 16, 17  # places of operands


def products(joint: Joint) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """Gradients of norms that one convolution multiplies: the op, the product among its results, the convolution's."""
    for node in joint.find(_of_norm) if joint.runs_here and levels() else ():
        grad, xs, _, scale, _, _, _, needs, *own = args_of(node)
        if not needs[0] or len(xs) != 1 or (own and own[0] is not None):  # its gradient is whole, and no product
            continue
        product = items_of(node).get(1 if needs[2] else 0)
        if product is None or len(product.users) != 1:
            continue
        (reader,) = product.users
        if reader.target is not _of_convolution:
            continue
        arguments, value = _all_of_convolution(reader), product.meta["val"]
        if arguments[0] is not product or arguments[_FACTOR] is not None:
            continue
        if arguments[_NEEDS][3]:  # a bias sums up the rounded products
            continue
        if _is_read_natively(value) and _is_alike(grad.meta["val"], value) and scale.meta["val"].dtype == value.dtype:
            yield node, product, reader


def multiply_where_read(joint: Joint, site: tuple[fx.Node, fx.Node, fx.Node]) -> None:
    """Let the convolution's gradient multiply what the norm's lets through."""
    node, product, reader = site
    grad, _, _, scale, _, _, relu, needs = args_of(node)[: _NEEDS_OF_NORM + 1]
    items, values = items_of(node), list(node.meta["val"])
    passed = grad
    if relu:
        passed = items[0] if needs[2] and 0 in items else None
        if passed is None:
            passed = joint.call(node.next, operator.getitem, (node, 0), product.meta["val"], product)
        if needs[2]:
            _renumber(items, 2, 1)
            values.pop(1)
    else:
        _renumber(items, 1, 0)
        values.pop(0)
    node.args = (*args_of(node)[:_NEEDS_OF_NORM], [False, needs[1], bool(relu)])
    node.meta["val"] = values  # what passes has the product's shape and layout
    reader.args = (passed, *_all_of_convolution(reader)[1:_FACTOR], scale, *_all_of_convolution(reader)[_ONTO:])
    joint.erase_unread(product, node)


def _renumber(items: dict[int, fx.Node], before: int, now: int) -> None:
    """Let the items from place `before` on be those from place `now` on."""
    for place, item in items.items():
        if place >= before:
            item.update_arg(1, place - before + now)


def sums(joint: Joint) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """Sums of a convolution's input gradient and what comes before it: the sum, the gradient, the other."""
    if not joint.runs_here or not levels():
        return
    order = {node: place for place, node in enumerate(joint.graph.nodes)}
    for node in joint.find(torch.ops.aten.add.Tensor):
        terms = args_of(node)
        if node not in joint.backward or len(terms) != 2 or node.kwargs:
            continue
        if not all(isinstance(term, fx.Node) for term in terms) or terms[0] is terms[1]:
            continue
        for gradient, other in sorted((terms, terms[::-1]), key=lambda pair: order.get(pair[0], -1), reverse=True):
            if _can_be_added(gradient, other, node, order):
                yield node, gradient, other
                break


def _can_be_added(gradient: fx.Node, other: fx.Node, total: fx.Node, order: dict[fx.Node, int]) -> bool:
    producer = gradient.args[0] if gradient.target is operator.getitem else None
    if not isinstance(producer, fx.Node) or producer.target is not _of_convolution:
        return False
    arguments, value = _all_of_convolution(producer), gradient.meta["val"]
    is_alone = gradient.args[1] == 0 and len(gradient.users) == 1 and arguments[_NEEDS][0] and len(arguments[3]) == 1
    comes_first = order.get(other, len(order)) < order[producer]
    if not (is_alone and comes_first and arguments[_ONTO] is None and _is_read_natively(value)):
        return False
    return _is_alike(other.meta["val"], value) and _is_alike(total.meta["val"], value)


def add_while_written(joint: Joint, site: tuple[fx.Node, fx.Node, fx.Node]) -> None:
    """Let the convolution's gradient be added to the other while it is written."""
    node, gradient, other = site
    producer = args_of(gradient)[0]
    arguments = _all_of_convolution(producer)
    producer.args = (*arguments[:_ONTO], other, *arguments[_ONTO + 1 :])
    joint.replace(node, gradient)


def _all_of_convolution(node: fx.Node) -> tuple[Any, ...]:
    return (*node.args, *[None] * (_ONTO + 1 - len(node.args)))


def _is_read_natively(value: torch.Tensor) -> bool:
    return are_sizes_known(value) and native_row_stride(value) is not None


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
