"""Values of buffers, known to Dynamo where a model's Python code depends on them.

Some models keep a number of theirs in a buffer, such as a kernel's size, and branch on it or pad by it. Dynamo breaks
the graph at each, in a loop leaves the rest of the function out of all graphs, or takes a size for unknown. Within
`knowing_buffers` it computes what is asked for with the buffers' values and goes on with a number; the captured graph
is guarded by the values that it depends on. A buffer that no Python code depends on is an input as before.

PyTorch does not guarantee these names; 2.12, 2.13 and 2.15 have them. `tests/lowlevel/test_buffer_values.py` runs them.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import symbolic_convert, utils
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.guards import GuardBuilder, _get_closure_vars, install_guard
from torch._dynamo.source import CallMethodItemSource, is_from_unspecialized_param_buffer_source
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shoal.lowlevel.asked import Asked

_dynamo: Any = utils
_MOST_VALUES = 4  # each is a capture and a plan, which take seconds: one that has had more is taken for a counter
_KINDS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_JUMPS = [  # of opcodes that translators have a place for
    code
    for name, code in dis.opmap.items()
    if "JUMP_" in name and ("_IF_TRUE" in name or "_IF_FALSE" in name) and code < 256
]
_asked = Asked("knowing_buffers")
Number = int | float

_values: weakref.WeakKeyDictionary[nn.Module, dict[str, set[int]]] = weakref.WeakKeyDictionary()


class _Unknown(Exception):
    """The value depends on more than buffers that stay as they are."""


@contextmanager
def knowing_buffers() -> Iterator[None]:
    """Around a call that Dynamo may capture: the numbers that it reads out of buffers are known.

    That holds for buffers on the CPU without dimensions, of integers or booleans, that the captured code has not
    changed. A buffer with more than a few values in the life of its module, as a counter has, is unknown from then on,
    as is one that the same code changes later.
    """
    _let_dynamo_ask()
    with _asked.within():
        yield


@cache
def _let_dynamo_ask() -> None:
    """From here on, in this process; without effect outside of `knowing_buffers`."""
    variable: Any = TensorVariable
    methods = getattr(variable, "tp_methods", {})  # which has `item` in 2.15
    if "item" in methods:
        methods["item"] = type(methods["item"])(_known_item(methods["item"].handler))
    else:
        variable.method_item = _known_item(variable.method_item)
    _dynamo.run_node = _reading_numbers(_dynamo.run_node)
    _dynamo._get_fake_value_impl = _noticing_changes(_dynamo._get_fake_value_impl)
    for translator in _with_subclasses(symbolic_convert.InstructionTranslatorBase):
        table = translator.dispatch_table
        for place in _JUMPS:
            table[place] = _known_jump(table[place])


def _with_subclasses(kind: Any) -> list[Any]:
    return [kind, *(one for derived in kind.__subclasses__() for one in _with_subclasses(derived))]


def _known_item(item: Callable[..., Any]) -> Callable[..., Any]:
    def method_item(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        number = None if args or kwargs else _number_of(variable, tx.output)
        return item(variable, tx, *args, **kwargs) if number is None else ConstantVariable.create(number)

    return method_item


def _known_jump(jump: Callable[..., Any]) -> Callable[..., Any]:
    def jump_if(tx: Any, instruction: Any) -> None:
        condition = tx.stack[-1]
        if isinstance(condition, LazyVariableTracker) and (
            condition.is_realized() or isinstance(condition.peek_value(), torch.Tensor)
        ):
            condition = condition.realize()
        number = _number_of(condition, tx.output)
        if number is not None:
            tx.stack[-1] = ConstantVariable.create(bool(number))
        jump(tx, instruction)

    return jump_if


def _reading_numbers(run_node: Callable[..., Any]) -> Callable[..., Any]:
    def run(output: Any, node: fx.Node, args: Any, kwargs: Any, module: Any) -> Any:
        if not _asked or not _is_call(node) or not any(map(_may_be_known, node.all_input_nodes)):
            return run_node(output, node, args, kwargs, module)
        with _Reading(node, output) as reading:
            result = run_node(output, node, args, kwargs, module)
        numbers = reading.numbers
        if numbers and isinstance(result, Number):  # it only reads, as NumPy's `item` does
            node.op, node.target, node.args, node.kwargs = "call_function", type(result), (result,), {}
        elif numbers:  # what the op takes as a number, as a size to pad to, is one in the graph, too
            node.args = fx.map_arg(node.args, lambda operand: numbers.get(operand, operand))
            node.kwargs = fx.map_arg(node.kwargs, lambda operand: numbers.get(operand, operand))
        return result

    return run


def _noticing_changes(fake_value: Callable[..., Any]) -> Callable[..., Any]:
    def value(node: fx.Node, tx: Any, *args: Any, **kwargs: Any) -> Any:
        result = fake_value(node, tx, *args, **kwargs)
        for buffer in node.all_input_nodes:
            if (told := buffer.meta.get("shoal_told")) is not None and not _is_unchanged(buffer):
                told.update(range(_MOST_VALUES + 1))
                raise UnspecializeRestartAnalysis(
                    restart_reason="a buffer changes after code has depended on its value"
                )
        return result

    return value


class _Reading(TorchDispatchMode):
    """Answers with known values where an op reads a tensor as a number, and notes which it has read."""

    supports_higher_order_operators = True

    def __init__(self, node: fx.Node, output: Any) -> None:
        super().__init__()
        self.operands = {id(n.meta["example_value"]): n for n in node.all_input_nodes if _may_be_known(n)}
        self.output = output
        self.numbers: dict[fx.Node, Number] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and (node := self.operands.get(id(args[0]))) is not None:
            number = _known(node, self.output)
            if number is not None:
                self.numbers[node] = number
                return number
        return func(*args, **(kwargs or {}))


class _Repeatable(TorchDispatchMode):
    """Ops with the same result each time, which change nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise _Unknown
        return func(*args, **(kwargs or {}))


def _number_of(variable: Any, output: Any) -> Number | None:
    if type(variable) is not TensorVariable or not _asked:
        return None
    node = variable.as_proxy().node
    return _known(node, output) if _may_be_known(node) else None


def _is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and not _is_graph(node)


def _is_graph(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _may_be_known(node: fx.Node) -> bool:
    value: Any = node.meta.get("example_value")
    is_one = isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"
    return is_one and not value.requires_grad


def _known(node: fx.Node, output: Any) -> Number | None:
    """The value of a node of Dynamo's graph, which is guarded by the buffers' values and sizes that it is made of."""
    computation = _Computation(output)
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), _Repeatable():
            number: Number = computation.value_of(node).item()
            buffers = {one: int(value) for one, value in computation.done.items() if "grapharg" in one.meta}
        until_now = {one: _values_until_now(one, output) for one in buffers}
    except _Unknown:
        return None
    if any(len(until_now[one] | {value}) > _MOST_VALUES for one, value in buffers.items()):
        return None
    for one, value in buffers.items():
        until_now[one].add(value)
        one.meta["shoal_told"] = until_now[one]
        install_guard(CallMethodItemSource(one.meta["grapharg"].source).make_guard(GuardBuilder.EQUALS_MATCH))
    for size in computation.sizes:
        int(size)  # is guarded from here on
    return number


class _Computation:
    """Runs what a value is made of once more, with the buffers themselves."""

    def __init__(self, output: Any) -> None:
        # What an input of a graph within a graph, as of a region under torch.utils.checkpoint, is outside of it.
        self.outside: dict[fx.Node, fx.Node] = {
            inside.node: given.node for tracer in output.tracers for given, inside in tracer.lifted_freevars.items()
        }
        self.done: dict[fx.Node, torch.Tensor] = {}
        self.sizes: list[torch.SymInt] = []

    def value_of(self, node: fx.Node) -> Any:
        traced: Any = node.meta.get("example_value")
        if isinstance(traced, torch.SymInt) and traced.node.has_hint():
            self.sizes.append(traced)
            return traced.node.hint
        if node not in self.done:
            if not _may_be_known(node) or not _is_unchanged(node):
                raise _Unknown
            value = self._compute(node)
            if type(value) is not torch.Tensor or value.dim() or value.dtype != traced.dtype:
                raise _Unknown
            self.done[node] = value
        return self.done[node]

    def _compute(self, node: fx.Node) -> Any:
        if node in self.outside:
            return self.value_of(self.outside[node])
        if node.op == "placeholder":
            return _buffer(node)
        if not _is_call(node):
            raise _Unknown
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.value_of)
        call: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target))
        try:
            return call(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError):  # eager code raises it where the model comes to that
            raise _Unknown from None


def _buffer(node: fx.Node) -> torch.Tensor:
    given: Any = node.meta.get("grapharg")
    source = None if given is None else given.source
    if source is None or not is_from_unspecialized_param_buffer_source(source):
        raise _Unknown
    value = given.example
    if type(value) is not torch.Tensor or value.dtype not in _KINDS:
        raise _Unknown
    storage = _storage_of(node.meta["example_value"])
    for other in node.graph.find_nodes(op="placeholder"):  # of which it is a view, say
        if other is not node and storage in map(_storage_of, tree_leaves(other.meta.get("example_value"))):
            raise _Unknown
    return value


def _is_unchanged(node: fx.Node) -> bool:
    """Whether the graph has not written into a node's value until now, nor into one of the same storage."""
    storage, checked, pending = _storage_of(node.meta["example_value"]), {node}, [node]
    while pending:
        one = pending.pop()
        for value in tree_leaves(one.meta.get("example_value")):
            if _storage_of(value) == storage:
                if value._version or any(map(_is_in_place, one.users)):
                    return False
                pending += one.users.keys() - checked
                checked |= one.users.keys()
    return True


def _is_in_place(node: fx.Node) -> bool:
    """Whether it may write into its operands, by its name: the version does not count `tensor.data = value`."""
    return _is_graph(node) or str(getattr(node.target, "__name__", node.target)).endswith("_")


def _storage_of(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _values_until_now(node: fx.Node, output: Any) -> set[int]:
    """The values that captures have depended on of the buffer that an input is."""
    scope = {**_get_closure_vars(), "G": output.root_tx.f_globals, "L": output.root_tx.f_locals}
    owner = source = node.meta["grapharg"].source
    while not isinstance(module := owner.get_value(scope, {}, {}), nn.Module):
        if (owner := getattr(owner, "base", None)) is None:
            raise _Unknown
    return _values.setdefault(module, {}).setdefault(source.name.removeprefix(owner.name), set())
