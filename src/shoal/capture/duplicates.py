"""Ops of the forward pass that compute what an earlier one has: each layer of a transformer makes the same mask.

The earlier result stands for the later one where it waits for the backward pass anyway, or is small: then no more bytes
wait at any time. GPT-2's twelve masks are one.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from shoal.capture.fx_nodes import is_handed_out, is_view
from shoal.capture.region_flow import is_tensor, source, value_bytes
from shoal.capture.rerun import is_random

_SMALL_BYTES = 1 << 9  # what an allocator hands out for one number


def merge_duplicates(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """Let ops of the forward pass that compute the same of the same be one.

    Args:
        graph: the joint graph, in which no op writes what another has made; edited.
        backward: its backward nodes.
    """
    first_of: dict[Any, fx.Node] = {}
    alike: dict[fx.Node, fx.Node] = {}  # node → the first one that computes the same
    stays: dict[fx.Node, fx.Node] = {}  # of these → the one that may stand for all
    merged: list[fx.Node] = []
    for node in graph.nodes:
        if node in backward or not _computes_the_same_again(node) or is_handed_out(node):
            continue
        first = alike[node] = first_of.setdefault(_key(node, alike), node)
        if first not in stays:
            if _is_there_anyway(node, backward):
                stays[first] = node
        else:
            merged.append(node)
    for node in merged:
        node.replace_all_uses_with(stays[alike[node]])
    for node in reversed(list(alike)):
        if not node.users and alike[node] is not node:
            graph.erase_node(node)
    _merge_parts(graph, {stays[alike[node]] for node in merged})


def _merge_parts(graph: fx.Graph, ops: Collection[fx.Node]) -> None:
    """Let each result of an op be one node, also where only the backward pass reads it, as a pooling's indices."""
    first_of: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        if node.args[0] not in ops or (first := first_of.setdefault(node.args, node)) is node:
            continue
        node.replace_all_uses_with(first)
        graph.erase_node(node)


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

    def told(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(told, value))
        if isinstance(value, fx.Node):
            return alike.get(value, value)
        return type(value), repr(value)

    return node.target, told(node.args), tuple((name, told(value)) for name, value in sorted(node.kwargs.items()))


def _is_there_anyway(node: fx.Node, backward: Collection[fx.Node]) -> bool:
    """Whether what a node holds, or looks at, is alive until the backward pass, or is next to nothing."""
    held = source(node)
    if held.op != "call_function" or any(reader in backward for reader in _readers(held)):
        return True
    value = held.meta["val"]
    return isinstance(value, torch.Tensor) and type(value.numel()) is int and value_bytes(held) <= _SMALL_BYTES


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a result, through parts and views of it."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if is_view(user) or user.target is operator.getitem else [user]
    return found
