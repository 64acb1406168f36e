"""What the nodes and the inputs of a captured graph are: views, layers of the model, parameters."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.utils._pytree import tree_leaves

from shoal.errors import CaptureError
from shoal.graph.symbolic_sizes import usual

_aten = torch.ops.aten
_PLACE: Collection[str] = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr")
_ALIASES_UNDECLARED = frozenset({_aten._unsafe_view.default, _aten._reshape_alias.default})


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its first operand's storage."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in _ALIASES_UNDECLARED:
        return True
    returns = node.target._schema.returns
    return len(returns) >= 1 and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def layer_path(node: fx.Node) -> str:
    """Module path of the layer a node belongs to, such as "layer1.0.conv1"; for backward nodes the forward layer's."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    return module_path(str(next(reversed(stack.values()))[0]))


def module_path(source: str) -> str:
    """A module's path in its model from how Dynamo writes it, or how it writes a parameter or a buffer of it.

    >>> module_path("L['model']._modules['layer1']._modules['0']._parameters['weight']")
    'layer1.0'
    """
    source = re.sub(r"\._(parameters|buffers)\['[^']*'\]$", "", source)
    source = re.sub(r"^L\['\w+'\]\.?", "", source)
    source = re.sub(r"_modules\['([^']*)'\]", r"\1", source)
    source = re.sub(r"\[(\d+)\]|\['([^']*)'\]", lambda m: f".{m.group(1) or m.group(2)}", source)
    while source != (source := re.sub(r"getattr\(([^(),]+), '([^']*)'\)", r"\1.\2", source)):
        pass  # how torch.fx writes the children of a Sequential, one in the other
    # Transforms call the network's layers under their names.
    source = re.sub(r"^.*\b_((split|fused|network)\.0|rewritten\.[01])\b", "", source)
    return source.replace("._modules", "").strip(".")


def parameter_places(gm: fx.GraphModule) -> set[int]:
    """Which of the inputs that AOTAutograd will see are parameters: those of the graph module, then its arguments."""
    n_own = len(list(gm.parameters()))
    first_argument = n_own + len(list(gm.buffers()))
    arguments = enumerate(gm.graph.find_nodes(op="placeholder"), first_argument)
    named = {place for place, node in arguments if isinstance(node.meta.get("example_value"), nn.Parameter)}
    return named.union(range(n_own))


def input_layers(gm: fx.GraphModule) -> dict[int, str]:
    """Module paths of the layers whose parameters and buffers are inputs, by the places AOTAutograd will see."""
    first_argument = len(list(gm.parameters())) + len(list(gm.buffers()))
    sources = {
        place: str(getattr(getattr(node, "_dynamo_source", None), "name", ""))
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder"), first_argument)
    }
    return {place: module_path(source) for place, source in sources.items() if "._modules" in source}


def per_axis(sizes: Sequence[int], dims: int) -> list[int]:
    """An argument of an op over `dims` axes as one number for each: a single one holds for all.

    >>> per_axis([3], 2), per_axis([3, 5], 2), per_axis([], 2)
    ([3, 3], [3, 5], [])
    """
    return list(sizes) * dims if len(sizes) == 1 else list(sizes)


def copied_joint(joint: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint graph, node by node under the same names, to be rewritten.

    Raises:
        CaptureError: a name cannot be given again.
    """
    graph = fx.Graph(joint)
    copies: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        copies[node] = graph.create_node(
            node.op,
            node.target,
            fx.node.map_arg(node.args, copies.__getitem__),
            fx.node.map_arg(dict(node.kwargs), copies.__getitem__),
            node.name,
        )
        copies[node].meta = dict(node.meta)
        if copies[node].name != node.name:
            raise CaptureError(f"{node.name}: a name that torch.fx gives only once; rename that argument")
    return fx.GraphModule(joint, graph)


def describe_as(node: fx.Node, value: Any, like: fx.Node) -> None:
    """Give a new node its value, and the place in the model that another one has."""
    node.meta = {key: like.meta[key] for key in _PLACE if key in like.meta}
    node.meta["val"] = value


def held_bytes(value: torch.Tensor) -> int:
    """Of a tensor's whole storage, at the usual sizes where these are symbols."""
    return usual(value.untyped_storage().nbytes())


def reaches_output(node: fx.Node) -> bool:
    """Whether the caller gets the node's result."""
    return any(user.op == "output" for user in node.users)


def is_handed_out(node: fx.Node) -> bool:
    """Whether the caller gets the node's storage, as it is or through a view."""
    seen = (user for user in node.users if is_view(user) or user.target is operator.getitem)
    return reaches_output(node) or any(map(is_handed_out, seen))


def items_of(node: fx.Node) -> dict[int, fx.Node]:
    """The nodes that are one of the node's results each, by the places of these."""
    items: Any = ((user.args[1], user) for user in node.users if user.target is operator.getitem)
    return dict(items)


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The node's operands: fx types each as a union of all it may be; the op's schema says which."""
    return node.args


def is_op(node: fx.Node) -> bool:
    """Whether the node computes: it is no input, view, part of a result, or size."""
    if node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return False
    return is_tensor(node)


def source(node: fx.Node) -> fx.Node:
    """The op or input whose result a node is, or is a part or view of."""
    while node.op == "call_function" and (node.target is operator.getitem or is_view(node)):
        first: Any = node.args[0]
        node = first
    return node


def value_bytes(node: fx.Node) -> int:
    """Bytes of all tensors of a node."""
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors_of(node))


def is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor, or several."""
    return bool(tensors_of(node))


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node stands for."""
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def values_of(node: fx.Node) -> Any:
    """The node's operands, tensors for nodes."""
    return fx.node.map_arg(node.args, lambda operand: operand.meta["val"])


def readers(node: fx.Node, *, of_items: bool = False) -> list[fx.Node]:
    """Who reads a node, through views; and through the parts of a result that has several, if asked for."""
    found: list[fx.Node] = []
    for user in node.users:
        through = is_view(user) or (of_items and user.target is operator.getitem)
        found += readers(user, of_items=of_items) if through else [user]
    return found


def changed_inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each input that gets a new value when the forward pass ends, and that value."""
    output = graph.output_node()
    input_of = {node.meta.get("desc"): node for node in graph.find_nodes(op="placeholder")}
    values: Any = output.args[0]
    for value, note in zip(values, output.meta.get("desc") or (), strict=False):
        if isinstance(note, InputMutationAOTOutput) and isinstance(value, fx.Node) and note.mutated_input in input_of:
            yield input_of[note.mutated_input], value
