"""What a graph of Dynamo's computes of parameters and buffers only: the weights of layers.

`weight_norm`, `spectral_norm`, pruning and weight standardisation compute the weight of a convolution in every forward
pass. It is the same for all samples and for all places of an image, so a rewrite that runs the layer several times
computes it once, and its gradient is the sum over these runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from shoal.capture.autocast_regions import autocasts_of
from shoal.transforms.live_graph import attribute_at
from shoal.transforms.split.spatial_ops import draws
from shoal.transforms.writes import Writes


def computed_of_state(graph: fx.Graph, state: Iterable[fx.Node], images: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The calls whose results no image changes, with the calls that switch gradients off and on for them.

    Each of them can run at any time before its result is read, if all run in their order: the writes into buffers and
    the random numbers are then those of the model.

    Args:
        graph: of Dynamo's.
        state: its inputs that are parameters or buffers.
        images: its inputs that a call of the model gets.

    Returns:
        Nothing if another time would be noticed, or if other calls run without gradients.

    >>> graph = fx.Graph()
    >>> weight, x = graph.placeholder("weight"), graph.placeholder("x")
    >>> positive = graph.call_function(F.relu, (weight,))
    >>> output = graph.output(graph.call_function(F.linear, (x, positive)))
    >>> computed_of_state(graph, [weight], [x])
    frozenset({relu})
    """
    of_state, of_images = set(state), set(images)
    for node in graph.nodes:
        if not of_images.isdisjoint(node.all_input_nodes):
            of_images.add(node)
        elif not of_state.isdisjoint(node.all_input_nodes):
            of_state.add(node)
    found = {node for node in of_state - of_images if node.op not in ("placeholder", "output")}
    for node in reversed(graph.nodes):  # and what is computed of nothing, such as a vector of ones
        if node.op != "placeholder" and not found.isdisjoint(node.users):
            found.add(node)
    switches = [node for node in graph.nodes if switches_gradients(node)]
    is_enabled = True
    for node in autocasts_of(graph):  # each call, without those that enter and leave autocast
        if node in switches:
            is_enabled = node.args == (True,)
        elif not is_enabled and node not in found and node.op != "placeholder":
            return frozenset()
    return frozenset() if _is_noticed(graph, found) else frozenset(found.union(switches))


def insert_weights(
    rewritten: fx.GraphModule,
    weights: fx.GraphModule,
    results: Mapping[fx.Node, fx.Node],
    bound: Sequence[tuple[nn.Module, str, fx.Node]],
) -> None:
    """Let a rewritten graph compute weights, each shortly before a layer runs with it: none waits for its layer.

    Args:
        rewritten: is changed. Its last inputs are now those of `weights`.
        weights: the calls of `computed_of_state`, in their order.
        results: by the inputs of `rewritten` that they replace, nodes of `weights`.
        bound: layers, their attributes, and nodes of `weights` that these are.
    """
    graph = rewritten.graph
    body = next(node for node in graph.nodes if node.op != "placeholder")
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(body):
        for node in weights.graph.find_nodes(op="placeholder"):
            copies[node] = graph.placeholder(f"{node.name}_of_weights")
    waiting = deque(node for node in weights.graph.nodes if node.op not in ("placeholder", "output"))
    to_bind = list(bound)
    is_enabled = True
    for node in list(graph.nodes):
        if node.op == "placeholder":
            continue
        called = _layers_called(rewritten, node)
        binds = [one for one in to_bind if id(one[0]) in called]
        needed = {results[operand] for operand in node.all_input_nodes if operand in results}
        needed |= {value for _, _, value in binds}
        if node.op == "output":
            needed.update(waiting)
        with graph.inserting_before(node):
            while not is_enabled or not needed <= copies.keys():
                one = waiting.popleft()
                copies[one] = graph.node_copy(one, copies.__getitem__)
                if one.op == "get_attr":
                    setattr(rewritten, str(one.target), getattr(weights, str(one.target)))
                if switches_gradients(one):
                    is_enabled = one.args == (True,)
            for layer, attribute, value in binds:
                to_bind.remove((layer, attribute, value))
                graph.call_function(_Bind(layer, attribute), (copies[value],))
    for node, result in results.items():
        node.replace_all_uses_with(copies[result])
        graph.erase_node(node)


@dataclass(frozen=True, eq=False)
class _Bind:
    """Gives a layer what was computed for it; called with that."""

    layer: nn.Module
    attribute: str

    __name__ = "bind_weight"

    def __call__(self, value: Any) -> None:
        object.__setattr__(self.layer, self.attribute, value)


def _layers_called(rewritten: fx.GraphModule, node: fx.Node) -> set[int]:
    """By `id`, the modules that a call may run, in tuples of other modules, too."""
    read = [operand.target for operand in node.all_input_nodes if operand.op == "get_attr"]
    names = [*read, node.target] if node.op == "call_module" else read
    found: set[int] = set()
    pending: list[object] = [attribute_at(rewritten, str(name)) for name in names]
    while pending:
        one = pending.pop()
        if isinstance(one, nn.Module) and id(one) not in found:
            found.add(id(one))
            pending += vars(one).values()
        elif isinstance(one, (dict, tuple)):
            pending += one.values() if isinstance(one, dict) else one
    return found


def switches_gradients(node: fx.Node) -> bool:
    """Whether it is what `torch.no_grad` or `torch.enable_grad` does where it begins or ends."""
    return node.op == "call_function" and "grad_enabled" in getattr(node.target, "__name__", "")


def _is_noticed(graph: fx.Graph, found: set[fx.Node]) -> bool:
    """Whether it has an effect that these run earlier or later: one writes what another reads, or both draw."""
    writes, others = Writes(graph, {}), [node for node in graph.nodes if node not in found and node.op != "output"]
    if any(not found.isdisjoint(writes.other_readers(node)) for node in others):
        return True
    if any(not writes.other_readers(node).isdisjoint(others) for node in found):
        return True
    if any(not found.isdisjoint(statistics.users) for node in others for statistics in _moved_statistics(node)):
        return True
    return all(any(draws(node, {}) for node in nodes) for nodes in (found, others))


def _moved_statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm may write into, which `Writes` does not list."""
    if node.target not in (F.batch_norm, F.instance_norm):
        return []
    given = {**dict(zip(("input", "running_mean", "running_var"), node.args, strict=False)), **node.kwargs}
    statistics = (given.get(name) for name in ("running_mean", "running_var"))
    return [one for one in statistics if isinstance(one, fx.Node)]
