"""What `fuse_batchnorm` knows of a traced network's ops: which are convolutions, batch norms, ReLUs, sums, joins."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from shoal.lowlevel.torch_state import has_hooks
from shoal.transforms.fuse.fused_layers import zero_padding
from shoal.transforms.stand_in import StandIn
from shoal.transforms.writes import Writes

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RELUS = (F.relu, F.relu_, torch.relu, torch.relu_)
_SUMS = (operator.add, operator.iadd, torch.add)
_JOINS = (torch.cat, torch.concat, torch.concatenate)


class Tracer(fx.Tracer):
    """Enters no module with hooks, and none that a transform returned: they stay, with all that is in them."""

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        known = isinstance(module, (_ConvNd, _NormBase, StandIn))
        return known or has_hooks(module) or super().is_leaf_module(module, qualified_name)


class Ops:
    """Tells the nodes of one traced network apart."""

    def __init__(self, modules: Mapping[str, nn.Module], graph: fx.Graph) -> None:
        self.modules, self.writes = modules, Writes(graph, modules)

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that the node calls."""
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def convolution(self, node: fx.Node) -> _ConvNd | None:
        """The layer, where the node is a convolution that can be fused."""
        layer = self.module(node)
        if type(layer) not in _CONVOLUTIONS or not isinstance(layer, _ConvNd) or has_hooks(layer):
            return None
        if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
            return None
        try:
            zero_padding(layer)
        except ValueError:
            return None
        return layer

    def batch_norm(self, node: fx.Node) -> _BatchNorm | None:
        """The layer, where the node is a batch norm that can be fused."""
        layer = self.module(node)
        if isinstance(layer, _BatchNorm) and refusal(layer) == "" and len(node.args) == 1 and not node.kwargs:
            return layer
        return None

    def relu(self, node: fx.Node) -> fx.Node | None:
        """The operand of the node, where it is a ReLU and nothing else notices if it writes over its operand."""
        layer = self.module(node)
        called = node.op == "call_function" and node.target in _RELUS
        called |= node.op == "call_method" and node.target in ("relu", "relu_")
        called |= type(layer) is nn.ReLU and not has_hooks(layer)
        source = node.args[0] if called and node.args else None
        return source if isinstance(source, fx.Node) and self.writes.can_read_instead(source, node) else None

    def addends(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """The two tensors that the node adds, where nothing else notices if it writes over one."""
        called = node.op == "call_function" and node.target in _SUMS
        called |= node.op == "call_method" and node.target in ("add", "add_")
        if not called or len(node.args) != 2 or node.kwargs:
            return None
        left, right = node.args
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or left is right:
            return None
        return (left, right) if all(self.writes.can_read_instead(one, node) for one in (left, right)) else None

    def parts(self, node: fx.Node) -> list[fx.Node] | None:
        """The tensors that the node joins along channels, where none is written over later."""
        if node.op != "call_function" or node.target not in _JOINS:
            return None
        tensors: Any = node.args[0] if node.args else node.kwargs.get("tensors")
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
        if dim != 1 or not isinstance(tensors, Sequence) or not tensors or "out" in node.kwargs:
            return None
        found: list[fx.Node] = []
        for part in tensors:
            if not isinstance(part, fx.Node):
                return None
            inner = self.parts(part)
            if inner is None and self.writes.over(part) is not None:
                return None
            found += [part] if inner is None else inner
        return found


def refusal(layer: _BatchNorm) -> str:
    """Why a batch norm cannot be fused wherever it stands; empty where it can."""
    if isinstance(layer, SyncBatchNorm):
        return "its statistics are those of all processes, and meet between the two halves"
    if has_hooks(layer):
        return "it has hooks, which would see nothing"
    if type(layer) not in _BATCH_NORMS:
        return f"it is a {type(layer).__name__}, whose forward may do more than a batch norm's"
    return ""
