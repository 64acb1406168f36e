"""Where the size of a tensor depends on the values of another one, as of what a boolean mask selects.

Dynamo captures that as one graph, with a size that nobody knows before the graph runs. No plan can count its bytes.
"""

from __future__ import annotations

import re

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from shoal.capture.dynamo import GraphBreak

_FRAME = re.compile(r'File "(.+?)", line (\d+), in .+\n\s*(.+)')


def break_at_unknown_sizes(gm: fx.GraphModule) -> None:
    """Take a graph of Dynamo's for broken at the line that makes the first tensor of such a size.

    Raises:
        GraphBreak: there is one.
    """
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
            frames = _FRAME.findall(node.stack_trace or "")
            theirs = [frame for frame in frames if "/torch/" not in frame[0]] or frames  # else a layer of PyTorch's own
            place = f"{theirs[-1][0]}:{theirs[-1][1]} ({theirs[-1][2].strip()})" if theirs else "an unknown line"
            raise GraphBreak("a tensor's size depends on another one's values", place)
