"""The joint graph of one training step → StepGraph.

AOTAutograd hands over forward and backward as one functional graph of aten ops. Capture gives every tensor its
storage, every op what it reads and writes, and keeps the way back from the data to the graph's nodes for `lower`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTOutput, TangentAOTInput
from torch.utils._pytree import tree_leaves

from shoal.capture.accumulation import copied_bytes, with_accumulation
from shoal.capture.as_written import as_written, run_in_backward
from shoal.capture.captured import Captured, ReadOptions
from shoal.capture.early_gradients import Fate, gradient_order, with_early_gradients
from shoal.capture.sizes_of_values import break_at_unknown_gradients
from shoal.core.simulate import rewritten
from shoal.core.step import RESIDENT, Again, Op, StepGraph, Storage, StorageKind, at_largest
from shoal.errors import CaptureError
from shoal.graph import inplace
from shoal.graph.fx_nodes import is_view, items_of, layer_path
from shoal.graph.joint import Joint
from shoal.graph.op_counts import flops, moved_bytes, signature, target_name
from shoal.graph.rerun import can_run_again, is_random, moves_statistics, second_call, second_node, takes_statistics
from shoal.graph.symbolic_sizes import largest_numbers, usual_numbers, with_numbers, write_constants_out
from shoal.lowlevel.torch_state import allocated_bytes
from shoal.rewrites.rewrite import Rewrite, rewrite
from shoal.rewrites.table import SIZED, TABLE, save_fewer_bytes


def capture(
    joint: fx.GraphModule,
    n_forward_outputs: int,
    static_inputs: Collection[int] = (),
    *,
    model: str = "",
    parameters: Collection[int] = (),
    layers: Mapping[int, str] | None = None,
    static_bytes: int = 0,
    cpu_kernels: bool = True,
    rewrites: Sequence[Rewrite] = TABLE,
    keeps_as_written: bool = True,
    early: Mapping[int, Fate] | None = None,
) -> Captured:
    """Read a joint graph.

    Args:
        joint: the joint graph that AOTAutograd hands to a partitioner; edited in place by the lossless rewrites.
        n_forward_outputs: how many of its outputs belong to the forward pass.
        static_inputs: places of the inputs that outlive the step (parameters and buffers).
        model: a name for tables and errors.
        parameters: places of the inputs that are parameters; the other static inputs are buffers.
        layers: module paths of the layers that inputs belong to, by their places.
        static_bytes: see `StepGraph`.
        cpu_kernels: False where the step will run on another device than it is captured on.
        rewrites: the table of rewrites; an empty one for a look at what PyTorch itself saves.
        keeps_as_written: read the step before these rewrites too, for the peak of plain PyTorch.
        early: place of an input → the fate of its gradient, where that may leave before the backward pass ends.

    Raises:
        CaptureError: the graph has symbolic shapes that nothing bounds, or tensors that are not strided.
        GraphBreak: the size of a gradient depends on a tensor's values.
    """
    rewrite(Joint(joint, set()), SIZED)
    break_at_unknown_gradients(joint.graph)
    _reject_sparse(joint.graph, n_forward_outputs, layers or {})
    write_constants_out(joint.graph)
    outputs: Any = joint.graph.output_node().args[0]
    forward = needed_by(outputs[:n_forward_outputs])
    backward = {node for node in joint.graph.nodes if node.op == "call_function" and node not in forward}
    options = ReadOptions(n_forward_outputs, static_inputs, model, parameters, layers, static_bytes, early or {})
    if not rewrites:
        return read_joint(joint, {node.name for node in backward}, options)
    written = (
        read_joint(as_written(joint), run_in_backward(joint.graph, backward), options) if keeps_as_written else None
    )
    save_fewer_bytes(joint, backward, cpu_kernels=cpu_kernels, table=rewrites)
    captured = read_joint(joint, {node.name for node in backward}, options)
    if written is None or written.graph.fingerprint == captured.graph.fingerprint:
        return captured
    graph = rewritten(captured.graph, written.graph)
    return replace(captured, graph=graph, read_with=replace(options, as_written=written))


def _reject_sparse(graph: fx.Graph, n_forward_outputs: int, layers: Mapping[int, str]) -> None:
    outputs: Any = graph.output_node().args[0]
    gradient_of = {node: place for place, node in enumerate(outputs[n_forward_outputs:])}
    values = ((node, node.meta.get("val")) for node in graph.nodes)
    sparse = {n: v.layout for n, v in values if isinstance(v, torch.Tensor) and v.layout is not torch.strided}
    if sparse:
        gradients = [node for node in sparse if node in gradient_of]
        node = (gradients or list(sparse))[0]
        layer = layers.get(gradient_of.get(node, -1), "")
        if gradients:
            what, instead = f"the gradient of layer {layer or '-'}", "build that embedding with sparse=False"
        else:
            what, instead = f"the result of {node.name}", "call .to_dense() on it"
        raise CaptureError(
            f"{what} is {sparse[node]}; {instead}, or give budget=None",
            details={"why": "the bytes of a sparse tensor are not known before the step runs"},
        )


def read_joint(joint: fx.GraphModule, backward_names: Collection[str], options: ReadOptions) -> Captured:
    """`capture` of a joint graph that is rewritten already.

    Args:
        joint: the joint graph.
        backward_names: names of its backward nodes.
        options: as of `capture`.
    """
    n_forward_outputs = options.n_forward_outputs

    def read(graph: fx.Graph) -> tuple[StepGraph, _StepReader]:
        outputs: Any = graph.output_node().args[0]
        parts = outputs[:n_forward_outputs], outputs[n_forward_outputs:]
        backward = {n for n in graph.nodes if n.name in backward_names}
        reader = _StepReader(backward, *parts, options.static_inputs, options.parameters)
        reader.overwritten = _overwritten_inputs(graph)
        reader.layers = options.layers or {}
        for node in graph.nodes:
            reader.visit(node)
        leaves = [n for n in graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")]
        step = StepGraph(
            options.model, *reader.finish(), options.static_bytes, shared_result_bytes=reader.shared_result_bytes(graph)
        )
        left: Collection[int] = ()
        if options.early:

            def copied(place: int) -> int:
                return copied_bytes(leaves[place], parts[1][place])

            order = gradient_order(graph, parts[1])
            step, left = with_early_gradients(step, order, leaves, parts[1], reader.storage_of, options.early, copied)
        return with_accumulation(step, leaves, parts[1], left), reader

    numbers = usual_numbers(joint.graph)
    step, reader = read(with_numbers(joint, numbers) if numbers else joint.graph)
    others = [read(with_numbers(joint, largest)) for largest in largest_numbers(joint.graph)] if numbers else []
    node = {node.name: node for node in joint.graph.nodes}
    outputs: Any = joint.graph.output_node().args[0]
    node_of = {op: node[one.name] for op, one in reader.node_of.items()}
    storage_of = {node[one.name]: storage for one, storage in reader.storage_of.items()}
    captured = Captured(
        _same_in_all(at_largest(step, [graph for graph, _ in others]), node_of, storage_of) if numbers else step,
        joint,
        node_of,
        storage_of,
        tuple(outputs[:n_forward_outputs]),
        tuple(outputs[n_forward_outputs:]),
        _device(reader.storage_of),
        reader.node_of,
        {op: max((other.node_of[op] for _, other in others), key=moved_bytes) for op in reader.node_of}
        if others
        else {},
        options,
    )
    return replace(captured, graph=_with_loss(captured.graph, captured.output_storages().values()))


def _with_loss(step: StepGraph, results: Collection[str]) -> StepGraph:
    """With log-softmax and its gradient for each output: what a cross-entropy needs until it has been measured."""
    nbytes = 2 * step.loss_gradient_bytes(results)
    ops = tuple(replace(op, workspace_bytes=nbytes) if op.phase == "loss" else op for op in step.ops)
    return replace(step, ops=ops)


def _same_in_all(step: StepGraph, node_of: Mapping[str, fx.Node], storage_of: Mapping[fx.Node, int]) -> StepGraph:
    """The step without writing over what has the result's size only at the numbers that it was read with."""

    def kept(op: Op) -> Op:
        node = node_of.get(op.name)
        if node is None:
            return op
        there = {storage_of.get(operand) for operand in inplace.operands(node)}
        again = op.again if op.again is None or op.again.overwrites in there else replace(op.again, overwrites=-1)
        return replace(op, overwrites=op.overwrites if op.overwrites in there else -1, again=again)

    return replace(step, ops=tuple(map(kept, step.ops)))


def _device(nodes: Iterable[fx.Node]) -> torch.device:
    """Where what the step computes lives; its inputs may be elsewhere, as a counter on the CPU is."""
    computed = (tree_leaves(node.meta["val"]) for node in nodes if node.op != "placeholder")
    tensors = (value for values in computed for value in values if isinstance(value, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def needed_by(forward_outputs: Iterable[Any]) -> set[fx.Node]:
    """Every node that a forward output is made of; what else is computed belongs to the backward pass."""
    forward: set[fx.Node] = set()
    wanted = [node for node in forward_outputs if isinstance(node, fx.Node)]
    while wanted:
        node = wanted.pop()
        if node not in forward:
            forward.add(node)
            wanted.extend(node.all_input_nodes)
    return forward


def _overwritten_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The inputs that get new values when the forward pass ends, by the notes AOTAutograd puts next to the
    outputs."""
    notes = graph.output_node().meta.get("desc") or ()
    changed = [note.mutated_input for note in notes if isinstance(note, InputMutationAOTOutput)]
    return {node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in changed}


class _StepReader:
    """Collects storages and ops while the joint graph is walked once."""

    def __init__(
        self,
        backward: set[fx.Node],
        forward_outputs: Sequence[Any],
        backward_outputs: Sequence[Any],
        static_inputs: Collection[int],
        parameters: Collection[int],
    ) -> None:
        self.backward = backward
        self.forward_outputs = {node for node in forward_outputs if isinstance(node, fx.Node)}
        self.backward_outputs = {node for node in backward_outputs if isinstance(node, fx.Node)}
        self.static_inputs = set(static_inputs)
        self.parameters = set(parameters)
        self.storage_of: dict[fx.Node, int] = {}
        self.node_of: dict[str, fx.Node] = {}
        self._storages: list[dict[str, Any]] = []
        self._forward: list[dict[str, Any]] = []
        self._backward: list[dict[str, Any]] = []
        self._n_inputs = 0
        self.overwritten: set[fx.Node] = set()
        self.layers: Mapping[int, str] = {}

    def visit(self, node: fx.Node) -> None:
        value: Any = node.meta.get("val")
        if node.op == "placeholder":
            self._visit_input(node, value)
        elif node.op == "get_attr":
            self._add_storage(node, value, "constant")
        elif node.op == "call_function" and node.target is not operator.getitem:
            if is_view(node):
                self._visit_view(node, value)
            else:
                self._visit_op(node, value)

    def _visit_input(self, node: fx.Node, value: Any) -> None:
        if node.name.startswith("tangents"):
            if isinstance(value, torch.Tensor):
                place = self._add_storage(node, value, "tangent")
                self._storages[place]["nbytes"] = min(self._storages[place]["nbytes"], _own_bytes(value))
            return
        kind: StorageKind = "input"
        if self._n_inputs in self.parameters:
            kind = "parameter"
        elif self._n_inputs in self.static_inputs:
            kind = "buffer"
        if isinstance(value, torch.Tensor):
            storage = self._add_storage(node, value, kind)
            self._storages[storage]["layer"] = self.layers.get(self._n_inputs, "")
        self._n_inputs += 1

    def _visit_view(self, node: fx.Node, value: Any) -> None:
        base = node.args[0]
        if not isinstance(base, fx.Node) or base not in self.storage_of:
            raise CaptureError(f"{node.format_node()}: a view of something that is no tensor cannot be planned")
        self._join(node, self.storage_of[base])
        for item in items_of(node).values():  # split, unbind: views as a list
            self._join(item, self.storage_of[base])

    def _visit_op(self, node: fx.Node, value: Any) -> None:
        in_backward = node in self.backward
        kind: StorageKind = "activation_gradient" if in_backward else "activation"
        reads = tuple(dict.fromkeys(self.storage_of[n] for n in node.all_input_nodes if n in self.storage_of))
        writes = []
        if isinstance(value, torch.Tensor):
            writes.append(self._add_storage(node, value, kind))
        elif isinstance(value, (tuple, list)):
            items = items_of(node)
            for place, part in enumerate(value):
                if isinstance(part, torch.Tensor):
                    # Running statistics are the caller's, also where a second call of the layer moves them on.
                    part_kind: StorageKind = "output" if moves_statistics(node) and place in (3, 4) else kind
                    name = f"{node.name}.{place}"
                    writes.append(self._add_storage(items.get(place, node), part, part_kind, name, node))
        # An operand that is also read through a view of another layout must stay whole until the op ends, unless the op
        # writes none of what it reads.
        own = [self.storage_of[n] for n in node.all_input_nodes if n in self.storage_of]
        overwrites = [self.storage_of[operand] for operand in inplace.operands(node) if writes]
        overwrites = [s for s in overwrites if own.count(s) == 1 or inplace.writes_elsewhere(node)]
        overwrites = [s for s in overwrites if self._storages[s]["kind"] not in RESIDENT]
        again = self._again(node, overwrites)
        if takes_statistics(node):
            overwrites = []  # only the second run, which does not take them, may
        (self._backward if in_backward else self._forward).append(
            {
                "name": node.name,
                "target": target_name(node.target),
                "phase": "backward" if in_backward else "forward",
                "layer": self._layer(node),
                "reads": reads,
                "writes": tuple(writes),
                "overwrites": overwrites,
                "recomputable": self._can_run_again(node),
                "random": is_random(node),
                "signature": signature(node),
                "flops": flops(node),
                "moved_bytes": moved_bytes(node),
                "workspace_bytes": node.meta.get("workspace_bytes", 0),
                "again": again,
            }
        )
        self.node_of[node.name] = node

    def _again(self, node: fx.Node, overwrites: list[int]) -> Again | None:
        second = second_node(node)
        if second is None:
            return None
        operands: list[fx.Node] = []
        fx.node.map_arg(second_call(node)[1], operands.append)
        reads = tuple(dict.fromkeys(self.storage_of[operand] for operand in operands))
        return Again(
            target_name(second.target),
            reads,
            overwrites[0] if overwrites and overwrites[0] in reads else -1,
            signature(second),
            flops(second),
            moved_bytes(second),
        )

    def _can_run_again(self, node: fx.Node) -> bool:
        return can_run_again(node) and not self._reads_overwritten_input(node)

    def _reads_overwritten_input(self, node: fx.Node) -> bool:
        """Whether a second run would find a buffer or an input that the forward pass has changed."""
        read: list[fx.Node] = []
        fx.node.map_arg((second_call(node)[1], dict(node.kwargs)), read.append)
        changed = {self.storage_of[node] for node in self.overwritten}
        return any(self.storage_of.get(operand) in changed for operand in read)

    def _layer(self, node: fx.Node) -> str:
        """The layer a node belongs to; where no module was called, as for a padded patch, that of its weight."""
        own = (self._storages[self.storage_of[n]] for n in node.all_input_nodes if n in self.storage_of)
        return layer_path(node) or next((s["layer"] for s in own if s["kind"] == "parameter"), "")

    def _add_storage(
        self, node: fx.Node, value: torch.Tensor, kind: StorageKind, name: str = "", producer: fx.Node | None = None
    ) -> int:
        place = len(self._storages)
        own = node is not producer and (name == "" or node.target is operator.getitem)
        self._storages.append(
            {
                "id": place,
                "name": node.name if own else name,
                "nbytes": storage_bytes(value),
                "kind": kind,
                "layer": self._layer(producer or node),
                "shape": tuple(int(size) for size in value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "tensors": [],
            }
        )
        if own:
            self._join(node, place)
        return place

    def _join(self, node: fx.Node, storage: int) -> None:
        self.storage_of[node] = storage
        described = self._storages[storage]
        described["tensors"].append(node.name)
        if node in self.forward_outputs and described["kind"] == "activation":
            described["kind"] = "output"
        if node in self.backward_outputs and described["kind"] == "activation_gradient":
            described["kind"] = "gradient"

    def finish(self) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
        readers: dict[int, int] = {}
        for op in self._forward + self._backward:
            for storage in op["reads"]:
                readers[storage] = readers.get(storage, 0) + 1
        tangents = tuple(s["id"] for s in self._storages if s["kind"] == "tangent")
        outputs = tuple(self.storage_of[n] for n in self.forward_outputs if n in self.storage_of)
        outputs = tuple(sorted({s for s in outputs if self._storages[s]["kind"] == "output"}))
        loss = {
            "name": "loss",
            "target": "loss",
            "phase": "loss",
            "layer": "",
            "reads": outputs,
            "writes": tangents,
            "overwrites": [],
        }
        ops = []
        for place, op in enumerate([*self._forward, loss, *self._backward]):
            dying = [s for s in op["overwrites"] if readers.get(s) == 1]
            overwrites = (dying or op["overwrites"] or [-1])[0]
            ops.append(Op(**{**op, "id": place, "overwrites": overwrites}))
        storages = tuple(Storage(**{**s, "tensors": tuple(s["tensors"])}) for s in self._storages)
        return tuple(ops), storages

    def shared_result_bytes(self, graph: fx.Graph) -> int:
        """As of `StepGraph`, by the notes AOTAutograd puts next to results and gradients."""
        output: Any = graph.output_node()
        noted: dict[Any, Any] = dict(zip(output.meta.get("desc") or (), output.args[0], strict=False))
        more: dict[int, int] = {}  # id of a storage with a gradient → bytes of results in addition to its gradients
        for node in graph.find_nodes(op="placeholder"):
            if isinstance(note := node.meta.get("desc"), TangentAOTInput) and node in self.storage_of:
                storage = self.storage_of.get(noted.get(note.output, node), -1)
                more[storage] = more.get(storage, 0) - self._storages[self.storage_of[node]]["nbytes"]
        results = {node for note, node in noted.items() if isinstance(note, PlainAOTOutput)}
        for node in results & self.storage_of.keys():  # others are numbers
            value, storage = node.meta["val"], self.storage_of[node]
            if storage in more and (value.is_floating_point() or value.is_complex()):
                more[storage] += allocated_bytes(int(value.numel()) * value.element_size(), value.device)
        return sum(max(0, nbytes) for nbytes in more.values())


def _own_bytes(value: torch.Tensor) -> int:
    """What a gradient takes that is laid out as `value`, which may be a part of a larger tensor."""
    if 0 in value.shape:
        return 0
    elems = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return allocated_bytes(int(elems) * value.element_size(), value.device)


def storage_bytes(value: torch.Tensor) -> int:
    """What the device's allocator counts for the storage of a tensor."""
    return allocated_bytes(int(value.untyped_storage().nbytes()), value.device)
