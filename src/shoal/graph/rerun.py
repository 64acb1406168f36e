"""What runs when a forward op runs for the second time in a step.

Most ops simply run again. Batch norm in training mode has moved the running statistics the first time: the second
time it normalises by the batch's statistics and touches nothing. Random ops draw from the state the first run drew
from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import items_of
from shoal.kernels import cudnn_batch_norm, norm_again
from shoal.kernels.buffers import add_to
from shoal.kernels.compiled_region import CompiledRegion
from shoal.kernels.dropout import dropout, noise_like
from shoal.kernels.invertible_norm.inverted_norms import inverted_batch_norm  # noqa: F401  registers the op
from shoal.kernels.memory_format import are_channels_last

_aten = torch.ops.aten
# Place of `training` among the arguments of batch norms that may use the statistics of the batch.
_TRAINING = {
    _aten._native_batch_norm_legit_functional.default: 5,
    _aten._native_batch_norm_legit.default: 5,
    _aten.cudnn_batch_norm.default: 5,
    cudnn_batch_norm.functional: 5,
    _aten._native_batch_norm_legit.no_stats: 3,
}
_CUDNN = (_aten.cudnn_batch_norm.default, cudnn_batch_norm.functional)
_MOVING = (_aten._native_batch_norm_legit_functional.default, _aten._native_batch_norm_legit.default, *_CUDNN)
_NORMALISE = (norm_again.normalise, cudnn_batch_norm.normalise)
_ACTIVATIONS = (_aten.relu.default, _aten.leaky_relu.default)
_SAME_ELEMENTS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_LEAKY_SLOPE = 0.01  # by default
_BATCH_NORMS_THAT_CAN = (
    *_MOVING,
    _aten._native_batch_norm_legit.no_stats,
    _aten._native_batch_norm_legit_no_training.default,
    torch.ops.shoal.inverted_batch_norm.default,
)


def can_run_again(node: fx.Node) -> bool:
    """Whether a second run gives the same tensors and changes nothing else."""
    target = node.target
    if isinstance(target, CompiledRegion):
        return True
    if "batch_norm" in str(target):
        return target in _BATCH_NORMS_THAT_CAN
    return target is not add_to and not (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable)


def second_call(node: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Target and arguments of the second run; results keep their places."""
    if node.target in _CUDNN and is_of_the_batch(node):
        return cudnn_batch_norm.normalise, (*node.args[:3], node.args[7])
    if is_of_the_batch(node):
        x, weight, bias, *_, training, momentum, eps = node.args
        statistics = items_of(node)
        if 1 in statistics and 2 in statistics and _repeats_bits(node):
            return norm_again.normalise, (x, weight, bias, statistics[1], statistics[2])
        return _aten._native_batch_norm_legit.no_stats, (x, weight, bias, training, momentum, eps)
    if node.target is _aten.native_group_norm.default:
        statistics = items_of(node)
        if 1 in statistics and 2 in statistics and _group_norm_repeats_bits(node):
            return norm_again.normalise, (*node.args[:3], statistics[1], statistics[2])
    if (norm := _norm_alone_before(node)) is not None:
        target, args = second_call(norm)
        if target is norm_again.normalise and _together_repeat_bits(args, node):
            return norm_again.activated, (*args, _slope(node), [int(n) for n in node.meta["val"].shape])
    return node.target, node.args  # type: ignore[return-value]


def second_node(node: fx.Node) -> fx.Node | None:
    """A node by itself that stands for the second run, to be counted and timed; None where it is just the first call.

    Only calls that make nothing but the first result have one.
    """
    target, args = second_call(node)
    if target not in (*_NORMALISE, norm_again.activated):
        return None
    apart = fx.Graph()

    def stand_in(operand: fx.Node) -> fx.Node:
        copy = apart.placeholder(operand.name)
        copy.meta = dict(operand.meta)
        return copy

    second = apart.call_function(target, fx.node.map_arg(args, stand_in))
    second.meta["val"] = node.meta["val"] if target is norm_again.activated else node.meta["val"][0]
    return second


def _norm_alone_before(node: fx.Node) -> fx.Node | None:
    """The norm whose result a ReLU or leaky ReLU reads, perhaps in another shape, where nothing else ever reads it."""
    if node.target not in _ACTIVATIONS or node.kwargs:
        return None
    if any(isinstance(n, torch.SymInt) for n in node.meta["val"].shape):
        return None
    source: Any = node.args[0]
    while len(source.users) == 1 and source.target in _SAME_ELEMENTS:
        source = source.args[0]
    is_alone = len(source.users) == 1 and source.target is operator.getitem and source.args[1] == 0
    # A batch norm with running statistics is computed again over its own input where that dies: one tensor, not two.
    can = is_alone and source.args[0].target not in _MOVING and takes_statistics(source.args[0])
    return source.args[0] if can else None


def _slope(node: fx.Node) -> float:
    """Below zero."""
    if node.target is _aten.relu.default:
        return 0.0
    return float(node.args[1]) if len(node.args) > 1 else _LEAKY_SLOPE  # type: ignore[arg-type]


def _together_repeat_bits(args: tuple[Any, ...], node: fx.Node) -> bool:
    x, weight, bias, mean = _values(args[:4])
    if not (x.is_contiguous() and node.meta["val"].is_contiguous()) or (weight is None) != (bias is None):
        return False
    of_weight = None if weight is None else weight.dtype
    return norm_again.activated_repeats_bits(x.dtype, _tried_on(x), x.dim(), mean.dim() == 2, _slope(node), of_weight)


def _repeats_bits(node: fx.Node) -> bool:
    x, weight, bias = _values(node.args[:3])
    if (weight is None) != (bias is None) or (weight is not None and weight.dtype != bias.dtype) or not _is_dense(x):
        return False
    of_weight, channels_last = weight.dtype if weight is not None else None, not x.is_contiguous()
    return norm_again.repeats_bits(x.dtype, _tried_on(x), x.dim(), int(x.shape[1]), channels_last, of_weight)


def _group_norm_repeats_bits(node: fx.Node) -> bool:
    x, weight, bias = _values(node.args[:3])
    if weight is None or bias is None or not weight.dtype == bias.dtype == x.dtype or not _is_dense(x):
        return False
    groups: Any = node.args[6]
    form = x.dim(), int(x.shape[1]), not x.is_contiguous()
    return norm_again.repeats_bits(x.dtype, _tried_on(x), *form, x.dtype, int(groups))


def _values(operands: tuple[Any, ...]) -> Iterator[Any]:
    return (operand.meta["val"] if operand is not None else None for operand in operands)


def _is_dense(x: torch.Tensor) -> bool:
    if x.dim() not in (3, 4, 5):
        return False
    return x.is_contiguous() or are_channels_last(x)


def _tried_on(x: torch.Tensor) -> torch.device:
    return torch.device("cpu") if x.device.type == "meta" else x.device  # nothing can be tried on meta


def is_of_the_batch(node: fx.Node) -> bool:
    """Whether the node is a batch norm, or an instance norm made of one, by statistics that it takes itself."""
    return node.target in _TRAINING and node.args[_TRAINING[node.target]] is True


def takes_statistics(node: fx.Node) -> bool:
    """Whether the node normalises by statistics that it takes itself, which its second run need not."""
    return is_of_the_batch(node) or node.target is _aten.native_group_norm.default


def moves_statistics(node: fx.Node) -> bool:
    """Whether the node is a batch norm in training mode that moves running statistics.

    They are written in place, or the results at places 3 and 4.
    """
    return node.target in _MOVING and is_of_the_batch(node) and node.args[3] is not None


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from the generator. Attention is tagged as if it did, and does not without dropout."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags and _dropout_share(node) != 0
    return node.target in (dropout, noise_like)


def _dropout_share(node: fx.Node) -> Any:
    """What an op is given as `dropout_p`; None if it takes none."""
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            given = node.kwargs.get(argument.name, argument.default_value)
            return node.args[place] if place < len(node.args) else given
    return None
