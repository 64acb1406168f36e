"""Sizes that differ from one step to the next: symbols of a captured graph, each with the least and the most it can be.

In addition to sizes there are numbers that shape no tensor, such as a counter that scales one: they may be any.

Where the cuts of a split network are drawn for every mini-batch, one captured graph stands for all draws. It is read
with numbers in place of its symbols: the usual ones for what a step does, and as few others as bring each tensor to its
largest for what a step takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from shoal.errors import CaptureError
from shoal.transforms.split.split import CUTS_ARGUMENT

Size = int | torch.SymInt
_MOST_LOOKED_AT = 4096  # choices of numbers, for one storage
_SIZE_OF_A_TENSOR = ".size()["  # in the names that Dynamo gives
Numbers = Mapping[Any, int]  # by symbol, of sympy


def is_size(node: fx.Node) -> bool:
    """Whether the node is a symbolic number, not a tensor."""
    return isinstance(node.meta.get("val"), py_sym_types)


def write_constants_out(graph: fx.Graph) -> None:
    """Put the number in place of each symbolic size that has only one, in arguments and in the tensors' shapes.

    A number that shapes no tensor, such as a counter, may be any: it stays a symbol.

    Raises:
        CaptureError: a symbol in a tensor's shape has no most that it can be.
    """
    shaping = _symbols_in_shapes(graph)
    for node in list(graph.nodes):
        if not is_size(node):
            if "val" in node.meta:
                node.meta["val"] = tree_map(_settled, node.meta["val"])
            continue
        value: Any = node.meta["val"]
        exact = expression_of(value)
        if not exact.free_symbols:
            _replace(graph, node, _plain(value, exact))
        elif unbounded := [s for s in exact.free_symbols & shaping if not _has_bounds(s, value.node.shape_env)]:
            raise CaptureError(
                f"the step has a symbolic size ({node.name}, of {unbounded[0]}); compile with dynamic=False so that "
                "each shape gets its plan"
            )


def is_input_size(symbol: Any, shape_env: Any) -> bool:
    """Whether a symbol is the size of a tensor that the model is called with, and no cut that is drawn."""
    names = [source.name for source in shape_env.var_to_sources.get(symbol, ())]
    return any(_SIZE_OF_A_TENSOR in name and CUTS_ARGUMENT not in name for name in names)


def usual(value: Size) -> int:
    """A size with every symbol halfway between its least and its most, and the sizes of inputs at their most.

    A symbol that has no most is as it was captured.
    """
    if not isinstance(value, torch.SymInt):
        return value
    expression = expression_of(value)
    return int(expression.xreplace(_halfway(expression.free_symbols, value.node.shape_env)))


def usual_numbers(graph: fx.Graph) -> Numbers:
    """A number for every symbol of the graph, as of `usual`; empty where nothing varies."""
    found: dict[Any, int] = {}
    for node in graph.nodes:
        if is_size(node):
            found |= _halfway(expression_of(node.meta["val"]).free_symbols, node.meta["val"].node.shape_env)
    return found


def largest_numbers(graph: fx.Graph) -> list[Numbers]:
    """Few choices of all numbers, such that each tensor of the graph has its largest storage in one of them.

    Raises:
        CaptureError: it cannot be told how large a storage can be.
    """
    chosen: list[dict[Any, int]] = []
    for needed in _largest_of_each(graph):
        for one in chosen:
            if all(one.get(symbol, number) == number for symbol, number in needed.items()):
                one |= needed
                break
        else:
            chosen.append(needed)
    middle = usual_numbers(graph)
    return [{**middle, **one} for one in chosen]


def with_numbers(joint: fx.GraphModule, numbers: Numbers) -> fx.Graph:
    """A copy of the graph in which every size is a number; nodes keep their names. It is for reading, not running."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def in_place_of(operand: fx.Node) -> Any:
        return _number(operand.meta["val"], numbers) if is_size(operand) else copies[operand]

    for node in joint.graph.nodes:
        if is_size(node) and node.op != "placeholder":
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), in_place_of)
        made = copies[node] = copy.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        if made.name != node.name:
            raise CaptureError(f"{node.name}: a name that torch.fx gives only once; rename that argument")
        for key in ("val", "flops"):
            if key in node.meta:
                made.meta[key] = tree_map(lambda value: _with_numbers(value, numbers), node.meta[key])
    return copy


def numbers_of(graph: fx.Graph, arguments: Sequence[Any]) -> Numbers:
    """What the symbols of a graph's inputs stand for where it is called with these arguments."""
    inputs = zip(graph.find_nodes(op="placeholder"), arguments, strict=True)
    return {expression_of(node.meta["val"]): number for node, number in inputs if is_size(node)}


def call_sizes(graph: fx.Graph) -> Callable[[Sequence[Any]], tuple[int, ...]]:
    """What tells, from the arguments of a call of the graph, the numbers that shape its tensors; () where none vary."""
    shaping = _symbols_in_shapes(graph)
    inputs = enumerate(graph.find_nodes(op="placeholder"))
    places = [place for place, node in inputs if is_size(node) and expression_of(node.meta["val"]) in shaping]
    return lambda arguments: tuple(arguments[place] for place in places)


def at_numbers(sizes: Sequence[Size], numbers: Numbers) -> tuple[int, ...] | None:
    """The sizes with numbers for their symbols; None where a symbol has none."""
    values = [size if isinstance(size, int) else expression_of(size).xreplace(numbers) for size in sizes]
    if any(not isinstance(value, int) and value.free_symbols for value in values):
        return None
    return tuple(map(int, values))


def as_arguments(graph: fx.Graph, sizes: Sequence[Size]) -> list[int | fx.Node]:
    """Sizes to stand among the arguments of a node of the graph: numbers, or nodes that compute them.

    The nodes go where the graph's cursor is.
    """
    symbols = {expression_of(node.meta["val"]): node for node in graph.find_nodes(op="placeholder") if is_size(node)}
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def computed(size: Size) -> int | fx.Node:
        if not isinstance(size, torch.SymInt):
            return size
        expression = expression_of(size)
        known = {symbol: fx.Proxy(symbols[symbol], tracer) for symbol in expression.free_symbols}
        node: fx.Node = sympy_interp(PythonReferenceAnalysis, known, expression).node
        _value_of(node)
        return node

    return [computed(size) for size in sizes]


def _value_of(node: fx.Node) -> Any:
    """The symbolic number a node stands for; those that it is computed from are given theirs as well."""
    if "val" not in node.meta:
        compute: Any = node.target
        node.meta["val"] = compute(*fx.node.map_arg(node.args, _value_of))
    return node.meta["val"]


def expression_of(value: Any) -> Any:
    """What a symbolic number is, of sympy, after all that is guarded."""
    return value.node.shape_env.simplify(value.node.expr)


def _replace(graph: fx.Graph, node: fx.Node, number: float) -> None:
    for user in list(node.users):
        if user.op != "output":
            user.replace_input_with(node, number)  # type: ignore[arg-type]
    if node.op == "call_function" and not node.users:
        graph.erase_node(node)


def _has_bounds(symbol: Any, shape_env: Any) -> bool:
    span = shape_env.var_to_range[symbol]
    return bool(-int_oo < span.lower and span.upper < int_oo)


def _bounds(symbol: Any, shape_env: Any) -> tuple[int, int]:
    span = shape_env.var_to_range[symbol]
    return int(span.lower), int(span.upper)


def _halfway(symbols: Iterable[Any], shape_env: Any) -> dict[Any, int]:
    return {symbol: _middle(symbol, shape_env) for symbol in symbols}


def _middle(symbol: Any, shape_env: Any) -> int:
    if not _has_bounds(symbol, shape_env):
        return int(shape_env.backed_var_to_val[symbol])
    least, most = _bounds(symbol, shape_env)
    return most if is_input_size(symbol, shape_env) else (least + most) // 2


def _symbols_in_shapes(graph: fx.Graph) -> set[Any]:
    tensors = (t for node in graph.nodes for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor))
    return {symbol for tensor in tensors for size in _symbolic(tensor) for symbol in expression_of(size).free_symbols}


def _largest_of_each(graph: fx.Graph) -> Iterator[dict[Any, int]]:
    seen: set[Any] = set()
    for node in graph.nodes:
        for tensor in tree_leaves(node.meta.get("val")):
            if not isinstance(tensor, torch.Tensor):
                continue
            nbytes = tensor.untyped_storage().nbytes()
            if not isinstance(nbytes, torch.SymInt) or (expression := expression_of(nbytes)) in seen:
                continue
            seen.add(expression)
            if expression.free_symbols:
                spans = {s: _bounds(s, nbytes.node.shape_env) for s in sorted(expression.free_symbols, key=str)}
                yield largest_at(expression, spans)


def largest_at(expression: Any, spans: Mapping[Any, tuple[int, int]]) -> dict[Any, int]:
    """The numbers at which an expression is largest, each within its span.

    They are looked for among the ends of the spans, and the answer is proven: by the expression's form, by interval
    arithmetic, or by looking at every number there is.

    Raises:
        CaptureError: it cannot be told.
    """
    corners = [dict(zip(spans, corner, strict=True)) for corner in product(*spans.values())]
    best = max(corners, key=lambda choice: int(expression.xreplace(choice)))
    most = int(expression.xreplace(best))
    if _is_linear_in_each(expression, spans):
        return best
    bound = bound_sympy(expression, {symbol: ValueRanges(*span) for symbol, span in spans.items()}).upper
    if bound == most:
        return best
    if math.prod(most - least + 1 for least, most in spans.values()) > _MOST_LOOKED_AT:
        raise CaptureError(f"it cannot be told how large a storage of {expression} bytes can be")
    every = product(*(range(least, most + 1) for least, most in spans.values()))
    choices = (dict(zip(spans, numbers, strict=True)) for numbers in every)
    return max(choices, key=lambda choice: int(expression.xreplace(choice)))


def _is_linear_in_each(expression: Any, symbols: Iterable[Any]) -> bool:
    """Whether an expression changes by the same amount with each step of a symbol, so that an end is the largest."""
    polynomial = expression.as_poly(*symbols)
    return polynomial is not None and max(polynomial.degree_list()) <= 1


def _number(value: Any, numbers: Numbers) -> Any:
    if not isinstance(value, py_sym_types):
        return value
    return _plain(value, expression_of(value).xreplace(numbers))


def _plain(value: Any, exact: Any) -> float:
    """An exact number as Python has it, of the kind that `value` is."""
    kind = {torch.SymFloat: float, torch.SymBool: bool}.get(type(value), int)
    return kind(exact)


def _with_numbers(value: Any, numbers: Numbers) -> Any:
    if not isinstance(value, torch.Tensor) or not _varies(value):
        return _number(value, numbers)
    shape, strides = ([_number(size, numbers) for size in sizes] for sizes in (value.shape, value.stride()))
    storage_elems = _number(value.untyped_storage().nbytes(), numbers) // value.element_size()
    with value.fake_mode:  # type: ignore[attr-defined]
        whole = torch.empty(storage_elems, dtype=value.dtype, device=value.device)
        return whole.as_strided(shape, strides, _number(value.storage_offset(), numbers))


def _settled(value: Any) -> Any:
    """A tensor whose symbolic sizes all have one number only, with those numbers; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not _varies(value):
        return value
    return value if any(expression_of(size).free_symbols for size in _symbolic(value)) else _with_numbers(value, {})


def _varies(value: torch.Tensor) -> bool:
    return any(True for _ in _symbolic(value))


def _symbolic(value: torch.Tensor) -> Iterator[torch.SymInt]:
    every = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    yield from (size for size in every if isinstance(size, torch.SymInt))
