"""A captured step with chains of its ops joined into regions, each one op that Inductor compiles by itself.

Convolutions, matrix products and other library calls stay as they are, and so do random ops, views and writes: a region
reads tensors and returns new ones. A batch norm in training mode becomes two ops: its statistics, which run once and
move the running ones, where they lie if the step has them so; and the normalisation by them, which a region may take in
and the plan may run again.

What a backward region reads of a forward one is made again in it, from fewer bytes, where there are such.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shoal.capture.captured import Captured
from shoal.capture.region_cut import make_again
from shoal.capture.region_groups import Flow, Group, grouped, is_worth_it
from shoal.capture.region_ops import in_known_ops, normalised, statistics, statistics_in_place
from shoal.capture.step_reader import read_joint
from shoal.graph.fx_nodes import copied_joint, is_op, is_tensor, is_view
from shoal.graph.op_counts import target_name
from shoal.graph.rerun import is_of_the_batch
from shoal.kernels.buffers import add_to
from shoal.kernels.compiled_region import CompiledRegion, compile_regions, region_of

_aten = torch.ops.aten
_FUNCTIONAL = _aten._native_batch_norm_legit_functional.default
_NORMS = (_FUNCTIONAL, _aten._native_batch_norm_legit.default, _aten.cudnn_batch_norm.default)
_LEAST_BYTES = 1 << 14  # of what a region reads and writes
_MOST_AXES = 8
_OF_OP = "shoal_region_of"  # in a node's meta: the op of the captured step that it is a part of


@dataclass(frozen=True)
class Regional:
    """A step in regions.

    Attributes:
        captured: the step.
        regions: name of a region's op → what it calls.
        members: name of a region's op → names of the ops of the step before that it is made of.
    """

    captured: Captured
    regions: Mapping[str, CompiledRegion]
    members: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Draft:
    """A step in regions that are not compiled yet, nor read as a step.

    Attributes:
        of: the step before.
        regions, members: as of `Regional`.
        nodes: name of a region's op → its node.
    """

    of: Captured
    regions: Mapping[str, CompiledRegion]
    members: Mapping[str, tuple[str, ...]]
    nodes: Mapping[str, fx.Node]
    _joint: fx.GraphModule
    _backward_names: frozenset[str]

    def compiled(self) -> Regional:
        """The step with each region compiled, or with a `failure`."""
        compile_regions(self.regions.values())  # which tells what they may write over
        return self.read()

    def read(self) -> Regional:
        """The step with its regions as they are."""
        made = read_joint(self._joint, self._backward_names, self.of.read_with) if self.regions else self.of
        return Regional(made, self.regions, self.members)


def in_regions(captured: Captured, left_out: Collection[str] = ()) -> Regional:
    """The step in regions, each compiled, or with a `failure`; arguments as of `drafted`."""
    return drafted(captured, left_out).compiled()


def drafted(captured: Captured, left_out: Collection[str] = ()) -> Draft:
    """Which regions a step has; `captured` stays as it is.

    Args:
        captured: the step. Ops whose sizes vary stay as they are.
        left_out: names of ops that stay as they are.
    """
    joint = copied_joint(captured.joint)
    backward_names = captured.backward_names
    for node in list(joint.graph.nodes):
        if node.name not in left_out and _can_be_split(node):
            _split_norm(joint.graph, node)
    runs_once = {op.name for op in captured.graph.ops if not op.recomputable}
    flow = Flow(joint.graph, backward_names)
    groups = grouped(flow, captured.device.type, left_out)
    groups = [group for group in groups if is_worth_it(group) and _is_large(group)]
    make_again(flow, groups, runs_once)
    writer = _RegionsWriter(joint, groups)
    written = writer.written()
    names = backward_names | {name for name, group in writer.group_of.items() if group.backward}
    members = {
        name: tuple(dict.fromkeys(node.meta.get(_OF_OP, node.name) for node in group.nodes))
        for name, group in writer.group_of.items()
    }
    nodes = {node.name: node for node in written.graph.nodes if node.name in writer.regions}
    return Draft(captured, writer.regions, members, nodes, written, names)


def _can_be_split(node: fx.Node) -> bool:
    if node.target not in _NORMS or not is_of_the_batch(node):
        return False
    x, weight, bias, mean, var = (node.args[place] for place in range(5))
    values = [operand.meta["val"] for operand in (x, weight, bias, mean, var) if isinstance(operand, fx.Node)]
    value = values[0]
    if not value.dim() > 1 or not value.dtype.is_floating_point or _bytes(value) < _LEAST_BYTES:
        return False
    return value.numel() > value.shape[1]


def _split_norm(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, running_mean, running_var, _, momentum, eps = node.args
    items: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
    if node.target is _aten.cudnn_batch_norm.default:
        _take_from_cudnn(graph, items)
    fakes: Any = node.meta["val"]
    moved = fakes[3:] if node.target is _FUNCTIONAL else ()
    wide = torch.promote_types(x.meta["val"].dtype, torch.float32)  # type: ignore[union-attr]
    node.target = statistics if moved or running_mean is None else statistics_in_place
    node.args = (x, running_mean, running_var, momentum, eps)
    node.meta["val"] = (*(fake.new_empty(fake.shape, dtype=wide) for fake in fakes[1:3]), *moved)
    y = items.pop(0, None)
    for place in (1, 2):
        if place not in items:
            with graph.inserting_after(node):
                items[place] = graph.call_function(operator.getitem, (node, place))
            items[place].meta = dict(node.meta)
    for place, item in items.items():
        node.append(item)
        item.args = (node, place - 1)
        item.meta["val"] = node.meta["val"][place - 1]
    if y is not None:
        y.target, y.args = normalised, (x, weight, bias, items[1], items[2])
        y.meta[_OF_OP] = node.name


def _take_from_cudnn(graph: fx.Graph, items: dict[Any, fx.Node]) -> None:
    """The backward pass by the native formula, without what cuDNN would have reserved for its own."""
    readers = {reader for place in (1, 2) if place in items for reader in items[place].users}
    for reader in readers:
        grad, x, weight, mean, invstd, _, eps, wanted = reader.args
        reader.target = _aten.native_batch_norm_backward.default
        reader.args = (grad, x, weight, None, None, mean, invstd, True, eps, wanted)
    if 3 in items:
        graph.erase_node(items.pop(3))


def _is_large(group: Group) -> bool:
    read = {operand for node in group.nodes for operand in node.all_input_nodes if is_tensor(operand)}
    values = [node.meta["val"] for node in (*read, *group.nodes)]
    tensors = [v for value in values for v in (value if isinstance(value, (tuple, list)) else (value,))]
    return sum(_bytes(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)) >= _LEAST_BYTES


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * tensor.element_size()


class _RegionsWriter:
    """Rewrites a joint graph: each region where it runs, views right before they are read."""

    def __init__(self, joint: fx.GraphModule, groups: Sequence[Group]) -> None:
        self.regions: dict[str, CompiledRegion] = {}
        self.group_of: dict[str, Group] = {}
        self._joint = joint
        self._group_at = {group.place: group for group in groups}
        self._inside = {node for group in groups for node in group.nodes}
        self._bodies = {group.place: _Body(group) for group in groups}
        self._read_by_regions = {node for body in self._bodies.values() for node in body.inputs}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._out = fx.Graph(joint)

    def written(self) -> fx.GraphModule:
        """The graph with its regions."""
        for place, node in enumerate(self._joint.graph.nodes):
            if node.op == "output":
                args = fx.node.map_arg(node.args, self._copy)
                self._out.output(args[0]).meta = dict(node.meta)
            elif (group := self._group_at.get(place)) is not None:
                self._write_region(group)
            elif node not in self._inside and (node.op != "call_function" or is_op(node) or node.target is add_to):
                self._copy(node)
        self._out.lint()
        return fx.GraphModule(self._joint, self._out)

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            args = fx.node.map_arg((node.args, dict(node.kwargs)), self._copy)
            copy = self._out.create_node(node.op, node.target, *args, node.name)
            copy.meta = dict(node.meta)
            self._copies[node] = copy
        return self._copies[node]

    def _write_region(self, group: Group) -> None:
        body = self._bodies[group.place]
        body.give(self._read_outside(group.nodes))
        if not body.results:  # whoever reads it makes it again
            return
        last = group.nodes[-1]
        first, *_ = values = [value.meta["val"] for value in body.results]
        inputs = [node.meta["val"] for node in body.inputs]
        region = region_of(body.run, first, inputs, body.words, body.description(_laid), body.description(_sort))
        node = self._out.create_node(
            "call_function", region, tuple(map(self._copy, body.inputs)), {}, f"region_{last.name}"
        )
        node.meta = {key: value for key, value in last.meta.items() if key != "flops"}
        node.meta["val"] = tuple(values)
        self.regions[node.name], self.group_of[node.name] = region, group
        for place, value in enumerate(body.results):
            item = self._out.create_node("call_function", operator.getitem, (node, place), {}, value.name)
            item.meta = dict(value.meta)
            self._copies[value] = item

    def _read_outside(self, nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
        """The tensors that others read and do not make again for themselves: an op's result, or parts of it."""

        def others_read(node: fx.Node) -> bool:
            if node in self._read_by_regions:
                return True
            for user in node.users:
                if user.target is operator.getitem or (user.op == "call_function" and is_view(user)):
                    if others_read(user):
                        return True
                elif user not in self._inside:
                    return True
            return False

        for node in nodes:
            if isinstance(node.meta["val"], (tuple, list)):
                yield from (user for user in node.users if user.target is operator.getitem and others_read(user))
            elif others_read(node):
                yield node


class _Body:
    """What a region computes, node by node.

    Attributes:
        inputs: what it reads of others.
        results: what others read of it, as `give` was told.
        words: its ops, for people.
    """

    def __init__(self, group: Group) -> None:
        self._nodes = [*group.again, *group.nodes]
        own = set(self._nodes)
        inputs: dict[fx.Node, None] = {}
        self._views: dict[fx.Node, None] = {}

        def is_inside(node: fx.Node) -> bool:
            """Whether it is made here: a member, or a part or view of one."""
            if node in own:
                return True
            if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node) or is_op(node):
                return False
            if not (node.target is operator.getitem or is_view(node)) or not is_inside(node.args[0]):
                return False
            self._views[node] = None
            return True

        for node in self._nodes:
            for operand in node.all_input_nodes:
                if not is_inside(operand):
                    inputs[operand] = None
        self.inputs = list(inputs)
        self.results: list[fx.Node] = []
        self.words = ", ".join(dict.fromkeys(_word(node) for node in self._nodes))

    def give(self, results: Iterable[fx.Node]) -> None:
        """Name what others read of it."""
        laid_out = {_block(node) for node in self.inputs if node.op == "call_function"}
        # The first may be written over an operand.
        self.results = sorted(dict.fromkeys(results), key=lambda node: _block(node) not in laid_out)

    def description(self, told: Callable[[fx.Node], str]) -> str:
        """Equal for regions that compute the same of tensors of which the same is told."""
        numbers: dict[fx.Node, int] = {}

        def number(node: fx.Node) -> str:
            if node not in numbers and node not in self.inputs:
                write(node)
            return f"%{numbers.setdefault(node, len(numbers))}"

        lines: list[str] = []

        def write(node: fx.Node) -> None:
            args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: _Name(number(operand)))
            numbers[node] = len(numbers)
            if told is _sort:
                args = _without_sizes(args)
            lines.append(f"{number(node)} = {target_name(node.target)} {args} {told(node)}")

        for node in self.inputs:
            lines.append(f"{number(node)} {told(node)}")
        for node in self._nodes:
            number(node)
        return "\n".join([*lines, ", ".join(map(number, self.results))])

    def run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The region's results."""
        values: dict[fx.Node, Any] = dict(zip(self.inputs, tensors, strict=True))

        def value_of(node: fx.Node) -> Any:
            if node not in values:
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
                target: Any = node.target
                values[node] = in_known_ops(target)(*args, **kwargs)
            return values[node]

        for node in self._nodes:
            value_of(node)
        return [_laid_out(value_of(node), node.meta["val"]) for node in self.results]


class _Name(str):
    """A text that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _laid(node: fx.Node) -> str:
    values = tree_leaves(node.meta.get("val"))
    return ", ".join(
        f"{v.dtype} {tuple(v.shape)} {v.stride()} {v.device}" if isinstance(v, torch.Tensor) else str(v) for v in values
    )


def _sort(node: fx.Node) -> str:
    """As `_laid`, without sizes: dtypes, and the order of the axes in memory."""
    values = tree_leaves(node.meta.get("val"))
    return ", ".join(
        f"{v.dtype} {_axes_in_memory(v)} {v.device}" if isinstance(v, torch.Tensor) else str(v) for v in values
    )


def _without_sizes(value: Any) -> Any:
    """Arguments without the numbers that are no axes."""
    if isinstance(value, (tuple, list)):
        return [_without_sizes(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_sizes(one) for key, one in value.items()}
    return "n" if isinstance(value, int) and value >= _MOST_AXES else value


def _axes_in_memory(tensor: torch.Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))


def _block(node: fx.Node) -> Any:
    value = node.meta["val"]
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else None


def _laid_out(value: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
    """The value in the dtype and layout of the trace."""
    if value.dtype != traced.dtype:
        value = value.to(traced.dtype)
    if value.stride() != traced.stride():
        empty = torch.empty_strided(tuple(traced.shape), traced.stride(), dtype=traced.dtype, device=value.device)
        value = _aten.copy.default(empty, value)
    return value


def _word(node: fx.Node) -> str:
    package, *names = target_name(node.target).split(".")
    if package == "shoal" and names[0] != "region_ops":
        return " ".join(names)
    return names[0] if package == "aten" else names[-1]
