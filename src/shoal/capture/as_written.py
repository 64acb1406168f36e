"""The step as its author wrote it, for the peak of plain PyTorch: the joint graph before the lossless rewrites."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from shoal.kernels.own_storage import OWN

_DROPOUT = torch.ops.aten.native_dropout.default


def as_written(joint: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint graph, whose nodes have the same names, with the tensors that eager PyTorch makes.

    What takes less when it is traced than when it runs is described as it runs: dropout on the CPU keeps noise of the
    input's type, while `native_dropout`, as which it is traced, has a mask of 1 byte per element; and the results of
    `shoal.kernels.own_storage` lie in storages of what they were computed from.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    graph.output_node().meta = dict(joint.graph.output_node().meta)
    for node in graph.find_nodes(op="call_function", target=_DROPOUT):
        output, mask = node.meta["val"]
        if output.device.type == "cpu":
            noise = mask.new_empty_strided(mask.shape, mask.stride(), dtype=output.dtype)
            node.meta["val"] = output, noise
            for item in node.users:
                item.meta["val"] = node.meta["val"][item.args[1]]
    for target in OWN:
        for node in graph.find_nodes(op="call_function", target=target):
            result = node.meta["val"]
            n_elems = max(operand.meta["val"].numel() for operand in node.all_input_nodes)
            if n_elems > result.numel():
                node.meta["val"] = result.new_empty(n_elems)[: result.numel()].view(result.shape)
    return fx.GraphModule(joint, graph)


def run_in_backward(graph: fx.Graph, backward: Collection[fx.Node]) -> set[str]:
    """Names of the nodes that eager PyTorch runs in the backward pass.

    It runs in the forward pass all that was traced there, also what only the backward pass reads: the copy that an
    in-place activation makes of its input.

    Args:
        graph: a joint graph.
        backward: its nodes that no output of the forward pass is made of.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    fed = (i for i, node in enumerate(nodes) if any(n.name.startswith("tangents") for n in node.all_input_nodes))
    return {node.name for node in nodes[next(fed, 0) :] if node in backward}
