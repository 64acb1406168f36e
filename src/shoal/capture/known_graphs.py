"""Graphs that Dynamo captures again, each equal to one that it captured before.

A list or a dict that grows in forward, or a string that changes there, fails Dynamo's guards in every call, though the
step stays the same. What was compiled the first time is used again then: tracing takes a fraction of what AOTAutograd
and planning take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shoal.lowlevel.dynamo_state import guards_of_inputs, settings_of_pytorch

Compiled = Callable[..., Any]


class KnownGraphs:
    """What the graphs of one model's calls were compiled to.

    Attributes:
        reused: how often that was used again.
    """

    def __init__(self) -> None:
        self.reused = 0
        self._known: dict[object, list[tuple[Any, list[Any], Compiled]]] = {}

    def compiled(
        self, gm: fx.GraphModule, inputs: Sequence[Any], backend: Callable[[fx.GraphModule, Sequence[Any]], Compiled]
    ) -> Compiled:
        """What `backend` makes of a graph of Dynamo's, or made of an equal one under equal settings of PyTorch."""
        key, guards = _key(gm, inputs), guards_of_inputs()
        for settings, theirs, known in self._known.get(key, ()):
            if settings.check():
                guards.extend(theirs)
                self.reused += 1
                return known
        made = backend(gm, inputs)
        if key is not None:
            self._known.setdefault(key, []).append((settings_of_pytorch(), list(guards), made))
        return made


def _key(gm: fx.GraphModule, inputs: Sequence[Any]) -> object:
    """All of a graph and its inputs that what is compiled depends on; None if sizes or numbers are symbols."""
    nodes: list[Any] = []
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat | torch.SymBool):
            return None
        if node.op == "get_attr":
            return None  # a constant, or the graph of a higher-order op
        source = getattr(node.meta.get("grapharg"), "source", None)
        operands = fx.node.map_arg((node.args, node.kwargs), lambda one: one.name)
        nodes.append((node.op, node.target, node.name, repr(operands), source and source.name))
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if len(tensors) != len(inputs) or any(type(one) not in (torch.Tensor, torch.nn.Parameter) for one in tensors):
        return None
    storages = [one.untyped_storage()._cdata for one in tensors]
    shared = tuple(storages.index(one) for one in storages)
    return tuple(nodes), tuple(map(_kind, tensors)), shared


def _kind(x: torch.Tensor) -> object:
    layout = (x.shape, x.stride(), x.storage_offset()) if x.layout is torch.strided else (x.shape,)
    flags = x.requires_grad, x.is_leaf, x.is_conj(), x.is_neg(), x.is_inference()
    return type(x), x.dtype, x.device, x.layout, layout, flags
