"""What `split` knows of the ops between the input and the join: window ops, pointwise ops, batch norms."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd

from shoal.kernels.batch_norm_vectors import measures
from shoal.kernels.invertible_norm.inverted_norms import inverted_norm_in
from shoal.transforms.invert.inverted_graph import inverted
from shoal.transforms.split.sliding_window import SlidingWindow

SpatialKind = Literal[
    "convolution", "pooling", "padding", "batch norm", "pointwise", "concatenation", "reshape", "feature dropout"
]

_PADDINGS: dict[str, str] = {
    "ZeroPad": "constant",
    "ConstantPad": "constant",
    "ReflectionPad": "reflect",
    "ReplicationPad": "replicate",
}
_POINTWISE_MODULES = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
    nn.Softsign,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Threshold,
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_POINTWISE_NAMES = {
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "softplus", "sigmoid", "tanh"),
    *(
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "neg",
        "abs",
        "exp",
        "pow",
        "sqrt",
    ),
    *("square", "clamp", "clamp_min", "clamp_max", "iadd", "isub", "imul", "itruediv", "contiguous", "clone", "float"),
    *("half", "bfloat16", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"),
}
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_BY_SAMPLE_NAMES = {
    *(*_TRANSPOSED, "interpolate", "pad"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
}
_REDUCTIONS = ("mean", "sum", "amax", "amin", "softmax", "log_softmax")
_RESHAPES = ("view", "reshape", "flatten", "unflatten")
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_FEATURE_DROPOUTS: dict[Any, int] = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
_DRAW = ("dropout", "attention", "gumbel")  # functions of torch.nn.functional that have no operator of their own
_ALONE = (F.group_norm, F.prelu, torch.prelu, inverted_norm_in)
_POOLS: dict[Callable[..., Any], type[nn.Module]] = {
    F.max_pool1d: nn.MaxPool1d,
    F.max_pool2d: nn.MaxPool2d,
    F.max_pool3d: nn.MaxPool3d,
    F.avg_pool1d: nn.AvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.avg_pool3d: nn.AvgPool3d,
    torch.max_pool1d: nn.MaxPool1d,
    torch.max_pool2d: nn.MaxPool2d,
    torch.max_pool3d: nn.MaxPool3d,
}


def each(value: int | Sequence[int] | None, dims: int) -> tuple[int, ...]:
    """A setting that may be one number for all dimensions, as one for each."""
    assert value is not None
    return (value,) * dims if isinstance(value, int) else tuple(int(v) for v in value)


def layer_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The module that a node calls; for a pooling function, a module that does the same."""
    if node.op == "call_module":
        return modules[str(node.target)]
    if node.op == "call_function" and node.target in _POOLS:
        try:
            return _POOLS[node.target](*node.args[1:], **node.kwargs)
        except TypeError:
            return None
    return None


def is_convolution(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether it counts among the convolutional layers of the network."""
    return node.op == "call_module" and isinstance(modules[str(node.target)], _ConvNd)


def is_transposed(node: fx.Node) -> bool:
    """Whether it calls a transposed convolution as a function."""
    return getattr(node.target, "__name__", "") in _TRANSPOSED


def dims_of(layer: nn.Module) -> int | None:
    """How many spatial dimensions a layer works on; None for any number."""
    name = type(layer).__name__
    kinds = (_ConvNd, _MaxPoolNd, _AvgPoolNd, _BatchNorm)
    is_bound = isinstance(layer, kinds) or any(name.startswith(padding) for padding in _PADDINGS)
    return int(name[-2]) if is_bound and name[-1:] == "d" and name[-2:-1].isdigit() else None


def kind_of(node: fx.Node, modules: Mapping[str, nn.Module], dims: int) -> SpatialKind | None:
    """What the op is to a tensor of `dims` spatial dimensions; None where it cannot run patch by patch."""
    layer = layer_of(node, modules)
    if layer is not None:
        return _kind_of_layer(layer)
    if node.target is inverted:  # an instance or group norm is of a whole image
        return "batch norm" if isinstance(modules[str(_norm_of(node))], _BatchNorm) else None
    if node.op == "call_function" and node.target in (torch.cat, torch.concat, torch.concatenate):
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        return "concatenation" if dim in (1, -dims - 1) else None
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        is_known = node.target in vars(operator).values() or getattr(node.target, "__module__", "").startswith("torch")
        return "pointwise" if is_known and name.removesuffix("_") in _POINTWISE_NAMES else None
    if node.op == "call_method":
        return "pointwise" if str(node.target).removesuffix("_") in _POINTWISE_NAMES else None
    return None


def _norm_of(node: fx.Node) -> Any:
    layer: Any = node.args[1]
    return layer.target


def is_pointwise(node: fx.Node) -> bool:
    """Whether it calls a function or a method of each element by itself, with nothing drawn."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    known = name.removesuffix("_") in _POINTWISE_NAMES and "dropout" not in name
    return known or node.target in (F.prelu, torch.prelu) or _drops_nothing(node)


def kind_by_sample(node: fx.Node, modules: Mapping[str, nn.Module], samples: int = 0) -> SpatialKind | None:
    """What the op is to a batch; None where a sample's result depends on others, or on random numbers.

    "pointwise" are also a batch norm that does not train, an instance norm without running statistics, a group or layer
    norm, a linear layer, a mean, a sum or a softmax within a sample, another order of axes after the first, and a
    dropout that drops nothing. A "feature dropout" draws one number a channel, those of all samples at once. "reshape"
    has a multiple of the samples along its first axis, as frames of videos.

    Args:
        node: an op.
        modules: by name.
        samples: in the batch; 0 where that is not known.
    """
    layer = layer_of(node, modules)
    if isinstance(layer, _BatchNorm):
        return "batch norm" if measures(layer) else "pointwise"
    if isinstance(layer, _ConvNd):
        return "convolution"
    if draws(node, modules):
        return "feature dropout" if is_feature_dropout(node) else None
    if layer is not None:
        return _kind_of_layer(layer)
    if node.op not in ("call_function", "call_method"):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in ("cat", "concat", "concatenate"):
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        return "concatenation" if isinstance(dim, int) and dim > 0 else None
    if node.target in _ALONE or _normalises_samples(node) or _drops_nothing(node) or _leaves_samples_apart(node):
        return "pointwise"
    if samples and name in _RESHAPES:
        rows = [*_shape(node)[:1], *_shape(node.all_input_nodes[0])[:1]]
        is_whole = len(rows) == 2 and all(isinstance(one, int) and one % samples == 0 for one in rows)
        is_cast = any(isinstance(one, torch.dtype) for one in (*node.args, *node.kwargs.values()))  # `x.view(dtype)`
        return "reshape" if is_whole and not is_cast and all(isinstance(size, int) for size in _shape(node)) else None
    known = (_POINTWISE_NAMES | _BY_SAMPLE_NAMES) if node.op == "call_function" else _POINTWISE_NAMES
    return "pointwise" if name.removesuffix("_") in known else None


def draws(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether it draws random numbers: on parts of an image or of a batch these are not the numbers of the whole, and
    patches that overlap would each draw their own for the pixels that they share."""
    layer = layer_of(node, modules)
    if layer is not None:
        return "Dropout" in type(layer).__name__ or isinstance(layer, nn.RReLU)
    if node.op not in ("call_function", "call_method") or _drops_nothing(node):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return any(part in name for part in _DRAW) or _is_seeded(name)


@cache
def _is_seeded(name: str) -> bool:
    """Whether an operator of that name draws from a generator."""
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)


def is_feature_dropout(node: fx.Node) -> bool:
    """Whether it is a dropout of whole channels of a batch, called as a function, that trains."""
    dims = _FEATURE_DROPOUTS.get(node.target)
    return dims is not None and len(_shape(node)) == dims + 2 and _setting(node, 2, "training", True) is True


def _normalises_samples(node: fx.Node) -> bool:
    return node.target is F.instance_norm and (
        _setting(node, 1, "running_mean", None) is None or _setting(node, 5, "use_input_stats", True) is False
    )


def _leaves_samples_apart(node: fx.Node) -> bool:
    """Whether it is a layer norm, a linear layer, or another order of axes that leaves the first as it is."""
    if node.target is F.layer_norm:
        shape = _setting(node, 1, "normalized_shape", None)
        return isinstance(shape, Sequence) and len(shape) < _dims_read(node)
    if node.target is F.linear:
        return _dims_read(node) > 1
    if node.target in ("permute", torch.permute):
        axes: Any = _setting(node, 1, "dims", ())
        return (axes[0] if isinstance(axes, Sequence) else axes) in (0, -_dims_read(node))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _REDUCTIONS:
        return _are_within_samples(node, _setting(node, 1, "dim", None))
    if name in ("transpose", "swapaxes"):
        return _are_within_samples(node, (_setting(node, 1, "dim0", 0), _setting(node, 2, "dim1", 0)))
    return False


def _are_within_samples(node: fx.Node, axes: Any) -> bool:
    """Whether these are axes after the first of what a node reads."""
    dims = _dims_read(node)
    listed = axes if isinstance(axes, Sequence) else (axes,)
    return bool(listed) and all(isinstance(axis, int) and axis % max(1, dims) > 0 for axis in listed)


def _dims_read(node: fx.Node) -> int:
    """Of the first tensor that it reads; 0 where that is not known."""
    return len(_shape(node.all_input_nodes[0])) if node.all_input_nodes else 0


def _shape(node: fx.Node) -> tuple[Any, ...]:
    """Of its result; nothing where that is not known."""
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _drops_nothing(node: fx.Node) -> bool:
    return node.target in _DROPOUTS and (
        _setting(node, 1, "p", 0.5) == 0 or _setting(node, 2, "training", True) is False
    )


def _setting(node: fx.Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _kind_of_layer(layer: nn.Module) -> SpatialKind | None:
    if isinstance(layer, _ConvTransposeNd):
        return None
    if isinstance(layer, _ConvNd):
        return None if layer.padding_mode == "circular" else "convolution"
    if isinstance(layer, _MaxPoolNd):
        return None if layer.return_indices else "pooling"
    if isinstance(layer, _AvgPoolNd):
        return "pooling"
    if isinstance(layer, _BatchNorm):
        return "batch norm"
    if padding_mode(layer) is not None:
        return "padding"
    return "pointwise" if type(layer) in _POINTWISE_MODULES else None


def padding_mode(layer: nn.Module) -> str | None:
    """The mode of a padding layer, as `F.pad` calls it; None for other layers."""
    name = type(layer).__name__
    return next((mode for start, mode in _PADDINGS.items() if name.startswith(start)), None)


def windows_of(layer: nn.Module, dims: int) -> tuple[SlidingWindow, ...]:
    """A window layer along each spatial dimension."""
    if isinstance(layer, _ConvNd):
        kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
        if isinstance(layer.padding, str):
            totals = [d * (k - 1) if layer.padding == "same" else 0 for k, d in zip(kernel, dilation, strict=True)]
            pads = [(total // 2, total - total // 2) for total in totals]
        else:
            pads = [(p, p) for p in layer.padding]
        return tuple(SlidingWindow(k, s, d, *p) for k, s, d, p in zip(kernel, stride, dilation, pads, strict=True))
    if isinstance(layer, (_MaxPoolNd, _AvgPoolNd)):
        setting: Any = layer  # nn.Module's attributes have no types of their own
        kernels = each(setting.kernel_size, dims)
        strides = each(setting.stride, dims) if setting.stride is not None else kernels
        paddings = each(setting.padding, dims)
        dilations = each(getattr(layer, "dilation", 1), dims)
        return tuple(
            SlidingWindow(k, s, d, p, p, setting.ceil_mode)
            for k, s, d, p in zip(kernels, strides, dilations, paddings, strict=True)
        )
    flat = each(layer.padding, 2 * dims)  # type: ignore[arg-type]  # a padding layer's: last dimension first
    return tuple(SlidingWindow(begin=flat[2 * d], end=flat[2 * d + 1]) for d in reversed(range(dims)))
