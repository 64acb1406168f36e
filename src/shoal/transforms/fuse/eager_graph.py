"""A traced network's graph that calls its layers without `nn.Module.__call__`, for eager mode.

Each call of a module by its path looks the path up part by part and asks after hooks, which shows where layers are
small. Modules with hooks are called as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import fx, nn

from shoal.lowlevel.torch_state import compiled_call, has_hooks


class EagerGraph:
    """Runs a graph module; made again wherever that is copied or loaded, since it holds the modules themselves.

    >>> import torch
    >>> EagerGraph()(fx.symbolic_trace(nn.Sequential(nn.ReLU())))(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def __init__(self) -> None:
        self._run: Callable[..., Any] | None = None

    def __call__(self, module: fx.GraphModule) -> Callable[..., Any]:
        """The forward pass of `module`, always the same one."""
        if self._run is None:
            self._run = _calling_forward(module)
        return self._run

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def _calling_forward(module: fx.GraphModule) -> Callable[..., Any]:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if called is None or has_hooks(called) or compiled_call(called) is not None:
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(_forward_of(called), node.args, node.kwargs))
        graph.erase_node(node)
    return fx.GraphModule(module, graph).forward


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """A function of ours: for a method of torch, torch.fx would look in torch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module.forward(*args, **kwargs)

    return call
