"""Which part of a traced network is split: from the input to the join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from shoal.errors import CaptureError, InputError
from shoal.transforms.split.spatial_ops import (
    SpatialKind,
    dims_of,
    draws,
    is_convolution,
    is_pointwise,
    is_transposed,
    kind_by_sample,
    kind_of,
    layer_of,
)
from shoal.transforms.writes import Writes

AUTO = "auto"
OF_PARAMETERS = "shoal_of_parameters"  # marks an input of a graph that was computed of parameters only


@dataclass(frozen=True)
class SplitRegion:
    """The nodes that run patch by patch.

    Attributes:
        source: the input that is cut.
        nodes: in the order in which they run, each with what it is.
        leaving: those whose result is read outside, and so is joined; the last is the join proper.
    """

    source: fx.Node
    nodes: Mapping[fx.Node, SpatialKind]
    leaving: tuple[fx.Node, ...]


def choose_region(
    graph: fx.Graph,
    modules: Mapping[str, nn.Module],
    *,
    dims: int | None,
    depth: float,
    join: str | None,
    exact: bool = False,
    before_pooling: bool = False,
) -> SplitRegion | None:
    """The region that holds the first `depth` of the convolutions, up to the next place where few tensors cross.

    Args:
        graph: of the whole network.
        modules: by name.
        dims: how many spatial dimensions are cut; None: it is the batch that is cut.
        depth: share of the convolutions, 0 to 1.
        join: None for the next block boundary; a module's name to join after it; "auto" for the last block boundary
            before an op that cannot run patch by patch, where that comes first.
        exact: whether the result is that of the whole, so that what draws random numbers runs on the whole.
        before_pooling: join no later than at the next pooling: after it there are fewer places to cut at.

    Returns:
        None where there is nothing to split.

    Raises:
        CaptureError: an op before the join cannot run patch by patch.
        InputError: no module is called `join`.
    """
    source = _source(graph)
    order = list(graph.nodes)
    random = {node for node in order if exact and draws(node, modules)}
    can_split = _splittable(order, source, modules, dims, random)
    convolutions = [node for node in order if is_convolution(node, modules)]
    if join is not None and join != AUTO:
        last = _last_of(order, join)
    else:
        wanted = round(depth * len(convolutions))
        if wanted == 0:
            return None
        last = _after(order, can_split, convolutions, wanted, anything=join == AUTO, before_pooling=before_pooling)
    if last < 0:
        return None
    inside = {node: kind for node, kind in can_split.items() if order.index(node) <= last}
    if join is not None and join != AUTO and order[last] not in inside:
        raise _cannot_split(_blocker(order, order[last], inside), modules, dims)
    if not any(kind == "convolution" for kind in inside.values()):
        return None
    return SplitRegion(source, inside, _leaving(inside))


def _source(graph: fx.Graph) -> fx.Node:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if not inputs:
        raise CaptureError("the model takes no input that could be cut into patches")
    return inputs[0]


def _splittable(
    order: Sequence[fx.Node], source: fx.Node, modules: Mapping[str, nn.Module], dims: int | None, whole: set[fx.Node]
) -> dict[fx.Node, SpatialKind]:
    """What can run patch by patch, and is written over by nothing else: that runs later, on tensors that are joined."""
    writes = Writes(source.graph, modules)
    while True:
        found = _pass(order, source, modules, dims, writes, whole)
        more = {node for node in found if not set(writes.all_over(node)) <= found.keys()}
        first = next((node for node in order if node not in found and draws(node, modules)), None)
        if first is not None:  # random numbers are drawn in the order of the whole
            more |= {
                node for node, kind in found.items() if kind == "feature dropout" and writes.is_before(first, node)
            }
        if not more:
            return found
        whole |= more


def _pass(
    order: Sequence[fx.Node],
    source: fx.Node,
    modules: Mapping[str, nn.Module],
    dims: int | None,
    writes: Writes,
    whole: set[fx.Node],
) -> dict[fx.Node, SpatialKind]:
    found: dict[fx.Node, SpatialKind] = {}
    samples = _samples(source)
    for node in order:
        operands = [n for n in node.all_input_nodes if n is source or n in found]
        others = [n for n in node.all_input_nodes if n is not source and n not in found]
        if node in whole or not operands or not all(_is_for_all(n, node, dims) for n in others):
            continue
        if source in operands and any(writes.is_before(writer, node) for writer in writes.all_over(source)):
            continue
        layer = layer_of(node, modules)
        bound = dims_of(layer) if layer is not None else None
        if dims is not None and bound is not None and bound != dims:
            raise CaptureError(
                f"{node.target} is a {type(layer).__name__}, but grid has {dims} numbers; give one number for each of "
                f"its {bound} dimensions"
            )
        kind = kind_of(node, modules, dims) if dims is not None else kind_by_sample(node, modules, samples)
        if dims is None and (not _has_samples_first(operands, node) or (kind == "reshape" and writes.all_over(node))):
            continue
        if kind is not None and writes.is_unnoticed(node) and writes.other_readers(node) <= found.keys():
            found[node] = kind
    return found


def _samples(source: fx.Node) -> int:
    """In the batch; 0 where its size is not known, or is a symbol."""
    value = source.meta.get("example_value")
    rows = value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 0
    return rows if isinstance(rows, int) else 0


def _has_samples_first(operands: Sequence[fx.Node], node: fx.Node) -> bool:
    """Whether no operand has fewer axes than the result, whose first axis would not meet that of the samples."""
    values = [one.meta.get("example_value") for one in (node, *operands)]
    dims = [value.dim() for value in values if isinstance(value, torch.Tensor)]
    return len(operands) == 1 or len(dims) < len(values) or min(dims) == dims[0]


def _is_for_all(operand: fx.Node, node: fx.Node, dims: int | None) -> bool:
    """Whether every patch or slice reads the same of an operand that is not cut."""
    if dims is not None or operand.op == "get_attr":
        return operand.op == "get_attr"
    value, result = operand.meta.get("example_value"), node.meta.get("example_value")
    if not _is_of_parameters(operand) or not isinstance(value, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return is_transposed(node) or value.dim() < result.dim() or value.shape[0] == 1


def _is_of_parameters(node: fx.Node) -> bool:
    """Whether it is a parameter, or computed only of parameters by an op of each element, or another shape of one."""
    if node.op in ("placeholder", "get_attr"):
        is_marked = OF_PARAMETERS in node.meta or isinstance(node.meta.get("example_value"), nn.Parameter)
        return node.op == "get_attr" or is_marked
    is_known = is_pointwise(node) or node.target in ("reshape", "view", "unsqueeze", torch.reshape, torch.unsqueeze)
    return is_known and bool(node.all_input_nodes) and all(map(_is_of_parameters, node.all_input_nodes))


def _after(
    order: Sequence[fx.Node],
    can_split: Mapping[fx.Node, SpatialKind],
    convolutions: Sequence[fx.Node],
    wanted: int,
    *,
    anything: bool,
    before_pooling: bool,
) -> int:
    """Where to join: after `wanted` convolutions, at the first place that as few tensors cross as any later one."""
    inside = [node for node in convolutions if node in can_split]
    if len(inside) < wanted:
        if not anything:
            missing = next(node for node in convolutions if node not in can_split)
            raise CaptureError(
                f"depth asks for {wanted} convolutions and {len(inside)} can run in patches; give a smaller depth, or "
                "join='auto'",
                details={"op that cannot": _blocker(order, missing, can_split).target},
            )
        wanted = len(inside)
    if wanted == 0:
        return -1
    place = {node: number for number, node in enumerate(order)}
    begin = place[inside[wanted - 1]]
    end = max(place[node] for node in can_split)
    crossing = {at: len(_crossing(can_split, place, at)) for at in range(begin, end + 1)}
    last = next(at for at in range(begin, end + 1) if crossing[at] == min(crossing[q] for q in range(at, end + 1)))
    for at in range(last + 1, end + 1):  # what costs nothing more: activations, pooling
        node = order[at]
        if node not in can_split and can_split.keys().isdisjoint(node.all_input_nodes):
            continue  # it stands anywhere, as what counts batches does
        kind = can_split.get(node, "convolution")
        if kind == "convolution" or crossing[at] > crossing[last] or (before_pooling and kind == "pooling"):
            break
        last = at
    return last


def _crossing(can_split: Mapping[fx.Node, SpatialKind], place: Mapping[fx.Node, int], at: int) -> list[fx.Node]:
    inside = {node for node in can_split if place[node] <= at}
    return [node for node in inside if any(user not in inside for user in node.users)]


def _last_of(order: Sequence[fx.Node], module: str) -> int:
    def is_part(node: fx.Node) -> bool:
        if node.op == "call_module" and (node.target == module or str(node.target).startswith(f"{module}.")):
            return True
        return module in {path for path, _ in node.meta.get("nn_module_stack", {}).values()}

    places = [number for number, node in enumerate(order) if is_part(node)]
    if not places:
        raise InputError(f"join={module!r}: no module of that name runs; give the name of one, such as 'layer2'")
    return places[-1]


def _leaving(inside: Mapping[fx.Node, SpatialKind]) -> tuple[fx.Node, ...]:
    return tuple(node for node in inside if any(user not in inside for user in node.users))


def _blocker(order: Sequence[fx.Node], wanted: fx.Node, can_split: Mapping[fx.Node, SpatialKind]) -> fx.Node:
    """The first op on the way to `wanted` that cannot run patch by patch."""
    needed, pending = set(), [wanted]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    calls = (node for node in order if node in needed and node not in can_split and node.op.startswith("call_"))
    return next(calls, wanted)


def _cannot_split(node: fx.Node, modules: Mapping[str, nn.Module], dims: int | None) -> CaptureError:
    layer = layer_of(node, modules)
    what = f"{node.target} ({type(layer).__name__})" if layer is not None else str(node.target)
    return CaptureError(
        f"{what} comes before the join, and cannot run patch by patch in {dims} dimensions; join before it, or give "
        "join='auto'"
    )
