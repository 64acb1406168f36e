"""Dropout with the bits of eager PyTorch: a mask of 1 byte an element on the CPU, noise in the layout of its input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import args_of
from shoal.graph.joint import Joint
from shoal.kernels.dropout import dropout, dropout_backward, noise_like

_aten = torch.ops.aten
_PRESERVED = (None, torch.preserve_format)


def dropouts(joint: Joint) -> Iterator[fx.Node]:
    """Dropouts on the CPU, for which eager PyTorch saves noise of 4 bytes."""
    for node in joint.find(_aten.native_dropout.default) if joint.runs_here else ():
        x, _, train = args_of(node)
        if train and x.meta["val"].device.type == "cpu":
            yield node


def keep_bits(joint: Joint, node: fx.Node) -> None:
    """Draw as eager PyTorch does, and save a mask."""
    x, p, _ = args_of(node)
    node.target, node.args = dropout, (x, p)
    for item in node.users:
        for reader in list(item.users) if item.args[1] == 1 else ():
            if reader.target is _aten.native_dropout_backward.default:
                reader.target, reader.args = dropout_backward, (reader.args[0], item, p)


def noises(joint: Joint) -> Iterator[tuple[fx.Node, Any, tuple[Any, ...]]]:
    """The noise of in-place dropouts, which eager PyTorch draws in the layout of their inputs."""
    for node in joint.find(_aten.bernoulli.p):
        empty, value = args_of(node)[0], node.meta["val"]
        if empty.target is not _aten.empty_like.default or empty.kwargs.get("memory_format") not in _PRESERVED:
            continue
        like, p = empty.args[0], node.args[1] if len(node.args) > 1 else 0.5
        if like.meta["val"].device == value.device and not node.kwargs:
            yield node, noise_like, (like, p, value.dtype)


def draw_in_layout(joint: Joint, site: tuple[fx.Node, Any, tuple[Any, ...]]) -> None:
    """Draw without the tensor that was allocated for it."""
    node, target, arguments = site
    empty = node.args[0]
    node.target, node.args = target, arguments
    joint.erase_unread(empty)
