"""cuDNN's search for the fastest convolution kernel happens before the steps that are metered.

With `torch.backends.cudnn.benchmark` PyTorch tries all of cuDNN's kernels the first time that a thread runs a
convolution, with workspaces as large as these ask for. A step runs convolutions on two threads, the one that calls the
model and autograd's; and where the times of ops come from the cache of an earlier run, none has run at all.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial

import torch
from torch import fx

from shoal.cost.measurement_cache import describe
from shoal.cost.random_operands import OperandFactory
from shoal.graph.op_counts import target_name
from shoal.lowlevel.backward_thread import on_backward_thread

_selected: set[tuple[int, str, str]] = set()  # by thread, settings and signature


def select_kernels(nodes: Mapping[str, fx.Node], device: torch.device) -> None:
    """Run each convolution once on both threads of a step that is called from here, if cuDNN would search there.

    Call it within `isolated`.

    Args:
        nodes: signature → a node of that signature, as for `shoal.cost.profile.profile`.
        device: where they run; nothing is done on any but a CUDA device.
    """
    cudnn = torch.backends.cudnn
    if device.type != "cuda" or not (cudnn.enabled and cudnn.benchmark):
        return
    convolutions = {key: node for key, node in nodes.items() if "convolution" in target_name(node.target)}
    run = partial(_run_each, convolutions, device, str(describe(device)))
    run()
    on_backward_thread(device, run)


def _run_each(nodes: Mapping[str, fx.Node], device: torch.device, settings: str) -> None:
    operands = OperandFactory(device)
    for key, node in nodes.items():
        found = (threading.get_ident(), settings, key)
        if found in _selected:
            continue
        _selected.add(found)
        args, kwargs = operands.arguments(node)
        node.target(*args, **kwargs)  # type: ignore[operator]
