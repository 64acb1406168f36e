"""Ops of a step that become one region: each joined to what it reads, as long as the order of the others stays.

An op joins the group of an operand where the whole can run at the place of the one or of the other: no op between reads
what the group makes, or the op reads nothing that is made between. It does not where more bytes would wait then, or
where a value that is written anyway would have to be made again with it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from shoal.capture.region_ops import can_join, is_composite, is_statistics, is_transposition
from shoal.graph.fx_nodes import is_op, is_tensor, source, tensors_of, value_bytes

MOST_OPS = 64
_SMALL = 1 / 16  # of what a group reads: a result that may wait
_FEW_BYTES = 1 << 16


class Flow:
    """The ops of a joint graph, in order.

    Args:
        graph: the joint graph.
        backward_names: names of its backward nodes.
    """

    def __init__(self, graph: fx.Graph, backward_names: Collection[str]) -> None:
        self.graph = graph
        self.place = {node: number for number, node in enumerate(graph.nodes)}
        self.ops = [node for node in graph.nodes if is_op(node)]
        self.backward = {node for node in self.ops if node.name in backward_names}
        self._backward_names = backward_names

    @cached_property
    def reads(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """Op → ops and inputs that it reads."""
        return {
            node: tuple(dict.fromkeys(source(operand) for operand in node.all_input_nodes if is_tensor(operand)))
            for node in self.ops
        }

    @cached_property
    def readers(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """Op or input → ops that read it, in order."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node, operands in self.reads.items():
            for operand in operands:
                found.setdefault(operand, []).append(node)
        return {node: tuple(readers) for node, readers in found.items()}

    @cached_property
    def handed_out(self) -> set[fx.Node]:
        """Ops of which the caller gets a result."""
        return {source(node) for node in self.graph.output_node().all_input_nodes}


@dataclass(eq=False)
class Group:
    """Ops that become one region.

    Attributes:
        nodes: in order.
        place: of one of them, where the region runs.
        backward: whether they are ops of the backward pass.
        again: forward ops that the region runs again for itself, in order.
    """

    nodes: list[fx.Node]
    place: int
    backward: bool
    again: list[fx.Node] = field(default_factory=list)


def grouped(flow: Flow, device: str, left_out: Collection[str]) -> list[Group]:
    """The groups of a step, in the order of their places.

    Args:
        flow: of its joint graph.
        device: the device type that regions are for.
        left_out: names of ops that stay by themselves.
    """
    made = _Grouping(flow)
    for node in flow.ops:
        if node.name not in left_out and can_join(node) and _is_all_on(node, device):
            made.add(node)
    for node in list(made.group_of):  # a reader that held its operand up may have joined it since
        made.join(node)
    groups = dict.fromkeys(made.group_of.values())
    return sorted(groups, key=lambda group: group.place)


def is_worth_it(group: Group) -> bool:
    """Whether a group is more than one op that PyTorch runs in one sweep."""
    return len(group.nodes) > 1 or is_composite(group.nodes[0]) or is_transposition(group.nodes[0])


def _is_all_on(node: fx.Node, device: str) -> bool:
    tensors = [tensor for one in (node, *node.all_input_nodes) for tensor in tensors_of(one)]
    return all(
        tensor.device.type == device
        and not tensor.is_complex()
        and all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))
        for tensor in tensors
    )


class _Grouping:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.group_of: dict[fx.Node, Group] = {}
        self._joinable_places: set[int] = set()

    def add(self, node: fx.Node) -> None:
        """A node that may join: to what it reads, or by itself."""
        own = Group([node], self.flow.place[node], node in self.flow.backward)
        self.group_of[node] = own
        self._joinable_places.add(own.place)
        self.join(node)

    def join(self, node: fx.Node) -> None:
        """Join the groups of what a node reads to its own, as far as they can be, and had better be."""
        if is_statistics(node):
            return
        own = self.group_of[node]
        others = {self.group_of[operand] for operand in self.flow.reads[node] if operand in self.group_of} - {own}
        for other in sorted(others, key=lambda group: group.place, reverse=True):
            place = self._place_of_both(other, own)
            if place is not None:
                own = self._join(other, own, place)

    def _join(self, first: Group, second: Group, place: int) -> Group:
        nodes = sorted({*first.nodes, *second.nodes}, key=self.flow.place.__getitem__)
        both = Group(nodes, place, first.backward)
        for node in nodes:
            self.group_of[node] = both
        return both

    def _where(self, node: fx.Node) -> int:
        group = self.group_of.get(node)
        return self.flow.place[node] if group is None else group.place

    def _place_of_both(self, first: Group, second: Group) -> int | None:
        """Where the two can run as one; None where they cannot, or had better not."""
        if first.backward != second.backward or len(first.nodes) + len(second.nodes) > MOST_OPS:
            return None
        if any(map(is_statistics, first.nodes)):
            return None
        if not first.backward and self._holds_up(first, second):
            return None
        if self._can_wait(first, second) and self._waits_well(first, second):
            return second.place
        if self._can_hurry(first, second) and self._hurries_well(first, second):
            return first.place
        return None

    def _others_reading(self, first: Group, second: Group) -> list[fx.Node]:
        inside = {*first.nodes, *second.nodes}
        return [r for node in first.nodes for r in self.flow.readers.get(node, ()) if r not in inside]

    def _can_wait(self, first: Group, second: Group) -> bool:
        return all(self._where(reader) > second.place for reader in self._others_reading(first, second))

    def _can_hurry(self, first: Group, second: Group) -> bool:
        inside = {*first.nodes, *second.nodes}
        reads = (operand for node in second.nodes for operand in self.flow.reads[node] if operand not in inside)
        return all(self._where(operand) < first.place for operand in reads)

    def _is_near(self, first: Group, second: Group) -> bool:
        """Whether nothing but ops that can join a region runs between the two."""
        return all(
            place in self._joinable_places or self.flow.place.get(node) is None
            for node in self.flow.ops
            if first.place < (place := self.flow.place[node]) < second.place
        )

    def _waits_well(self, first: Group, second: Group) -> bool:
        if self._is_near(first, second):
            return True
        inside = {*first.nodes, *second.nodes}
        held = 0
        for operand in {operand for node in first.nodes for operand in self.flow.reads[node]} - inside:
            if operand.op != "call_function":
                continue
            readers = [reader for reader in self.flow.readers[operand] if reader not in first.nodes]
            lives = any(self._where(reader) >= second.place for reader in readers)
            held += 0 if lives else value_bytes(operand)
        spared = 0
        for node in first.nodes:
            if node not in self.flow.handed_out and any(r in second.nodes for r in self.flow.readers.get(node, ())):
                spared += value_bytes(node)
        return held <= spared + _FEW_BYTES

    def _hurries_well(self, first: Group, second: Group) -> bool:
        results = [
            node
            for node in second.nodes
            if node in self.flow.handed_out or any(r not in second.nodes for r in self.flow.readers.get(node, ()))
        ]
        read = {operand for node in first.nodes for operand in self.flow.reads[node]}
        return sum(map(value_bytes, results)) <= _FEW_BYTES + _SMALL * sum(map(value_bytes, read))

    def _holds_up(self, first: Group, second: Group) -> bool:
        """Whether a large value that is written anyway would have to be made again with what is made of it."""
        inside = {*first.nodes, *second.nodes}
        results = sum(map(value_bytes, second.nodes))
        for node in first.nodes:
            readers = self.flow.readers.get(node, ())
            stays = node in self.flow.handed_out or any(
                reader not in inside and reader not in self.flow.backward for reader in readers
            )
            if stays and any(reader in second.nodes for reader in readers) and 4 * results > value_bytes(node):
                return True
        return False
