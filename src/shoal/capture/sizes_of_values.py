"""Sizes and numbers that are unknown before a graph runs, so that no plan can count bytes or make a step of them.

Dynamo captures as one graph:

- what a boolean mask selects, whose size depends on the mask's values;
- the number that `item()` returns. As a factor or a term of tensors PyTorch takes a tensor in its place;
- where `torch._dynamo.config.allow_rnn` is set, an LSTM. On the CPU it keeps as much for its gradient as oneDNN likes,
  which is traced as nothing.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from shoal.capture.dynamo import GraphBreak
from shoal.capture.failed_traces import place_in
from shoal.errors import CaptureError
from shoal.graph.fx_nodes import tensors_of

_ARITHMETIC = (operator.mul, operator.add, operator.sub, operator.truediv, operator.neg, operator.abs)


def break_at_unknown_sizes(gm: fx.GraphModule) -> None:
    """Take a graph of Dynamo's for broken at the line that makes the first tensor of such a size, or such a number.

    Raises:
        GraphBreak: there is one.
        CaptureError: an input is a nested tensor, which has such a size in each batch.
    """
    for node in gm.graph.nodes:
        if node.op == "placeholder" and getattr(node.meta.get("example_value"), "is_nested", False):
            raise CaptureError(
                "the model was given a nested tensor, whose sizes no plan can bound; give x.to_padded_tensor(0.0) and "
                "a mask, or x.values() and x.offsets()"
            )
        if reason := _unknown(node):
            raise GraphBreak(reason, place_in(node.stack_trace or ""))


def break_at_unknown_gradients(joint: fx.Graph) -> None:
    """Take a model for broken where its gradients have such a size, or a view begins where a tensor says.

    Raises:
        GraphBreak: there is one.
    """
    for node in joint.nodes:
        tensors = tensors_of(node)
        if any(map(free_unbacked_symbols, tensors)):
            is_view = all(not free_unbacked_symbols(v.shape) for v in tensors)
            what = "where a view begins" if is_view else "a gradient's size"
            raise GraphBreak(f"{what} depends on a tensor's values", place_in(node.stack_trace or ""))


def _unknown(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
        return "a tensor's size depends on another one's values"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and free_unbacked_symbols(value):
        is_operand = node.target in ("item", *_ARITHMETIC) and all(user.target in _ARITHMETIC for user in node.users)
        return "" if is_operand and isinstance(value, torch.SymFloat) else "a number depends on a tensor's values"
    if node.target is torch.lstm and any(one.device.type == "cpu" for one in tree_leaves(value)):
        return "PyTorch does not tell how much memory an LSTM keeps for its gradient on the CPU"
    return ""
