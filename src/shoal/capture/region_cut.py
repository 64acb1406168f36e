"""What a backward region makes again of the forward pass, so that fewer bytes wait: a minimum cut."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from torch import fx

from shoal.capture.region_groups import Flow, Group
from shoal.capture.region_ops import is_composite, is_reduction, is_softmax, normalised
from shoal.graph.fx_nodes import is_tensor, is_view, value_bytes

_FREE = 1  # capacity of a value that is alive anyway
_WHOLE = 1 << 28  # what all bytes together count at most


def make_again(flow: Flow, groups: Sequence[Group], runs_once: Collection[str]) -> None:
    """Set `again` of the backward groups: what they read of forward groups is made in them of as few bytes as can be.

    A value costs its bytes where it waits for these regions only. Only ops that compute each element by itself are
    made again, and none that is among `runs_once`, the names of ops that must not run twice.
    """
    member = {node: group for group in groups for node in group.nodes}

    def is_again(node: fx.Node) -> bool:
        if node not in member or node in flow.backward or node.name in runs_once:
            return False
        return node.target is normalised or not (is_composite(node) or is_reduction(node) or is_softmax(node))

    wanted = {
        holder(operand)
        for group in groups
        if group.backward
        for node in group.nodes
        for operand in node.all_input_nodes
        if is_tensor(operand)
    }
    wanted = {value for value in wanted if is_again(value)}
    if not wanted:
        return
    waits = _cut(flow, member, wanted, is_again)
    for group in groups:
        if group.backward:
            group.again = _needed(flow, group, waits, is_again)


def holder(node: fx.Node) -> fx.Node:
    """The node whose tensor a view looks at: an input, an op, or one of an op's results."""
    while node.op == "call_function":
        first: Any = node.args[0] if node.args else None
        if not (is_view(node) or (node.target is operator.getitem and is_view(first))):
            break
        node = first
    return node


def _operands(node: fx.Node) -> list[fx.Node]:
    return list(dict.fromkeys(holder(operand) for operand in node.all_input_nodes if is_tensor(operand)))


def _cut(flow: Flow, member: dict[fx.Node, Group], wanted: set[fx.Node], is_again: Any) -> set[fx.Node]:
    """The values that wait, of all that the wanted ones are made of."""
    from scipy.sparse import csr_array  # slow to import, and few steps have regions
    from scipy.sparse.csgraph import maximum_flow

    values: dict[fx.Node, int] = {}
    queue = deque(wanted)
    while queue:
        value = queue.popleft()
        if value not in values:
            values[value] = len(values)
            if is_again(value):
                queue.extend(_operands(value))
    costs = {value: _cost_bytes(flow, member, value) for value in values}
    unit = max(1, sum(costs.values()) // _WHOLE)
    begin, end, endless = 2 * len(values), 2 * len(values) + 1, _WHOLE * 2
    edges: dict[tuple[int, int], int] = {}
    for value, number in values.items():
        edges[2 * number, 2 * number + 1] = max(_FREE, costs[value] // unit)
        if is_again(value):
            for operand in _operands(value):
                edges[2 * values[operand] + 1, 2 * number] = endless
        else:
            edges[begin, 2 * number] = endless
        if value in wanted:
            edges[2 * number + 1, end] = endless
    places = np.array(list(edges), dtype=np.int32)
    shape = (2 * len(values) + 2,) * 2
    capacity = csr_array((np.array(list(edges.values()), dtype=np.int32), (places[:, 0], places[:, 1])), shape=shape)
    left = (capacity - maximum_flow(capacity, begin, end).flow).tocoo()
    into: dict[int, list[int]] = {}
    for start, stop, room in zip(left.row, left.col, left.data, strict=True):
        if room > 0:
            into.setdefault(int(stop), []).append(int(start))
    reaches, last = {end}, deque([end])  # of equal cuts the one nearest the readers: least is made again
    while last:
        for start in into.get(last.popleft(), ()):
            if start not in reaches:
                reaches.add(start)
                last.append(start)
    return {value for value, number in values.items() if 2 * number + 1 in reaches and 2 * number not in reaches}


def _cost_bytes(flow: Flow, member: dict[fx.Node, Group], value: fx.Node) -> int:
    if value.op != "call_function":
        return 0  # an input or a constant is alive throughout the step
    owner: Any = value.args[0] if value.target is operator.getitem else value
    if owner in flow.handed_out or any(
        reader in flow.backward and reader not in member for reader in _readers(flow, value)
    ):
        return 0
    return value_bytes(value)


def _readers(flow: Flow, value: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for user in value.users:
        if user.op != "call_function":
            continue
        if is_view(user) or user.target is operator.getitem:
            found += _readers(flow, user)
        else:
            found.append(user)
    return found


def _needed(flow: Flow, group: Group, waits: set[fx.Node], is_again: Any) -> list[fx.Node]:
    found: set[fx.Node] = set()
    queue = [value for node in group.nodes for value in _operands(node)]
    while queue:
        value = queue.pop()
        if value not in waits and value not in found and is_again(value):
            found.add(value)
            queue += _operands(value)
    return sorted(found, key=flow.place.__getitem__)
