"""A captured step rewritten so that chosen convolution inputs wait in 8 bits a value.

Each chosen storage gets ops of its own: one encodes it after its last reader of the forward pass, one decodes it before
each convolution whose weight gradient reads it. They are ops of the step like any other, so the payload is planned,
moved and counted as every saved storage is. Their names do not depend on what else is chosen (see `partly_encoded`).

What else of the backward pass reads the storage must go on reading exact values. Where that is the backward pass of the
very ReLU that made it, the sign bits of the codes tell all it asks for. A storage with any other reader is not offered:
its exact values would have to wait in addition to the payload. Batch norm is such a reader unless the caller lifts its
exemption.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.step_writer import StepWriter
from shoal.core.lossy import LossyOptions
from shoal.core.residence import Encode, Residence
from shoal.core.step import StepGraph
from shoal.errors import PlanError
from shoal.graph import inplace
from shoal.graph.fx_nodes import is_view
from shoal.graph.op_counts import target_name
from shoal.graph.symbolic_sizes import as_arguments, usual
from shoal.kernels import convolution_pieces, cudnn_batch_norm, norm_pieces
from shoal.kernels.batch_norm import backward as batch_norm_backward
from shoal.kernels.encoded_activation import decode, encode, payload_bytes, relu_backward
from shoal.kernels.relu import backward as from_mask

_aten = torch.ops.aten
_WEIGHT_GRADIENTS = (_aten.convolution_backward.default, convolution_pieces.weight_gradient)
_BATCH_NORM_BACKWARDS = (
    _aten.native_batch_norm_backward.default,
    batch_norm_backward,
    cudnn_batch_norm.backward,
    norm_pieces.native_backward,
    norm_pieces.cudnn_backward,
)
_CONVOLUTIONS = (_aten.convolution.default, convolution_pieces.forward)
ENCODE, DECODE = target_name(encode), target_name(decode)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SMALL_SHARE = 1 / 4000  # of all saved bytes: not worth two ops


@dataclass(frozen=True)
class Offer:
    """A storage that may be encoded.

    Attributes:
        storage: its name.
        nbytes: of the exact values.
        payload_bytes: of the encoded form.
        layers: those whose backward pass would read decoded values.
    """

    storage: str
    nbytes: int
    payload_bytes: int
    layers: tuple[str, ...]


def offers(captured: Captured, lossy: LossyOptions) -> tuple[Offer, ...]:
    """The storages of a step that may be encoded, in the order of their first computation.

    They are inputs of convolutions, dense, of float32, bfloat16 or float16, whose other backward readers (if any) are
    the ReLU that made them. What comes before the first convolution is exempt unless `lossy` says otherwise, and so are
    inputs of batch norms.
    """
    graph = captured.graph
    smallest_bytes = _SMALL_SHARE * sum(graph.storages[s].nbytes for s in graph.saved)
    behind = _behind_a_convolution(captured) if "first_layer" in lossy.exempt else None
    found = []
    for storage in (graph.storages[s] for s in graph.saved):
        if storage.id not in graph.can_leave or storage.nbytes < smallest_bytes:
            continue
        uses = _uses(captured, storage.id)
        if uses is None or (behind is not None and uses.base not in behind):
            continue
        if "batch_norm" in lossy.exempt and any(node.target in _BATCH_NORM_BACKWARDS for node in uses.readers):
            continue
        layer_of = [graph.op_called[node.name].layer or node.name for node in uses.readers]
        n_elems = storage.nbytes // uses.base.meta["val"].element_size()
        n_bytes = payload_bytes(n_elems, lossy.block_elems)
        found.append(Offer(storage.name, storage.nbytes, n_bytes, tuple(dict.fromkeys(layer_of))))
    return tuple(found)


def encoded(captured: Captured, chosen: Collection[str], lossy: LossyOptions) -> Captured:
    """The step with the chosen storages encoded; `captured` stays as it is.

    Raises:
        PlanError: one of them cannot be encoded in this step.
    """
    writer = StepWriter(captured)
    same = writer.called()
    graph = captured.graph
    for storage in graph.storages:
        if storage.name in chosen:
            uses = _uses(captured, storage.id)
            if uses is None:
                raise PlanError(f"{storage.name!r} cannot be encoded in this step; plan this step again")
            _encode(writer, uses.among(same), lossy)
    if unknown := set(chosen) - graph.storage_called.keys():
        raise PlanError(f"the plan encodes {sorted(unknown)[0]!r}, which this step does not have; plan this step again")
    return writer.read()


def with_free_codecs(graph: StepGraph) -> StepGraph:
    """The step as if its codecs took no time, and neither took bytes in addition to exact values.

    So a storage is encoded in place, and its payload and what is decoded of it are together as large as it.
    """
    payload_of = {op.writes[0]: op.reads[0] for op in graph.ops if op.target == DECODE}
    storages = tuple(
        replace(s, nbytes=s.nbytes - graph.storages[payload_of[s.id]].nbytes) if s.id in payload_of else s
        for s in graph.storages
    )
    ops = []
    for op in graph.ops:
        if op.target in (ENCODE, DECODE):
            op = replace(op, seconds=0.0, launch_seconds=0.0, workspace_bytes=0)
        ops.append(replace(op, overwrites=op.reads[0]) if op.target == ENCODE else op)
    return replace(graph, ops=tuple(ops), storages=storages)


def payload_name(storage: str) -> str:
    """The name of the storage that holds the encoded form of another."""
    return f"{storage.replace('.', '_')}_encoded"


def payloads(graph: StepGraph) -> dict[str, str]:
    """The storages that a step encodes, and those that hold their encoded forms."""
    name = [storage.name for storage in graph.storages]
    return {name[op.reads[0]]: name[op.writes[0]] for op in graph.ops if op.target == ENCODE}


def encode_residences(
    residences: Mapping[str, Residence], payload_of: Mapping[str, str], lossy: LossyOptions
) -> dict[str, Residence]:
    """Residences of a step with encoded storages, in which its `payloads` are said to be those."""
    said: dict[str, Residence] = dict(residences)
    for name, payload in payload_of.items():
        exact = said.get(name)
        given_up = {} if exact is None or isinstance(exact, Encode) else {"exact": exact}
        said[name] = Encode(lossy.codec, lossy.block_elems, lossy.seed, payload, **given_up)
    return said


@dataclass(frozen=True)
class _EncodedUses:
    """Who reads a storage that may be encoded.

    Attributes:
        base: the node that first fills it.
        last_reader: of the forward pass.
        readers: nodes that read it for a convolution's weight gradient or a batch norm's backward pass, in order.
        rectifiers: nodes that are the backward pass of the ReLU that made it.
        masks: nodes that make a mask of it for those.
        closed_above: as of `encode`.
    """

    base: fx.Node
    last_reader: fx.Node
    readers: tuple[fx.Node, ...]
    rectifiers: tuple[fx.Node, ...]
    masks: tuple[fx.Node, ...]
    closed_above: float | None

    def among(self, same: Mapping[str, fx.Node]) -> _EncodedUses:
        """The same nodes of a copy of the graph."""

        def every(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
            return tuple(same[node.name] for node in nodes)

        base, last_reader = every((self.base, self.last_reader))
        parts = every(self.readers), every(self.rectifiers), every(self.masks)
        return _EncodedUses(base, last_reader, *parts, self.closed_above)


def _uses(captured: Captured, storage: int) -> _EncodedUses | None:
    """None where the storage cannot be encoded."""
    graph = captured.graph
    tensors = {node for node, owner in captured.storage_of.items() if owner == storage}
    base = next(node for node in tensors if node.name == graph.storages[storage].tensors[0])
    value = base.meta["val"]
    if value.dtype not in _DTYPES or not _fills_its_storage(value):
        return None
    readers = [captured.node_of[graph.ops[op].name] for op in graph.readers[storage] if graph.ops[op].phase != "loss"]
    before = [node for node in readers if node.name not in captured.backward_names]
    producer = captured.node_of[graph.ops[graph.producer[storage]].name]
    decoding: list[fx.Node] = []
    rectifiers: list[fx.Node] = []
    masks: list[fx.Node] = []
    closed_above = _closes_above(base)
    for node in readers:
        if node.name not in captured.backward_names:
            continue
        if node.target in (*_WEIGHT_GRADIENTS, *_BATCH_NORM_BACKWARDS) and _reads_at(node, tensors) == [1]:
            decoding.append(node)
        elif closed_above is not None and _is_own_backward(node, base):
            rectifiers.append(node)
        elif closed_above is not None and _is_mask(node, base):
            masks.append(node)
            rectifiers.extend(node.users)
        else:
            return None
    if not decoding:
        return None
    last = before[-1] if before else producer
    return _EncodedUses(
        base, last, tuple(decoding), tuple(rectifiers), tuple(masks), closed_above if rectifiers else None
    )


def _closes_above(base: fx.Node) -> float | None:
    """Above which values the rectifier that made a tensor lets no gradient through; None where it is no such."""
    if base.target is _aten.relu.default:
        return math.inf
    if base.target is _aten.hardtanh.default and len(base.args) == 3 and base.args[1] == 0:
        high: Any = base.args[2]
        return float(high) if high > 0 else None
    return None


def _is_own_backward(node: fx.Node, base: fx.Node) -> bool:
    if node.target is _aten.threshold_backward.default:
        return base.target is _aten.relu.default and node.args[0] is not base and node.args[1:] == (base, 0)
    if node.target is _aten.hardtanh_backward.default:
        return node.args[0] is not base and node.args[1:] == (base, *base.args[1:])
    return False


def _is_mask(node: fx.Node, base: fx.Node) -> bool:
    return (
        node.target is _aten._to_copy.default
        and node.kwargs == {"dtype": torch.bool}
        and base.target is _aten.relu.default
        and all(user.target is from_mask and user.args[1] is node for user in node.users)
    )


def _reads_at(node: fx.Node, tensors: set[fx.Node]) -> list[int]:
    return [place for place, operand in enumerate(node.args) if isinstance(operand, fx.Node) and operand in tensors]


def _fills_its_storage(value: torch.Tensor) -> bool:
    n_bytes = usual(value.numel()) * value.element_size()
    return 0 < n_bytes == usual(value.untyped_storage().nbytes()) and 0 not in value.stride()


def _behind_a_convolution(captured: Captured) -> set[fx.Node]:
    """Every convolution, and the nodes that one comes before."""
    found: set[fx.Node] = set()
    for node in captured.joint.graph.nodes:
        if node.target in _CONVOLUTIONS or any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


def _encode(writer: StepWriter, uses: _EncodedUses, lossy: LossyOptions) -> None:
    graph, base = writer.graph, uses.base
    value = base.meta["val"]
    # A reader that can write its result over the storage, its last one, has to come after what encodes it.
    reader = uses.last_reader
    before = reader if base in inplace.operands(reader) else _end_of(reader, base).next
    arguments = (base, lossy.codec, lossy.block_elems, lossy.seed, uses.closed_above)
    encoded_value = value.new_empty((payload_bytes(value.numel(), lossy.block_elems),), dtype=torch.uint8)
    payload = writer.call(before, encode, arguments, encoded_value, base, payload_name(base.name))
    for node in uses.readers:
        with graph.inserting_before(node):
            shape, stride = as_arguments(graph, value.shape), as_arguments(graph, value.stride())
            form = (shape, stride, value.dtype, lossy.codec, lossy.block_elems, uses.closed_above)
            decoded = value.new_empty_strided(value.shape, value.stride())
            again = writer.call(node, decode, (payload, *form), decoded, node, f"{base.name}_decoded")
            node.update_arg(1, _seen_alike(graph, node.args[1], base, again))  # type: ignore[arg-type]
    for node in uses.rectifiers:
        with graph.inserting_before(node):
            shape, stride = as_arguments(graph, value.shape), as_arguments(graph, value.stride())
        node.target, node.args = relu_backward, (node.args[0], payload, shape, stride, lossy.block_elems)
    for node in uses.masks:
        graph.erase_node(node)


def _end_of(reader: fx.Node, base: fx.Node) -> fx.Node:
    """The node after which an op may stand that reads `base` and comes after `reader`."""
    return base if reader is base.args[0] else reader  # the item of a result with several parts


def _seen_alike(graph: fx.Graph, seen: fx.Node, base: fx.Node, other: fx.Node) -> fx.Node:
    """The view of `other` that `seen` is of `base`."""
    if seen is base:
        return other
    assert is_view(seen)
    source: Any = seen.args[0]
    below = _seen_alike(graph, source, base, other)
    args, kwargs = fx.node.map_arg((seen.args, seen.kwargs), lambda one: below if one is source else one)
    copy = graph.create_node("call_function", seen.target, args, kwargs, f"{seen.name}_decoded", seen.type)
    copy.meta = dict(seen.meta)
    return copy
