"""A captured step with some of its convolutions in pieces, where their scratch makes the peak."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.fx_nodes import copied_joint
from shoal.capture.op_counts import flops
from shoal.capture.step_reader import read_joint
from shoal.core.step import Op, StepGraph
from shoal.core.variant import Pieces
from shoal.errors import PlanError
from shoal.kernels.convolution_pieces import IN_PIECES, WORTH_PIECES_BYTES, choose

_NEAR_THE_LARGEST = 0.25  # of the op with the most bytes of operands, results and scratch: others set no peak


def choose_pieces(captured: Captured, graph: StepGraph) -> tuple[Pieces, ...]:
    """Which convolutions of a step to compute in pieces, and in how many: all that may set its smallest peak.

    They take a scratch of at least their result and 4 MiB, need, with it, at least a quarter of what the largest op of
    the step needs, and pieces repeat their bits on this machine.

    Args:
        captured: the step, to be run on this machine.
        graph: the same with workspaces.
    """
    needed_bytes = {op.name: _needed_bytes(op, graph) for op in graph.ops}
    near_bytes = _NEAR_THE_LARGEST * max(needed_bytes.values(), default=0)
    found = []
    for op in graph.ops:
        node = captured.node_of.get(op.name)
        result_bytes = sum(graph.storages[storage].nbytes for storage in op.writes)
        if node is None or op.workspace_bytes < max(result_bytes, WORTH_PIECES_BYTES):
            continue
        if node.target in IN_PIECES and needed_bytes[op.name] >= near_bytes:
            arguments = fx.node.map_arg(node.args, lambda operand: operand.meta["val"])
            cut = choose(node.target, arguments)  # type: ignore[arg-type]
            found += [Pieces(op.name, *cut)] if cut is not None else []
    return tuple(found)


def in_pieces(captured: Captured, chosen: Collection[Pieces]) -> Captured:
    """The step with these convolutions in pieces; `captured` stays as it is.

    Raises:
        PlanError: one of them is no convolution of this step, or Inductor is to run it.
    """
    if not chosen:
        return captured
    if captured.read_with.aten_only:
        raise PlanError("the plan computes convolutions in pieces, which Inductor does not know; give kernels='eager'")
    joint = copied_joint(captured.joint)
    node_called = {node.name: node for node in joint.graph.nodes}
    for cut in chosen:
        node = node_called.get(cut.op)
        if node is None or node.target not in IN_PIECES:
            raise PlanError(f"the plan cuts {cut.op!r} into pieces, which is no convolution here; plan this step anew")
        node.meta["flops"] = flops(node)
        node.target, node.args = IN_PIECES[node.target], (*node.args, cut.dim, cut.count)
    joint.graph.lint()
    return read_joint(joint, captured.backward_names, captured.read_with)


def _needed_bytes(op: Op, graph: StepGraph) -> int:
    held = {*op.reads, *op.writes}
    return op.workspace_bytes + sum(graph.storages[storage].nbytes for storage in held)
