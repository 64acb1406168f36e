"""A captured step: the step as data, and the nodes of the joint graph that it came from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

from shoal.capture.early_gradients import Fate
from shoal.core.simulate import rewritten
from shoal.core.step import StepGraph
from shoal.graph.op_counts import signature
from shoal.graph.rerun import second_node


@dataclass(frozen=True)
class ReadOptions:
    """How a joint graph is to be read; attributes as the arguments of `capture`.

    Attributes:
        compiled: what of it is compiled, in words; empty where nothing was to be.
        as_written: the step before the lossless rewrites; None if they changed nothing, or nothing asks for it.
    """

    n_forward_outputs: int
    static_inputs: Collection[int] = ()
    model: str = ""
    parameters: Collection[int] = ()
    layers: Mapping[int, str] | None = None
    static_bytes: int = 0
    early: Mapping[int, Fate] = field(default_factory=dict)
    compiled: tuple[str, ...] = ()
    as_written: Captured | None = None


@dataclass(frozen=True)
class Captured:
    """A step as data, and the nodes it came from.

    Attributes:
        graph: the step.
        joint: the joint graph after the lossless rewrites.
        node_of: op name → node.
        storage_of: tensor node → storage id, views included.
        forward_outputs, backward_outputs: what each of the two graphs hands back, in order; None for no gradient.
        device: where the step's tensors live.
        usual_nodes: op name → node with numbers for all sizes; as `node_of` where no size varies.
        largest_nodes: the same at the largest the op can be; empty where no size varies.
        read_with: what `capture` was told.
    """

    graph: StepGraph
    joint: fx.GraphModule
    node_of: Mapping[str, fx.Node]
    storage_of: Mapping[fx.Node, int]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    device: torch.device
    usual_nodes: Mapping[str, fx.Node]
    largest_nodes: Mapping[str, fx.Node]
    read_with: ReadOptions

    def can_replace(self, other: Captured) -> bool:
        """Whether AOTAutograd, which has traced the other step, can be given the graphs of this one: they take the same
        inputs, hand back the same results, and update the same buffers."""
        own, its = self._interface, other._interface
        return own is not None and own == its

    @cached_property
    def _interface(self) -> object:
        """What AOTAutograd notes of the inputs and outputs, and how those of the forward pass are laid out; None where
        it notes nothing."""
        notes = self.joint.graph.output_node().meta.get("desc")
        inputs = self.joint.graph.find_nodes(op="placeholder")
        nodes = [*inputs, *(output for output in self.forward_outputs if isinstance(output, fx.Node))]
        values = [node.meta.get("val") for node in nodes]
        layouts = [(v.shape, v.stride(), v.dtype, v.device) if isinstance(v, torch.Tensor) else type(v) for v in values]
        return None if notes is None else ([node.meta.get("desc") for node in inputs], notes, layouts)

    @cached_property
    def checkpoints(self) -> int:
        """How many regions of the model stand under `torch.utils.checkpoint`: AOTAutograd numbers their nodes."""
        numbers = {node.meta.get("ac_graph_id") for node in self.joint.graph.nodes}
        return len(numbers - {None})

    @cached_property
    def backward_names(self) -> frozenset[str]:
        """Names of the nodes that are ops of the backward pass."""
        return frozenset(op.name for op in self.graph.ops if op.phase == "backward")

    def output_storages(self) -> dict[int, str]:
        """Names of the storages that are handed to the caller, by place among the outputs of the forward pass."""
        storages = self.graph.storages
        owned = {
            place: storages[self.storage_of[node]]
            for place, node in enumerate(self.forward_outputs)
            if isinstance(node, fx.Node) and node in self.storage_of
        }
        results = set(self.results)
        return {place: s.name for place, s in owned.items() if s.kind == "output" and place in results}

    @property
    def results(self) -> tuple[int, ...]:
        """Places of the outputs of the forward pass that the caller gets; others update inputs and buffers."""
        notes = self.joint.graph.output_node().meta.get("desc") or ()
        updates = {place for place, note in enumerate(notes) if isinstance(note, InputMutationAOTOutput)}
        return tuple(place for place in range(len(self.forward_outputs)) if place not in updates)

    def distinct_nodes(self) -> dict[str, fx.Node]:
        """One node for each signature of the step, second runs included, for the profiler."""
        firsts = [*self.usual_nodes.values(), *self.largest_nodes.values()]
        seconds = [second for node in firsts if (second := second_node(node)) is not None]
        return {signature(node): node for node in [*firsts, *seconds]}

    def with_costs(
        self,
        seconds: Mapping[str, float],
        workspace_bytes: Mapping[str, int],
        launch_seconds: Mapping[str, float] | None = None,
    ) -> StepGraph:
        """The step with times and workspaces by op signature: times at the usual sizes, workspaces at the largest."""
        graph = self._with_costs(seconds, workspace_bytes, launch_seconds or {})
        written = self.read_with.as_written
        return graph if written is None else rewritten(graph, written._with_costs({}, workspace_bytes, {}))

    def _with_costs(
        self, seconds: Mapping[str, float], workspace_bytes: Mapping[str, int], launch_seconds: Mapping[str, float]
    ) -> StepGraph:
        graph = self.graph.with_costs(seconds, workspace_bytes, launch_seconds)
        if not self.largest_nodes:
            return graph
        at_most = {name: workspace_bytes.get(signature(node), 0) for name, node in self.largest_nodes.items()}
        again = {name: second_node(node) for name, node in self.largest_nodes.items()}
        at_most_again = {
            name: workspace_bytes.get(signature(node), 0) for name, node in again.items() if node is not None
        }
        return graph.with_min_workspaces(at_most, at_most_again)
