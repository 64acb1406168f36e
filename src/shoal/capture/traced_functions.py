"""Functions and layers of PyTorch at which Dynamo breaks a graph, written so that it traces them.

- `checkpoint_sequential` and `torch.jit.isinstance`.
- Quantization-aware training, as by `torch.ao.quantization.prepare_qat`, of which Dynamo traces nothing: it would break
  the graph at every layer. Observers that branch on the values of tensors, as those of `FakeQuantize`, still break it.
- Batch norm with `momentum=None`, whose running statistics are the mean over all batches. PyTorch's layer reads its
  counter of batches into a Python number, where Dynamo ends its graph: at every batch norm of a model, once weights are
  averaged (`torch.optim.swa_utils.update_bn`, Lightning's callback StochasticWeightAveraging).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables import UserFunctionVariable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shoal.kernels.batch_norm_vectors import cumulative_statistics

_plain_forward = _BatchNorm.forward
_admitted = False


@cache
def trace_more_functions() -> None:
    """Let Dynamo trace them from here on, in whichever model of this process."""
    get_torch_obj_rule_map().pop(torch.jit.isinstance, None)  # by its rule nothing of torch.jit is traced
    for function, traced in ((checkpoint_sequential, _in_parts), (torch.jit.isinstance, _is_instance)):
        try:
            torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)
        except ValueError:  # another library has told Dynamo how
            continue


def _is_instance(value: Any, kind: Any) -> bool:
    """`torch.jit.isinstance`; what a container holds is looked at outside the graph."""
    if isinstance(kind, tuple):
        return any(_is_instance(value, one) for one in kind)
    if not isinstance(kind, type):
        torch._dynamo.graph_break("torch.jit.isinstance looks at what a container holds")
        return torch.jit.isinstance(value, kind)  # where Dynamo goes on in here
    return isinstance(value, kind)


def _in_parts(
    functions: nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`checkpoint_sequential`; `use_reentrant` says nothing in a graph."""
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    layers = list(functions.children()) if isinstance(functions, nn.Sequential) else functions

    def part(start: int, end: int) -> Callable[[Any], Any]:
        def forward(x: Any) -> Any:
            for layer in layers[start:end]:
                x = layer(x)
            return x

        return forward

    length, end = len(layers) // segments, 0
    if not length:
        raise ValueError("range() arg 3 must not be zero")  # as Python says it; Dynamo fails on such a range
    for start in range(0, length * (segments - 1), length):
        end = start + length
        input = checkpoint(
            part(start, end), input, use_reentrant=use_reentrant is not False, preserve_rng_state=preserve_rng_state
        )
    return part(end, len(layers))(input)


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
