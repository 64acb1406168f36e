"""The graph of a network whose batch norms are done by their neighbours, at one of the paper's four levels.

The network is read once, in order. A ReLU or a batch norm that only convolutions read becomes a note of what they must
do to their input; the others are computed where they stood. Vectors, running statistics among them, are computed where
the batch norm stood.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.transforms.fuse.dense_blocks import join_dense_blocks
from shoal.transforms.fuse.fused_layers import Affine, Convolve, Measure, Normalise
from shoal.transforms.fuse.fusion_ops import Ops, refusal
from shoal.transforms.fuse.fusion_size import FusionSize
from shoal.transforms.fuse.fusion_summary import Fused, FusionSummary
from shoal.transforms.invert.inverted_graph import inverted_layers
from shoal.transforms.live_graph import live_graph
from shoal.transforms.stand_in import Left

Level = Literal["rcf", "mvf", "bnff", "icf"]
LEVELS: tuple[Level, ...] = ("rcf", "mvf", "bnff", "icf")


@dataclass(frozen=True)
class _Pending:
    """What a convolution must do to its input."""

    xs: list[fx.Node]
    vectors: fx.Node | None
    relu: bool


@dataclass(frozen=True)
class _Plan:
    """What becomes of one batch norm: who applies it, and how far that reaches."""

    layer: _BatchNorm
    parts: list[fx.Node]  # what is normalised
    end: fx.Node  # the node whose value it gives: itself, its ReLU, its residual addition or that one's ReLU
    relu: bool
    residual: fx.Node | None
    pending: bool  # only convolutions read `end`


def fuse_graph(
    root: nn.Module, graph: fx.Graph, level: Level, size: FusionSize
) -> tuple[fx.GraphModule, FusionSummary]:
    """Build it.

    Args:
        root: the network, whose layers the result calls.
        graph: of the network.
        level: how much is fused; "icf" where "bnff" would do is the same.
        size: decides which maps are too small.
    """
    return _FuseGraphBuilder(root, graph, level, size).build()


def highest_level(root: nn.Module, graph: fx.Graph) -> Level | None:
    """The lowest level that fuses all that can be; None where nothing can."""
    (_, all_levels), (_, without_concatenations) = (
        fuse_graph(root, graph, level, FusionSize("always")) for level in ("icf", "bnff")
    )
    if not all_levels.fused:
        return None
    return "bnff" if all_levels.fused == without_concatenations.fused else "icf"


class _FuseGraphBuilder:
    def __init__(self, root: nn.Module, graph: fx.Graph, level: Level, size: FusionSize) -> None:
        self.root, self.graph, self.level, self.size = root, graph, level, size
        self.ops = Ops(dict(root.named_modules()), graph)
        self.out = fx.Graph()
        self.value: dict[fx.Node, fx.Node] = {}
        self.moments: dict[fx.Node, fx.Node] = {}
        self.pending: dict[fx.Node, _Pending] = {}
        self.added: dict[str, nn.Module] = {}
        self.taken: set[str] = set()  # names of those, and of what they are in
        self.copied: list[fx.Node] = []  # calls of the network's own layers
        self.plans: dict[fx.Node, _Plan] = {}  # by batch norm
        self.ends: dict[fx.Node, tuple[fx.Node, _Plan]] = {}  # end → batch norm and plan
        self.inside: set[fx.Node] = set()  # nodes between a batch norm and its end
        self.readers: dict[fx.Node, list[_BatchNorm]] = {}
        self.vectors: dict[fx.Node, fx.Node] = {}
        self.relu_operands: dict[fx.Node, fx.Node] = {}  # pending ReLU without a plan → its operand
        self.fused: list[Fused] = []
        self.left: dict[str, str] = {}

    def build(self) -> tuple[fx.GraphModule, FusionSummary]:
        for node in self.graph.nodes:
            self._plan(node)
        for node in self.graph.nodes:
            self._write(node)
        for node in reversed(self.graph.nodes):  # concatenations that nothing reads whole
            if node in self.value and not self.value[node].users and self.ops.parts(node) is not None:
                self.out.erase_node(self.value[node])
        blocks = join_dense_blocks(self.out, self.added, self.size) if self.level == "icf" else []
        self._keep_names_apart()
        self._report_unseen()
        left = tuple(Left(layer, reason) for layer, reason in self.left.items())
        summary = FusionSummary(self.level, tuple(self.fused), left, tuple(blocks))
        return live_graph(self.root, self.out, self.added, "FusedGraph"), summary

    def _plan(self, node: fx.Node) -> None:
        relu_of = self.ops.relu(node)
        layer = self.ops.batch_norm(node)
        if relu_of is not None and node not in self.inside and self._only_convolutions_read(node):
            self.relu_operands[node] = relu_of
        elif layer is not None and (writer := self.ops.writes.over(_source(node))) is not None:
            if self.level != "rcf":
                self.left[self._name(node)] = f"what it normalises is written over by {self._name(writer)}"
        elif layer is not None:
            plan = self._plan_whole(node, layer) if self.level in ("bnff", "icf") else None
            if self.level == "mvf":
                plan = _Plan(layer, [_source(node)], node, False, None, False)
            if plan is None:
                if self.level != "rcf":
                    readers = ", ".join(self._name(user) for user in node.users) or "nothing"
                    self.left[self._name(node)] = f"no ReLU, convolution or residual addition follows it, but {readers}"
                return
            self.plans[node] = plan
            self.ends[plan.end] = node, plan
            for part in plan.parts:
                self.readers.setdefault(part, []).append(layer)
        elif isinstance(self.ops.module(node), _BatchNorm):
            self.left[self._name(node)] = refusal(self.ops.module(node)) or "it is called with more than its input"  # type: ignore[arg-type]

    def _plan_whole(self, node: fx.Node, layer: _BatchNorm) -> _Plan | None:
        parts = [_source(node)]
        if self.level == "icf":
            parts = self.ops.parts(parts[0]) or parts
        relu = self._relu_behind(node)
        if relu is not None:
            self.inside.add(relu)
            return _Plan(layer, parts, relu, True, None, self._only_convolutions_read(relu))
        if self._only_convolutions_read(node):
            return _Plan(layer, parts, node, False, None, True)
        total = next(iter(node.users)) if len(node.users) == 1 else None
        addends = self.ops.addends(total) if total is not None else None
        if total is None or addends is None:
            return None
        if total in self.inside:  # the other operand is a batch norm that adds this one
            return _Plan(layer, parts, node, False, None, False)
        self.inside.add(total)
        residual = addends[1] if addends[0] is node else addends[0]
        relu = self._relu_behind(total)
        if relu is not None:
            self.inside.add(relu)
        return _Plan(layer, parts, relu or total, relu is not None, residual, False)

    def _relu_behind(self, node: fx.Node) -> fx.Node | None:
        reader = next(iter(node.users)) if len(node.users) == 1 else None
        return reader if reader is not None and self.ops.relu(reader) is node else None

    def _only_convolutions_read(self, node: fx.Node) -> bool:
        return bool(node.users) and all(self.ops.convolution(user) is not None for user in node.users)

    def _write(self, node: fx.Node) -> None:
        if node in self.plans:
            self._write_vectors(node, self.plans[node])
        if node in self.ends:
            self._write_end(node, *self.ends[node])
        elif node in self.plans or node in self.inside:
            return
        elif node in self.relu_operands:
            self.pending[node] = _Pending([self.value[self.relu_operands[node]]], None, True)
            self.fused.append(Fused(self._name(node), "", self._names(node.users)))
        elif self.ops.convolution(node) is not None:
            self._write_convolution(node)
        else:
            self.value[node] = self._copied(node)

    def _copied(self, node: fx.Node) -> fx.Node:
        copy = self.out.node_copy(node, self.value.__getitem__)
        if node.op == "call_module":
            self.copied.append(copy)
        return copy

    def _write_vectors(self, node: fx.Node, plan: _Plan) -> None:
        for part in plan.parts:
            if part not in self.moments:
                name = self._add(f"{node.target}_measure", Measure(self.readers[part], self.size))
                self.moments[part] = self.out.call_module(name, (self.value[part],))
        xs, moments = [self.value[part] for part in plan.parts], [self.moments[part] for part in plan.parts]
        affine = Affine(plan.layer, plan.relu and plan.residual is None, self.size)
        self.vectors[node] = self.out.call_module(self._add(str(node.target), affine), (xs, moments))

    def _write_end(self, end: fx.Node, batch_norm: fx.Node, plan: _Plan) -> None:
        xs = [self.value[part] for part in plan.parts]
        applied = "one pass"
        if plan.pending:
            self.pending[end] = _Pending(xs, self.vectors[batch_norm], plan.relu)
            applied = self._names(end.users)
        else:
            name = self._add(f"{batch_norm.target}_apply", Normalise(plan.layer, plan.relu))
            residual = () if plan.residual is None else (self.value[plan.residual],)
            self.value[end] = self.out.call_module(name, (xs, self.vectors[batch_norm], *residual))
            with_ = [what for what, there in (("residual", plan.residual), ("ReLU", plan.relu)) if there]
            applied += f" with {' and '.join(with_)}" if with_ else ""
        producers = [part for part in plan.parts if self._measures(part)]
        sweeps = len(plan.parts) - len(producers)
        measured = [self._names(producers)] if producers else []
        measured += [f"{sweeps} sweep" + "s" * (sweeps > 1)] if sweeps else []
        self.fused.append(Fused(self._name(batch_norm), " and ".join(measured), applied))

    def _write_convolution(self, node: fx.Node) -> None:
        source, layer = _source(node), self.ops.convolution(node)
        before = self.pending.get(source)
        measured = self.readers.get(node, []) if self._measures(node) else []
        if layer is None or (before is None and not measured):
            self.value[node] = self._copied(node)
            return
        before = before or _Pending([self.value[source]], None, False)
        name = self._add(str(node.target), Convolve(layer, before.relu, measured, self.size))
        both = self.out.call_module(name, (before.xs, before.vectors))
        self.value[node] = self.out.call_function(operator.getitem, (both, 0))
        if measured:
            self.moments[node] = self.out.call_function(operator.getitem, (both, 1))

    def _measures(self, part: fx.Node) -> bool:
        """Whether the statistics of a tensor come from the convolution that makes it."""
        return self.level in ("bnff", "icf") and self.ops.convolution(part) is not None

    def _add(self, name: str, module: nn.Module) -> str:
        """The name under which the graph calls a module of ours: that of the layer it stands for, once."""
        free, number = name, 1
        while free in self.taken:
            number += 1
            free = f"{name}_{number}"
        self.added[free] = module
        self.taken |= _paths(free)
        return free

    def _keep_names_apart(self) -> None:
        """A layer that is called in its own way somewhere and by a module of ours elsewhere has two names."""
        self.taken.update(*map(_paths, self.added))
        for node in self.copied:
            if str(node.target) in self.taken:
                node.target = self._add(str(node.target), self.ops.modules[str(node.target)])

    def _report_unseen(self) -> None:
        """Batch norms that no node calls."""
        called = {str(node.target) for node in self.graph.nodes if node.op == "call_module"}
        inverted = set(inverted_layers(self.graph).values())
        for name, module in self.ops.modules.items():
            if isinstance(module, _BatchNorm) and name not in called:
                around = next((leaf for leaf in called if name.startswith(f"{leaf}.")), None)
                without = "it is inverted" if name in inverted else "it is not called"
                self.left[name] = f"it is inside {around}, which is called whole" if around else without

    def _name(self, node: fx.Node) -> str:
        return str(node.target) if node.op == "call_module" else node.name

    def _names(self, nodes: Sequence[fx.Node] | dict[fx.Node, None]) -> str:
        names = [self._name(node) for node in nodes]
        return ", ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]} ({len(names)})"


def _paths(name: str) -> set[str]:
    """A name and those of the modules that it is in: `a.b` and `a`."""
    parts = name.split(".")
    return {".".join(parts[: end + 1]) for end in range(len(parts))}


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source
