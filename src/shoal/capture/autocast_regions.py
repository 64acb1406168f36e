"""Under which autocast each op of a graph of Dynamo's runs, where the model's code enters and leaves it.

Dynamo records `with torch.autocast(...):` as two calls around what stands in it. A rewritten graph has its ops
elsewhere: there each op says by itself what it runs under.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

Autocasts = tuple[tuple[Any, ...], ...]  # arguments of `torch.autocast`, the outermost first

_ENTER, _LEAVE = "_enter_autocast", "_exit_autocast"
# These compute the same under any autocast.
_UNAFFECTED = {
    *("getitem", "getattr", "size", "shape", "dim", "numel", "to", "type", "float", "half", "bfloat16", "contiguous"),
    *("add", "sub", "mul", "truediv", "add_", "iadd", "isub", "imul", "itruediv", "relu", "leaky_relu"),
    *("clone", "detach", "view", "reshape", "flatten", "unsqueeze", "squeeze", "permute", "transpose", "unbind"),
}


def autocasts_of(graph: fx.Graph) -> dict[fx.Node, Autocasts]:
    """What each node runs under in addition to what the caller has entered; the calls that enter and leave it are left
    out."""
    entered: dict[fx.Node, tuple[Any, ...]] = {}
    found = {}
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == _ENTER:
            entered[node] = node.args
        elif name == _LEAVE:
            entered.pop(node.args[0])
        else:
            found[node] = tuple(entered.values())
    return found


def most_frequent(all_of: Iterable[Autocasts]) -> Autocasts:
    """What most run under, of as many the first; nothing where there are none."""
    counted = Counter(all_of)
    return max(counted, key=counted.__getitem__, default=())


def is_affected(node: fx.Node) -> bool:
    """Whether autocast may change what a node computes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method", "call_module") and name not in _UNAFFECTED


@contextmanager
def under(autocasts: Autocasts) -> Iterator[None]:
    """Within it ops run under these, entered in turn."""
    with ExitStack() as stack:
        for device, dtype, enabled, cached in autocasts:
            stack.enter_context(torch.autocast(device, dtype, enabled, cached))
        yield


@dataclass(frozen=True)
class Under:
    """A function or a method that runs under autocasts of its own.

    Attributes:
        autocasts: in addition to those of the graph's caller.
        target: a function, or the name of a method.
    """

    autocasts: Autocasts
    target: Callable[..., Any] | str

    __name__ = "under_autocast"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with under(self.autocasts):
            if isinstance(self.target, str):
                return getattr(args[0], self.target)(*args[1:], **kwargs)
            return self.target(*args, **kwargs)


class InterpreterUnder(fx.Interpreter):
    """Runs a graph whose ops are under autocasts, but those that have their own.

    Args:
        module: with the graph.
        autocasts: of every other op.
    """

    def __init__(self, module: fx.GraphModule, autocasts: Autocasts) -> None:
        super().__init__(module)
        self._autocasts = autocasts

    def run_node(self, n: fx.Node) -> Any:
        """One op."""
        if isinstance(n.target, Under) or not self._autocasts:
            return super().run_node(n)
        with under(self._autocasts):
            return super().run_node(n)


def run_under(node: fx.Node, autocasts: Autocasts, value_of: Mapping[fx.Node, fx.Node], graph: fx.Graph) -> fx.Node:
    """A copy of a node in another graph, that runs under autocasts of its own."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of.__getitem__)
    copy = graph.create_node("call_function", Under(autocasts, node.target), args, kwargs, node.name)
    copy.meta = dict(node.meta)
    return copy
