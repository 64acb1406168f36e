"""The first run of a planned graph: every tensor is compared with the trace, and copied where its layout differs.

Dynamo guards the strides of a step's inputs, and AOTAutograd gives those of the trace to its tangents: what comes out
of one run comes out of the next, at the same sizes. So the corrections that the first run needs are written into the
graph, and later runs are as fast as if nothing had been looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import fx

from shoal.capture.early_gradients import hand_over, handed_over
from shoal.capture.traced_strides import Departure, is_put_right, joint_name
from shoal.engine.graph_runner import Compiler, run_kernels
from shoal.errors import CaptureError
from shoal.graph.op_counts import target_name
from shoal.graph.symbolic_sizes import Numbers, at_numbers, call_sizes, numbers_of
from shoal.kernels.memory_format import in_traced_layout, is_same_order, is_writable
from shoal.lowlevel.torch_internals import without_aliasing_check
from shoal.offload.transfers import Transfers


def checked(
    module: fx.GraphModule,
    compile_graph: Compiler,
    example_inputs: Sequence[Any],
    departures: dict[str, Departure],
    before: Callable[[fx.Node], None] | None = None,
) -> Callable[..., Any]:
    """`compile_graph(module)`, with a first run that holds every tensor against the trace.

    Args:
        module: a graph with the traced tensors in `meta["val"]` of its nodes; corrections are written into it.
        compile_graph: makes it a callable that empties its list of arguments.
        example_inputs: for `compile_graph`.
        departures: gets what had to be copied, by the name of its node in the joint graph.
        before: called with each node of the first run before it runs.

    Returns:
        The callable. Its first run, and where sizes vary the first one at each, raises CaptureError where a kernel
        returned another shape or dtype than the trace has, or a layout from which no copy leads to the traced one.
        Where the graph hands gradients over, it returns a generator of them, as the compiled graph does.
    """
    compiled: Callable[..., Any] | None = None
    sizes_of, seen = call_sizes(module.graph), set[tuple[int, ...]]()

    def run(arguments: list[Any]) -> Any:
        sizes = sizes_of(arguments)
        if compiled is not None and sizes in seen:
            return compiled(arguments)
        seen.add(sizes)
        look = _Look(module, arguments)
        results = run_nodes(module, arguments, look, before)
        write_corrections(look, sizes)
        return results

    def run_in_parts(arguments: list[Any]) -> Generator[list[Any], None, Any]:
        sizes = sizes_of(arguments)
        if compiled is not None and sizes in seen:
            return (yield from compiled(arguments))
        seen.add(sizes)
        look = _Look(module, arguments)
        results = yield from nodes_in_parts(module, arguments, look, before)
        write_corrections(look, sizes)
        return results

    def write_corrections(look: _Look, sizes: tuple[int, ...]) -> None:
        nonlocal compiled
        departures.update({d.node: d for d in look.departed.values() if d is not None})
        if look.departed and look.numbers:  # strides that vary are looked at again in every run
            seen.discard(sizes)
        elif compiled is None:
            for node, strides in look.strides.items():
                _write_correction(module.graph, node, strides)
            compiled = compile_graph(module, example_inputs)

    if handed_over(module.graph):
        return run_in_parts
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def forward_only(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """`run_kernels` of a graph without a backward pass, whose first call is made node by node: AOTAutograd makes it
    under a dispatch mode, which `run_nodes` keeps from all but custom ops."""
    compiled = run_kernels(module, example_inputs)
    is_first = True

    def run(arguments: list[Any]) -> Any:
        nonlocal is_first
        if not is_first:
            return compiled(arguments)
        is_first = False
        return run_nodes(module, arguments, lambda _, value: value)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def run_nodes(
    module: fx.GraphModule,
    arguments: list[Any],
    look: Callable[[fx.Node, Any], Any],
    before: Callable[[fx.Node], None] | None = None,
) -> Any:
    """Run a graph node by node; each value is freed after its last reader, as in the code that torch.fx generates.

    Args:
        module: the graph.
        arguments: its inputs; the list is emptied.
        look: is given each node and its value, and returns the value to go on with.
        before: is given each node before it runs, once what died with the one before is freed.
    """
    return to_the_end(nodes_in_parts(module, arguments, look, before))


def to_the_end(running: Generator[list[Any], None, Any]) -> Any:
    """What it returns; whatever it yields is dropped."""
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value


def nodes_in_parts(
    module: fx.GraphModule,
    arguments: list[Any],
    look: Callable[[fx.Node, Any], Any],
    before: Callable[[fx.Node], None] | None = None,
) -> Generator[list[Any], None, Any]:
    """`run_nodes` that yields the gradients that the graph hands over, each group where it does; whoever takes them
    empties the list."""
    nodes = list(module.graph.nodes)
    values: dict[fx.Node, Any] = dict(zip(module.graph.find_nodes(op="placeholder"), arguments, strict=True))
    arguments.clear()
    dying = _last_reads(nodes)
    for node in nodes:
        if before is not None:
            before(node)
        if node.op == "output":
            return fx.node.map_arg(node.args[0], values.__getitem__)
        if node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(module)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            with without_aliasing_check(node.target):
                values[node] = node.target(*args, **kwargs)
            del args, kwargs
        values[node] = look(node, values[node])
        leaving = values[node] if node.target is hand_over else None
        for done in dying[node]:
            del values[done]
        if leaving is not None:
            yield leaving
    raise AssertionError("a graph ends with its output")


def _last_reads(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The nodes whose values nothing reads after a node has run."""
    dying: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    read: set[fx.Node] = set()
    for node in reversed(nodes):
        for operand in node.all_input_nodes:
            if operand not in read:
                read.add(operand)
                dying[node].append(operand)
        if node not in read and node.op == "call_function":
            dying[node].append(node)
    return dying


class _Look:
    """Holds each value against its trace.

    Attributes:
        numbers: what the step's varying sizes are in this run.
        strides: those of the trace, of each node whose value departed.
        departed: each such node, with the copy that it took; None where a view did.
    """

    def __init__(self, module: fx.GraphModule, arguments: Sequence[Any]) -> None:
        self.numbers: Numbers = numbers_of(module.graph, arguments)
        self.strides: dict[fx.Node, tuple[int, ...]] = {}
        self.departed: dict[fx.Node, Departure | None] = {}

    def __call__(self, node: fx.Node, value: Any) -> Any:
        traced = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not isinstance(traced, torch.Tensor):
            return value
        if value.layout is not torch.strided or traced.layout is not torch.strided:
            return value
        sizes = at_numbers((*traced.shape, *traced.stride()), self.numbers)
        if sizes is None:
            return value
        shape, strides = sizes[: traced.dim()], sizes[traced.dim() :]
        if value.shape != shape or (value.dtype != traced.dtype and not _is_pytorchs(node)):
            raise CaptureError(
                f"{_source(node)} contradicts its fake kernel; correct that (torch.library.register_fake)",
                details={
                    "kernel": f"{value.dtype} {list(value.shape)}",
                    "fake kernel": f"{traced.dtype} {list(shape)}",
                },
            )
        if value.stride() == strides or is_put_right(node):
            return value
        self.strides[node], self.departed[node] = strides, None
        if not is_same_order(value, strides):
            departure = Departure(
                joint_name(node),
                _source(node),
                tuple(shape),
                strides,
                value.stride(),
                int(traced.untyped_storage().nbytes()),
            )
            if not is_writable(shape, strides):
                raise CaptureError(f"{departure}: elements share addresses there, so no copy puts it right; correct it")
            self.departed[node] = departure
        return in_traced_layout(value, strides)


def _source(node: fx.Node) -> str:
    """What returned a node's value."""
    maker = _maker(node)
    return node.name if maker.op == "placeholder" else target_name(maker.target)


def _is_pytorchs(node: fx.Node) -> bool:
    """Whether a wrong dtype is PyTorch's own: batch norm's statistics of bfloat16 are float32 in eager PyTorch, too,
    whatever its fake kernel says, and its backward kernel wants them so. What was offloaded comes back as it was."""
    target = _maker(node).target
    if getattr(target, "__func__", None) is Transfers.start_fetch:
        return True
    return isinstance(target, str) or (isinstance(target, torch._ops.OpOverload) and target.namespace == "aten")


def _maker(node: fx.Node) -> fx.Node:
    whole: Any = node.args[0] if node.target is operator.getitem else node
    return whole


def _write_correction(graph: fx.Graph, node: fx.Node, strides: tuple[int, ...]) -> None:
    after = node
    while after.op == "placeholder" and after.next.op == "placeholder":
        after = after.next
    with graph.inserting_after(after):
        right = graph.call_function(in_traced_layout, (node, strides))
    right.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(right, delete_user_cb=lambda user: user is not right)
