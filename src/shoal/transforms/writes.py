"""What a traced network writes over in place: of which tensors the memory changes after they were made, and by whom.

torch.fx records an in-place op as one more reader of its operand. Whoever reads an operand earlier or later than the
network does, or leaves such an op out, asks here first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

# Those of Python by what they do to new memory.
IN_PLACE_OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.imatmul: operator.matmul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}
# Where activations and dropouts have `inplace` among their arguments.
_IN_PLACE_AT: dict[Callable[..., Any], int] = {
    **dict.fromkeys((F.relu, F.relu6, F.selu, F.silu, F.mish, F.hardswish, F.hardsigmoid), 1),
    **dict.fromkeys((F.elu, F.celu, F.leaky_relu), 2),
    **dict.fromkeys((F.hardtanh, F.threshold, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), 3),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), 3),
    F.rrelu: 4,
}
# Of these the result is new memory, or no tensor. Any other op may return its operand, or a view of it, as dropout may.
_PLAIN_LAYERS = (_ConvNd, _NormBase, nn.Linear)
_NEW_MODULES = {f"torch.nn.modules.{name}" for name in ("activation", "normalization", "pooling", "upsampling")}
_NEW_FUNCTIONS = {
    *("add", "sub", "mul", "div", "truediv", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "log", "abs", "matmul"),
    *("clone", "where", "maximum", "minimum", "mean", "sum", "cat", "concat", "concatenate", "stack", "interpolate"),
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "softplus"),
    *("hardtanh", "hardswish", "hardsigmoid", "softmax", "log_softmax", "batch_norm", "group_norm", "layer_norm"),
    *("instance_norm", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu"),
    *("conv1d", "conv2d", "conv3d", "linear", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d"),
    *("avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("size", "dim", "numel", "shape", "ndim", "dtype", "device"),
}


def is_told_in_place(node: fx.Node) -> bool:
    """Whether a function is called with `inplace=True`, by name or by place."""
    if node.op != "call_function":
        return bool(node.kwargs.get("inplace", False))
    place = _IN_PLACE_AT.get(node.target, len(node.args))  # type: ignore[arg-type]  # any target
    return bool(node.kwargs.get("inplace", node.args[place] if place < len(node.args) else False))


def is_in_place(node: fx.Node) -> bool:
    """Whether it calls a function or a method that writes over its first operand."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node)
    return (
        is_told_in_place(node)
        or node.target in IN_PLACE_OPERATORS
        or node.target is operator.setitem
        or (name.endswith("_") and not name.endswith("__"))
    )


def write_to_new_memory(node: fx.Node) -> None:
    """Call it with `inplace=False`."""
    place = _IN_PLACE_AT.get(node.target)  # type: ignore[arg-type]  # any target
    node.args = tuple(False if at == place else one for at, one in enumerate(node.args))
    node.kwargs = {name: one for name, one in node.kwargs.items() if name != "inplace"}


class Writes:
    """Of one graph.

    Args:
        graph: as torch.fx traced it.
        modules: of the network, by name.

    >>> graph = fx.symbolic_trace(nn.Sequential(nn.Conv1d(1, 1, 1), nn.ReLU(inplace=True))).graph
    >>> writes = Writes(graph, {"0": nn.Conv1d(1, 1, 1), "1": nn.ReLU(inplace=True)})
    >>> _, convolution, relu, _ = graph.nodes
    >>> writes.over(convolution), writes.over(relu)
    (_1, None)
    """

    def __init__(self, graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._place = {node: place for place, node in enumerate(graph.nodes)}

    def over(self, node: fx.Node, after: fx.Node | None = None) -> fx.Node | None:
        """The first op after `after`, by default after `node` itself, that writes over the node's memory."""
        start = self._place[node if after is None else after]
        return next((writer for writer in self.all_over(node) if self._place[writer] > start), None)

    def all_over(self, node: fx.Node) -> list[fx.Node]:
        """The ops that write over the node's memory, in their order."""
        shared = self._sharing(node)
        writers = {user for member in shared for user in member.users if member in self._written(user)}
        return sorted(writers, key=self._place.__getitem__)

    def is_before(self, first: fx.Node, second: fx.Node) -> bool:
        return self._place[first] < self._place[second]

    def can_read_instead(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether it has no effect if the network's `reader` of `node` reads it at a later time and writes nothing."""
        return self.over(node, reader) is None and self.is_unnoticed(reader)

    def is_unnoticed(self, node: fx.Node) -> bool:
        """Whether what the node writes over is not read later, but through the node's own result."""
        foreign = any(member.op in ("placeholder", "get_attr") for member in self._written_over(node))
        return not foreign and all(self._place[reader] < self._place[node] for reader in self.other_readers(node))

    def other_readers(self, node: fx.Node) -> set[fx.Node]:
        """Who else reads what the node writes over, not through the node's own result."""
        return {reader for member in self._written_over(node) for reader in member.users} - {node}

    def _written_over(self, node: fx.Node) -> set[fx.Node]:
        """The nodes whose memory it writes over."""
        return {member for written in self._written(node) for member in self._sharing(written, node)}

    def _sharing(self, node: fx.Node, without: fx.Node | None = None) -> set[fx.Node]:
        """The nodes whose tensors may lie in the memory of `node`'s; those found through `without` left out."""
        found, pending = {node}, [node]
        while pending:
            member = pending.pop()
            near = [user for user in member.users if member in self._looked_at(user)]
            for other in (*near, *self._looked_at(member)):
                if other not in found and other is not without:
                    found.add(other)
                    pending.append(other)
        return found

    def _looked_at(self, node: fx.Node) -> list[fx.Node]:
        """The operands that share memory with the node's result."""
        written = self._written(node)
        if written:
            return written
        if node.op == "call_module":
            layer = self._modules[str(node.target)]
            is_new = isinstance(layer, _PLAIN_LAYERS) or type(layer).__module__ in _NEW_MODULES
        else:
            is_new = node.op == "output" or _name(node) in _NEW_FUNCTIONS
        return [] if is_new else node.all_input_nodes

    def _written(self, node: fx.Node) -> list[fx.Node]:
        """The operands that the node may write over."""
        if node.op == "call_module" and self._is_unknown(self._modules[str(node.target)]):
            return node.all_input_nodes
        target = node.kwargs.get("out")
        if not isinstance(target, fx.Node) and self._is_in_place(node):
            target = node.args[0] if node.args else None
        return [target] if isinstance(target, fx.Node) else []

    def _is_unknown(self, layer: nn.Module) -> bool:
        """Whether it is called whole, and not all in it is of torch."""
        return any(
            not isinstance(inner, _PLAIN_LAYERS) and not type(inner).__module__.startswith("torch.nn.")
            for inner in layer.modules()
        )

    def _is_in_place(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return any(getattr(inner, "inplace", False) for inner in self._modules[str(node.target)].modules())
        return is_in_place(node)


def _name(node: fx.Node) -> str:
    if node.target is getattr:
        return str(node.args[1])
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
