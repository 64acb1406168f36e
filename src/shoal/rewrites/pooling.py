"""Max pooling whose indices wait in 1 byte, the place within the window, instead of 8, and whose input is not saved.

The codes also say where a ReLU before the pooling lets no gradient through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from shoal.codecs import pool_index
from shoal.graph.fx_nodes import args_of, per_axis
from shoal.graph.joint import Joint
from shoal.graph.symbolic_sizes import as_arguments
from shoal.kernels.memory_format import channels_last_format, suggested_memory_format
from shoal.kernels.pooling import backward as pool_backward
from shoal.kernels.pooling import forward as pool_forward

_aten = torch.ops.aten
_BACKWARDS = {_aten.max_pool2d_with_indices_backward.default: 2, _aten.max_pool3d_with_indices_backward.default: 3}


def pools(joint: Joint) -> Iterator[fx.Node]:
    """Backward ops of max poolings in windows that a byte can count."""
    for node in list(joint.graph.nodes):
        if node.target in _BACKWARDS:
            dims = _BACKWARDS[node.target]
            _, pool_input, kernel, *_, indices = args_of(node)
            fits = pool_index.fits(per_axis(kernel, dims)) and pool_input.meta["val"].dim() == dims + 2
            alike = all(one.target is node.target and one.args[1:] == node.args[1:] for one in indices.users)
            if fits and alike and indices.args[0] not in joint.backward:
                yield node


def encode_pool(joint: Joint, node: fx.Node) -> None:
    """Let the pooling and its backward ops pass codes."""
    _, pool_input, *window, indices = args_of(node)
    pool, readers = indices.args[0], list(indices.users)  # several where poolings alike have become one
    kernel, stride, padding, dilation = (per_axis(size, _BACKWARDS[node.target]) for size in window[:4])  # type: ignore[index]
    value = pool_input.meta["val"]
    pooled, places = pool.meta["val"]
    pool.target, pool.args = pool_forward, (pool_input, kernel, stride or kernel, padding, dilation, bool(window[4]))
    codes_value = places.new_empty_strided(places.shape, places.stride(), dtype=torch.uint8)
    pool.meta["val"] = (pooled, codes_value)
    indices.meta["val"] = codes_value
    channels_last = _is_channels_last(value)
    for reader in readers:
        with joint.graph.inserting_before(reader):
            shape = as_arguments(joint.graph, value.shape)
        reader.target = pool_backward
        reader.args = (args_of(reader)[0], indices, shape, channels_last, *pool.args[1:])
    # A dilated window may lie in the padding altogether: its index is then of no maximum.
    alone = len(readers) == 1 and all(step == 1 for step in dilation)
    rectified = alone and _take_in_rectifier(joint, node, pool_input)
    for each in (pool, *readers):
        each.args = (*each.args, rectified)


def _is_channels_last(value: torch.Tensor) -> bool:
    """Whether pooling's backward kernel takes its input, of this layout, for channels_last."""
    if any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):  # asked, they would be settled
        layout = channels_last_format(value.dim())
        return value.is_contiguous(memory_format=layout) and not value.is_contiguous()
    return suggested_memory_format(value) is not torch.contiguous_format


def _take_in_rectifier(joint: Joint, unfolded: fx.Node, output: fx.Node) -> bool:
    if len(unfolded.users) != 1 or output.target is not _aten.relu.default:
        return False
    (node,) = unfolded.users
    if node.target is not _aten.threshold_backward.default:
        return False
    arguments: Any = node.args
    if arguments[1:] != (output, 0) or unfolded.meta["val"].stride() != node.meta["val"].stride():
        return False
    joint.replace(node, unfolded)
    return True
