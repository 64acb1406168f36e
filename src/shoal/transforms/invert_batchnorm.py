"""Batch norm and ReLU in the invertible form, and back (In-Place ABN; section 3 of CPU offloading)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import CaptureError, InputError
from shoal.runtime.inverted_batch_norm import kept_from_zero, reconstruction_error, run
from shoal.transforms.tracing import UntraceableError, has_hooks, trace

_log = logging.getLogger(__name__)
_INEXACT = 1e-3  # of a normalised input, whose variance is 1: where `describe` and `restore_batchnorm` speak up
_CHANNELS_TOLD = 8
_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PRODUCERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RELU_FUNCTIONS = (F.relu, torch.relu, F.relu_, torch.relu_)


@dataclass(frozen=True)
class Inverted:
    """One batch norm that is converted.

    Attributes:
        layer: module path.
        was: the activation it had, such as "ReLU".
        activation, slope: what it has now, as for `shoal.runtime.inverted_batch_norm`.
    """

    layer: str
    was: str
    activation: str
    slope: float


@dataclass(frozen=True)
class Left:
    """One batch norm that stays as it was, and why."""

    layer: str
    reason: str


def invert_batchnorm(model: nn.Module, slope: float = 0.01, *, limit: float | None = None) -> InvertedModel:
    """Make batch norms and the activations behind them one op that saves only its result.

    Replaces, in plain PyTorch, In-Place ABN's layers written into the network by hand. PyTorch saves the input of every
    batch norm for its backward pass, beside the result of the activation; the inverted form makes that input again from
    the result, which the next convolution saves anyway. Found by structure: a batch norm whose only reader is a ReLU,
    LeakyReLU or ELU.

    It changes the model, so it is asked for by name: a ReLU becomes a LeakyReLU of `slope`, and scales stay at least
    eps away from zero, on their side. Weights are moved towards zero by eps, so that the scales are those the network
    has; `restore_batchnorm` moves them back.

    Args:
        model: a network that torch.fx can trace. Its parameters, buffers and modules are shared, not copied, under
            their names; so are state dicts.
        slope: what becomes of a ReLU below zero, more than 0. LeakyReLU and ELU stay what they are.
        limit: the most that a normalised input, of variance 1, may be off when it is made again in float32; None for
            any. For trained models, whose channels may have scales near zero.

    Returns:
        A module that computes the converted network, in training and in eval mode; `describe()` tells what was
        converted, what was not and why.

    Raises:
        InputError: an argument is out of range, a channel is over the limit, or a module whose call is taken apart has
            hooks; layers and channels are named.
        CaptureError: torch.fx cannot trace the model.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    >>> inverted = invert_batchnorm(net)
    >>> print(inverted.describe())
    1 of 2 batch norms inverted
    layer  was   now              inexact to
    1      ReLU  LeakyReLU(0.01)  3e-06
    4      kept: its result is the network's, there is no activation behind it
    >>> list(inverted.state_dict()) == list(net.state_dict())
    True

    Limits: use the result, and no longer `model`, whose own forward pass has other scales by eps. Hooks that are put on
    converted batch norms and activations later do not run. In half precision the result holds fewer digits to make the
    input from; `reconstruction_errors(torch.bfloat16)` tells how few. ELU flattens out: below about -10 little can be
    made again. No double backward.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, InvertedModel):
        raise InputError("the model is inverted already; give the network it was made from, or restore it first")
    if not isinstance(slope, (int, float)) or isinstance(slope, bool) or not 0 < slope < math.inf:
        raise InputError(f"slope={slope!r}: expected a number more than 0, such as 0.01; a slope of 0 has no inverse")
    _check_limit(limit)
    graphs = (_traced(model, training=True), _traced(model, training=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    sites, left = _find(graphs, modules, float(slope))
    _refuse_hooks(model)
    found = InvertedModel(model, graphs, sites, left)
    weights = found.weights()
    before = [weight.detach().clone() for weight, _ in weights]
    with torch.no_grad():
        for weight, eps in weights:
            weight.copy_(weight.sign() * (weight.abs() - eps).clamp(min=0))
        try:
            _refuse_inexact(found, limit)
        except InputError:
            for (weight, _), value in zip(weights, before, strict=True):
                weight.copy_(value)
            raise
    return found


def restore_batchnorm(
    model: InvertedModel,
    *,
    activation: Literal["leaky_relu", "relu"] = "leaky_relu",
    limit: float | None = None,
) -> nn.Module:
    """Make a network that `invert_batchnorm` converted one of plain batch norms again.

    Weights become the scales that the inverted form used, so the function is the same to rounding. Channels where the
    inversion was inexact are told in the log: training could follow their scales only roughly.

    Args:
        model: what `invert_batchnorm` returned. It is used up: parameters are shared with the result.
        activation: "leaky_relu" keeps the function; "relu" makes the ReLUs again that were converted, which changes it.
        limit: as for `invert_batchnorm`.

    Returns:
        The network that was converted, where every activation is what it was; else a module that calls its layers with
        LeakyReLU in place of the ReLUs. Names in state dicts stay.

    Raises:
        InputError: the model is none that was inverted, an argument is out of range, or channels are over the limit;
            nothing is changed then.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> restore_batchnorm(invert_batchnorm(net), activation="relu") is net
    True
    """
    if not isinstance(model, InvertedModel):
        raise InputError(f"model is a {type(model).__name__}; expected what shoal.invert_batchnorm returned")
    if activation not in ("leaky_relu", "relu"):
        raise InputError(f"activation={activation!r}: expected 'leaky_relu', which keeps the function, or 'relu'")
    _check_limit(limit)
    _refuse_inexact(model, limit)
    told = _inexact_channels(model, _INEXACT)
    if told:
        _log.warning("inverted batch norm was inexact in %s", told)
    source, mode = model.source, model.training
    model.scale_plainly()
    if activation == "relu" or all(site.was != "ReLU" for site in model.inverted):
        source.training = mode
        return source
    return RestoredModel(source, model._traces, model._sites)


class _Rewritten(nn.Module):
    """A network whose graph was rewritten, once for training and once for eval mode; its modules stay its own."""

    def __init__(self, model: nn.Module, graphs: Sequence[fx.GraphModule]) -> None:
        super().__init__()
        # Shared dicts: whatever is set, moved or loaded here is so there, and names stay.
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self._source = (model,)  # in tuples, so that they are no children
        self._rewritten = tuple(graphs)

    @property
    def source(self) -> nn.Module:
        """The network it was made from, with the same parameters."""
        return self._source[0]

    def train(self, mode: bool = True) -> _Rewritten:
        super().train(mode)
        self.source.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the network's own."""
        return self._rewritten[0 if self.training else 1](*args, **kwargs)


class InvertedModel(_Rewritten):
    """A network with inverted batch norms; made by `invert_batchnorm`.

    Attributes:
        inverted: what was converted, in the order of the network.
        left: what was not, and why.
    """

    def __init__(
        self, model: nn.Module, traces: Sequence[fx.Graph], sites: Mapping[str, Inverted], left: Sequence[Left]
    ) -> None:
        super().__init__(model, [_inverted_graph(model, graph, sites) for graph in traces])
        self._traces, self._sites = tuple(traces), dict(sites)
        self.inverted, self.left = tuple(dict.fromkeys(sites.values())), tuple(left)

    def weights(self) -> list[tuple[nn.Parameter, float]]:
        """The weights of the converted batch norms and how far their scales are from them, each once."""
        layers: list[Any] = [self.source.get_submodule(site.layer) for site in self.inverted]
        return list({id(layer.weight): (layer.weight, layer.eps) for layer in layers if layer.affine}.values())

    def reconstruction_errors(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """How far normalised inputs can be off when made again from activations of `dtype`, (C,) float64 by layer.

        An upper bound for inputs up to 4 standard deviations from their mean, as the parameters are now; see
        `shoal.runtime.inverted_batch_norm.reconstruction_error`.
        """
        errors: dict[str, torch.Tensor] = {}
        for site in self.inverted:
            layer: Any = self.source.get_submodule(site.layer)
            if layer.weight is None:
                error = torch.zeros(layer.num_features, dtype=torch.float64)
            else:
                error = reconstruction_error(
                    layer.weight, layer.bias, layer.eps, site.activation, site.slope, dtype
                ).cpu()
            errors[site.layer] = torch.maximum(error, errors[site.layer]) if site.layer in errors else error
        return errors

    def describe(self) -> str:
        """What was converted and how exactly its inputs can be made again; what was not, and why."""
        total = len({site.layer for site in self.inverted}) + len({left.layer for left in self.left})
        lines = [f"{len({site.layer for site in self.inverted})} of {total} batch norms inverted"]
        if not total:
            return "no batch norms"
        rows = [("layer", "was", "now", "inexact to")]
        errors = self.reconstruction_errors()
        for site in self.inverted:
            now = f"{_NAMES[site.activation]}({site.slope:g})"
            error = errors[site.layer]
            worst = "unknown" if error.is_meta else f"{error.max():.0e}"
            channels = [] if error.is_meta else (error > _INEXACT).nonzero().flatten().tolist()
            rows.append((site.layer, site.was, now, worst + (f" in {_channels(channels)}" if channels else "")))
        names = [row[0] for row in rows] + [left.layer for left in self.left]
        widths = [max(map(len, names)), *(max(len(row[column]) for row in rows) for column in (1, 2))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
        ]
        lines += [f"{left.layer.ljust(widths[0])}  kept: {left.reason}" for left in self.left]
        return "\n".join(lines)

    def scale_plainly(self) -> None:
        """Give the weights the values of the scales, for layers called in the plain form."""
        with torch.no_grad():
            for weight, eps in self.weights():
                weight.copy_(kept_from_zero(weight, eps))

    def extra_repr(self) -> str:
        return f"inverted={len(self.inverted)}, left={len(self.left)}"


class RestoredModel(_Rewritten):
    """A network of plain batch norms with LeakyReLU in place of some ReLUs; made by `restore_batchnorm`."""

    def __init__(self, model: nn.Module, traces: Sequence[fx.Graph], sites: Mapping[str, Inverted]) -> None:
        super().__init__(model, [_leaky_graph(model, graph, sites) for graph in traces])


def inverted(
    x: torch.Tensor, layer: _BatchNorm, producer: nn.Module | None, activation: str, slope: float
) -> torch.Tensor:
    """One converted call: `run`, over the result of `producer` where that is a convolution whom nobody looks at."""
    overwrite = producer is not None and not torch.compiler.is_compiling() and not has_hooks(producer)
    return run(layer, x, activation, slope, overwrite)


_NAMES = {"leaky_relu": "LeakyReLU", "elu": "ELU", "identity": "Identity"}


def _find(
    graphs: Sequence[fx.Graph], modules: Mapping[str, nn.Module], slope: float
) -> tuple[dict[str, Inverted], list[Left]]:
    """Sites by module path, and what is left; a layer is converted everywhere it is called or nowhere."""
    sites: dict[str, Inverted] = {}
    reasons: dict[str, str] = {}
    paths: dict[str, list[str]] = {}
    for node in (node for graph in graphs for node in graph.nodes):
        if node.op == "call_function" and node.target is F.batch_norm:
            reasons.setdefault(node.name, "it is a call of F.batch_norm, not a module")
        if node.op != "call_module" or not isinstance(modules[node.target], _BatchNorm):
            continue
        path = str(node.target)
        paths.setdefault(path, [name for name, module in modules.items() if module is modules[path]])
        site = _site(node, modules, slope)
        if isinstance(site, Left):
            reasons.setdefault(path, site.reason)
        elif path in sites and sites[path] != site:
            reasons.setdefault(path, "it is called with different activations behind it")
        else:
            sites[path] = site
    for path, others in paths.items():
        refused = next((other for other in others if other in reasons), None)
        if refused is not None and path not in reasons:
            reasons[path] = reasons[refused]
    kept = {path: site for path, site in sites.items() if path not in reasons}
    return kept, [Left(path, reason) for path, reason in reasons.items()]


def _site(node: fx.Node, modules: Mapping[str, nn.Module], slope: float) -> Inverted | Left:
    path = str(node.target)
    layer = modules[path]
    if isinstance(layer, nn.SyncBatchNorm):
        return Left(path, "it is a SyncBatchNorm, whose statistics are of all ranks")
    if type(layer) not in _LAYERS:
        return Left(path, f"it is a {type(layer).__name__}, which may do more than batch norm")
    if has_hooks(layer):
        return Left(path, "it has hooks, which would not run")
    (reader, *others) = node.users or (None,)
    if reader is None:
        return Left(path, "nobody reads its result")
    if others:
        named = ", ".join(_name(user, modules) for user in node.users)
        return Left(path, f"its result has other readers: {named}")
    if reader.op == "output":
        return Left(path, "its result is the network's, there is no activation behind it")
    was = _activation_of(reader, modules)
    if was is None:
        return Left(path, f"there is no ReLU, LeakyReLU or ELU behind it but {_name(reader, modules)}")
    if reader.op == "call_module" and has_hooks(modules[str(reader.target)]):
        return Left(path, f"{reader.target} behind it has hooks, which would not run")
    kind, own_slope = was
    if kind == "ReLU":
        return Inverted(path, kind, "leaky_relu", slope)
    if not 0 < own_slope < math.inf:
        return Left(path, f"the {kind}({own_slope:g}) behind it has no inverse")
    return Inverted(path, kind, "elu" if kind == "ELU" else "leaky_relu", own_slope)


def _activation_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[str, float] | None:
    """Name and slope of an activation that can be converted."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if type(module) is nn.ReLU:
            return "ReLU", 0.0
        if type(module) is nn.LeakyReLU:
            return "LeakyReLU", float(module.negative_slope)
        return ("ELU", float(module.alpha)) if type(module) is nn.ELU else None
    if (node.op == "call_function" and node.target in _RELU_FUNCTIONS) or (
        node.op == "call_method" and node.target in ("relu", "relu_")
    ):
        return "ReLU", 0.0
    if node.op == "call_function" and node.target in (F.leaky_relu, F.elu):
        kind, name, usual = ("ELU", "alpha", 1.0) if node.target is F.elu else ("LeakyReLU", "negative_slope", 0.01)
        value = node.args[1] if len(node.args) > 1 else node.kwargs.get(name, usual)
        return (kind, float(value)) if isinstance(value, (int, float)) else None
    return None


def _inverted_graph(model: nn.Module, trace: fx.Graph, sites: Mapping[str, Inverted]) -> fx.GraphModule:
    modules = dict(model.named_modules(remove_duplicate=False))
    graph, calls = _copied(trace, sites)
    for node in calls:
        site = sites[str(node.target)]
        (reader,) = node.users
        source = node.all_input_nodes[0]
        with graph.inserting_before(node):
            layer = graph.create_node("get_attr", site.layer)
            alone = source.op == "call_module" and type(modules[str(source.target)]) in _PRODUCERS
            alone = alone and len(source.users) == 1
            producer = graph.create_node("get_attr", str(source.target)) if alone else None
            call = graph.call_function(inverted, (source, layer, producer, site.activation, site.slope))
        reader.replace_all_uses_with(call)
        graph.erase_node(reader)
        graph.erase_node(node)
    return _module(model, graph, "InvertedGraph")


def _leaky_graph(model: nn.Module, trace: fx.Graph, sites: Mapping[str, Inverted]) -> fx.GraphModule:
    graph, calls = _copied(trace, sites)
    for node in calls:
        site = sites[str(node.target)]
        (reader,) = node.users
        if site.was == "ReLU":
            with graph.inserting_before(reader):
                leaky = graph.call_function(F.leaky_relu, (node, site.slope, True))
            reader.replace_all_uses_with(leaky)
            graph.erase_node(reader)
    return _module(model, graph, "RestoredGraph")


def _copied(trace: fx.Graph, sites: Mapping[str, Inverted]) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    result = graph.graph_copy(trace, {})
    graph.output(result)
    return graph, [node for node in graph.nodes if node.op == "call_module" and node.target in sites]


def _module(model: nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    called: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            value: Any = model
            for part in str(node.target).split("."):
                value = getattr(value, part)
            called[str(node.target)] = value
    graph.lint()
    return fx.GraphModule(called, graph, name)


class _Tracer(fx.Tracer):
    """Leaves batch norms of other libraries whole, too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _traced(model: nn.Module, *, training: bool) -> fx.Graph:
    try:
        return trace(model, _Tracer(), training=training)
    except UntraceableError as reason:
        raise CaptureError(
            f"torch.fx cannot trace {type(model).__name__}: {reason}; convert a part of it that has no control "
            "flow over tensors, and put that in its place"
        ) from reason


def _refuse_hooks(model: nn.Module) -> None:
    is_whole = _Tracer().is_leaf_module
    for name, module in model.named_modules():
        if (name == "" or not is_whole(module, name)) and has_hooks(module):
            raise InputError(
                f"{name or type(model).__name__} has hooks, which do not run in a converted network; remove them, or "
                "convert the parts behind and before it"
            )


def _name(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    if node.op == "call_module":
        return f"{node.target} ({type(modules[str(node.target)]).__name__})"
    return "the output" if node.op == "output" else getattr(node.target, "__name__", str(node.target))


def _check_limit(limit: float | None) -> None:
    if limit is not None and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0):
        raise InputError(f"limit={limit!r}: expected the largest error allowed, more than 0, such as 1e-3, or None")


def _refuse_inexact(model: InvertedModel, limit: float | None) -> None:
    told = _inexact_channels(model, limit) if limit is not None else ""
    if told:
        raise InputError(
            f"inverting batch norm is inexact to more than limit={limit:g} in {told}: their scales are small beside "
            "their shifts; give a larger limit, or train these layers in the plain form"
        )


def _inexact_channels(model: InvertedModel, limit: float) -> str:
    errors = {name: error for name, error in model.reconstruction_errors().items() if not error.is_meta}
    over = {name: (error > limit).nonzero().flatten().tolist() for name, error in errors.items()}
    return "; ".join(f"{name}: {_channels(channels)}" for name, channels in over.items() if channels)


def _channels(channels: Sequence[int]) -> str:
    told = ", ".join(map(str, channels[:_CHANNELS_TOLD]))
    more = f" and {len(channels) - _CHANNELS_TOLD} more" if len(channels) > _CHANNELS_TOLD else ""
    return f"channel{'s' if len(channels) > 1 else ''} {told}{more}"
