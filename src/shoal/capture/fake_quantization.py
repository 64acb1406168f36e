"""Quantization-aware training, as by `torch.ao.quantization.prepare_qat`, in a captured graph.

Dynamo traces nothing of `torch.ao.quantization`: it would break the graph at every layer. Observers that branch on the
values of tensors, as those of `FakeQuantize`, still break it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables import UserFunctionVariable


def admit_fake_quantization(model: nn.Module) -> list[Any]:
    """Let Dynamo trace fake quantization, in this process, if the model has it, and give its observers their sizes.

    In eager mode the first call of an observer with a range for each channel gives its buffers one value for each; in a
    graph, buffers keep their sizes.

    Returns:
        The modules whose buffers have got other sizes.
    """
    fake_quantize: Any = sys.modules.get("torch.ao.quantization.fake_quantize")
    quantize: Any = sys.modules.get("torch.ao.quantization.quantize")
    if fake_quantize is None or quantize is None:
        return []  # no module can be of these classes
    kind = fake_quantize.FusedMovingAvgObsFakeQuantize
    if not any(isinstance(module, kind) for module in model.modules()):
        return []
    _trace(kind.forward, quantize._observer_forward_hook, quantize._observer_forward_pre_hook)
    sized = []
    for module in model.modules():
        quantizer, weight = getattr(module, "weight_fake_quant", None), getattr(module, "weight", None)
        if isinstance(quantizer, kind) and isinstance(weight, torch.Tensor) and _has_no_sizes(quantizer):
            _give_sizes(quantizer, weight.shape[quantizer.ch_axis])
            sized.append(quantizer)
    return sized


@contextmanager
def tracing_fake_quantization(model: nn.Module) -> Iterator[None]:
    """Around a capture after which the model is as it was."""
    sized = admit_fake_quantization(model)
    try:
        yield
    finally:
        for quantizer in sized:
            _give_sizes(quantizer, 0)


def _has_no_sizes(quantizer: Any) -> bool:
    return bool(quantizer.is_per_channel) and quantizer.activation_post_process.min_val.numel() == 0


def _give_sizes(quantizer: Any, n_channels: int) -> None:
    """As `torch.fused_moving_avg_obs_fake_quant` does before it looks at the first batch; 0: as they were before."""
    observer = quantizer.activation_post_process
    with torch.no_grad():
        observer.min_val.resize_(n_channels).fill_(torch.inf)
        observer.max_val.resize_(n_channels).fill_(-torch.inf)
        quantizer.scale.resize_(max(1, n_channels))
        quantizer.zero_point.resize_(max(1, n_channels))


@cache
def _trace(*functions: Any) -> None:
    """Let Dynamo trace functions that it would skip, and what they call."""
    rules = get_torch_obj_rule_map()
    rules.update(dict.fromkeys(functions, UserFunctionVariable))
    rules.pop(torch.fused_moving_avg_obs_fake_quant, None)  # by its rule it goes into the graph in any case
    substituted = torch.compiler.substitute_in_graph(torch.fused_moving_avg_obs_fake_quant, skip_signature_check=True)
    substituted(_fake_quantized)


def _fake_quantized(
    input: torch.Tensor,
    observer_on: torch.Tensor,
    fake_quant_on: torch.Tensor,
    running_min: torch.Tensor,
    running_max: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> torch.Tensor:
    """`torch.fused_moving_avg_obs_fake_quant`, unless it gives buffers other sizes."""
    if per_row_fake_quant and running_min.numel() == 0:
        torch._dynamo.graph_break("an observer's first call gives its buffers a value for each channel")
    buffers = running_min, running_max, scale, zero_point
    numbers = averaging_const, quant_min, quant_max, ch_axis, per_row_fake_quant, symmetric_quant
    fake_quantized: Any = torch.ops.aten.fused_moving_avg_obs_fake_quant.default
    result: torch.Tensor = fake_quantized(input, observer_on, fake_quant_on, *buffers, *numbers)
    return result
