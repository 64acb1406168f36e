"""Batch norm with `momentum=None`, whose running statistics are the mean over all batches, in a captured graph.

PyTorch's layer reads its counter of batches into a Python number, where Dynamo ends its graph: at every batch norm of a
model, once weights are averaged (`torch.optim.swa_utils.update_bn`, Lightning's callback StochasticWeightAveraging).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.kernels.batch_norm_vectors import cumulative_statistics

_plain_forward = _BatchNorm.forward
_admitted = False


def admit_cumulative_norms(model: nn.Module) -> bool:
    """Let `cumulative_norms` take effect if the model has such a layer: others are captured sooner without.

    Returns:
        Whether it had no effect before and has from here on, in this process.
    """
    global _admitted
    if _admitted or not any(isinstance(m, _BatchNorm) and m.momentum is None for m in model.modules()):
        return False
    _admitted = True
    return True


@contextmanager
def cumulative_norms() -> Iterator[None]:
    """Around a call that Dynamo may capture: layers with `momentum=None` come into its graph with their bits.

    Without effect until `admit_cumulative_norms` found one.
    """
    if not _admitted:
        yield
        return
    before = _BatchNorm.forward
    _BatchNorm.forward = _forward  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = before  # type: ignore[method-assign]


def _forward(layer: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    if layer.momentum is not None or not layer.training or not torch.compiler.is_compiling():
        return _plain_forward(layer, x)
    mean, var, batches = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if not layer.track_running_stats or mean is None or var is None or batches is None:
        return _plain_forward(layer, x)
    layer._check_input_dim(x)
    batches.add_(1)
    # The batch is normalised by its own statistics; those given move by nothing, and are no one's.
    result = F.batch_norm(x, mean.clone(), var.clone(), layer.weight, layer.bias, True, 0.0, layer.eps)
    new_mean, new_var = cumulative_statistics(x.detach(), mean, var, batches)
    mean.copy_(new_mean)
    var.copy_(new_var)
    return result
