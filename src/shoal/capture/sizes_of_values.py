"""Tensors whose size nobody knows before a graph runs, so that no plan can count their bytes.

The size of what a boolean mask selects depends on the mask's values; Dynamo captures that as one graph. What an LSTM on
the CPU keeps for its gradient is as large as oneDNN likes, and traced as nothing; Dynamo captures LSTMs where
`torch._dynamo.config.allow_rnn` is set.
"""

from __future__ import annotations

import re

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from shoal.capture.dynamo import GraphBreak

_FRAME = re.compile(r'File "(.+?)", line (\d+), in .+\n\s*(.+)')


def break_at_unknown_sizes(gm: fx.GraphModule) -> None:
    """Take a graph of Dynamo's for broken at the line that makes the first tensor of such a size.

    Raises:
        GraphBreak: there is one.
    """
    for node in gm.graph.nodes:
        if reason := _unknown(node):
            frames = _FRAME.findall(node.stack_trace or "")
            theirs = [frame for frame in frames if "/torch/" not in frame[0]] or frames  # else a layer of PyTorch's own
            place = f"{theirs[-1][0]}:{theirs[-1][1]} ({theirs[-1][2].strip()})" if theirs else "an unknown line"
            raise GraphBreak(reason, place)


def _unknown(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
        return "a tensor's size depends on another one's values"
    if node.target is torch.lstm and any(one.device.type == "cpu" for one in tree_leaves(value)):
        return "PyTorch does not tell how much memory an LSTM keeps for its gradient on the CPU"
    return ""
