"""Networks whose norms are inverted, and such as are restored: the modules that run their graphs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core import arguments
from shoal.core.columns import aligned
from shoal.errors import InputError, brief
from shoal.kernels.invertible_norm.inverted_norms import at_least, kept_from_zero, reconstruction_error
from shoal.transforms.invert.inverted_graph import Inverted, inverted_graph, leaky_graph
from shoal.transforms.live_graph import live_graph
from shoal.transforms.stand_in import Left, StandIn

_INEXACT = 1e-3  # of a normalised input, whose variance is 1: from there `describe` and `restore` name the channels
_MAX_CHANNELS_LISTED = 8
_NAMES = {"leaky_relu": "LeakyReLU", "elu": "ELU", "identity": "Identity"}

_log = logging.getLogger(__name__)


class _Rewritten(StandIn):
    """A network whose graph was rewritten, once for training and once for eval mode."""

    def __init__(self, model: nn.Module, graphs: Sequence[fx.Graph], name: str) -> None:
        super().__init__(model)
        self._graphs = tuple(graphs)
        self._rewritten = tuple(live_graph(model, _copy(graph), {}, name) for graph in graphs)  # no children

    def graph(self, *, training: bool) -> fx.Graph:
        return self._graphs[0 if training else 1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the network's own.

        Raises:
            InputError: layers were replaced since the network was converted.
        """
        if self._has_other_layers():
            raise InputError(
                f"layers were replaced after {self.made_by}, whose result calls the old ones; put them back, and "
                "replace layers before the conversion"
            )
        if not torch.compiler.is_compiling():
            self.reject_sharded_parts()
        return self._rewritten[0 if self.training else 1](*args, **kwargs)


class InvertedModel(_Rewritten):
    """A network with inverted norms; made by `invert_norm`.

    Attributes:
        inverted: what was converted, in the order of the network.
        left: what was not, and why.
        used_up: whether `restore` gave its weights back.
    """

    made_by = "shoal.invert_norm"

    def __init__(
        self, model: nn.Module, traces: Sequence[fx.Graph], sites: Mapping[str, Inverted], left: Sequence[Left]
    ) -> None:
        super().__init__(model, [inverted_graph(model, graph, sites) for graph in traces], "InvertedGraph")
        self._traces, self._sites, self.used_up = tuple(traces), dict(sites), False
        self.inverted, self.left = tuple(dict.fromkeys(sites.values())), tuple(left)
        self.keep_scales()

    def weights(self) -> list[tuple[nn.Parameter, float]]:
        """The weights of the converted batch norms, and how far their scales are from them, each once."""
        layers: list[Any] = [self.source.get_submodule(site.layer) for site in self.inverted]
        moved = [layer for layer in layers if isinstance(layer, _BatchNorm) and layer.weight is not None]
        return list({id(layer.weight): (layer.weight, layer.eps) for layer in moved}.values())

    def reconstruction_errors(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """How far normalised inputs can be off when made again from activations of `dtype`, (C,) float64 by layer.

        An upper bound for inputs up to 4 standard deviations from their mean, as the parameters are now; see
        `shoal.kernels.invertible_norm.inverted_norms.reconstruction_error`.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(f"dtype={brief(dtype)}: expected that of the activations, such as torch.bfloat16")
        errors: dict[str, torch.Tensor] = {}
        for site in self.inverted:
            layer: Any = self.source.get_submodule(site.layer)
            if layer.weight is None:
                channels = layer.num_channels if isinstance(layer, nn.GroupNorm) else layer.num_features
                scale = torch.ones(channels)
            else:
                weight = layer.weight.detach().double()
                scale = kept_from_zero(weight, layer.eps) if isinstance(layer, _BatchNorm) else at_least(weight)
            error = reconstruction_error(scale, layer.bias, site.activation, dtype)
            error = error if error.is_meta else error.cpu()
            errors[site.layer] = torch.maximum(error, errors[site.layer]) if site.layer in errors else error
        return errors

    def describe(self) -> str:
        """What was converted and how exactly its inputs can be made again; what was not, and why."""
        total = len({site.layer for site in self.inverted}) + len({left.layer for left in self.left})
        lines = [f"{len({site.layer for site in self.inverted})} of {total} norms inverted"]
        if not total:
            return "no norms"
        rows = [("layer", "was", "now", "inexact to")]
        errors = self.reconstruction_errors()
        for site in self.inverted:
            now = f"{_NAMES[site.activation]}({site.slope:g})"
            error = errors[site.layer]
            worst = "unknown" if error.is_meta else f"{error.max():.0e}"
            channels = [] if error.is_meta else (error > _INEXACT).nonzero().flatten().tolist()
            rows.append(
                (
                    site.layer,
                    f"{site.kind} and {site.was}",
                    now,
                    worst + (f" in {_channels(channels)}" if channels else ""),
                )
            )
        lines += aligned(rows)
        lines += aligned((left.layer, f"kept: {left.reason}") for left in self.left)
        return "\n".join(lines)

    def restore(
        self, *, activation: Literal["leaky_relu", "relu"] = "leaky_relu", limit: float | None = None
    ) -> nn.Module:
        """Make it a network of plain norms again.

        The weights of batch norms become the scales that the inverted form used, so the function is the same to
        rounding; those that did not change since the conversion get the very values that they had. A warning in the log
        names the channels where the inversion was inexact: training could follow their scales only roughly.

        Args:
            activation: "leaky_relu" keeps the function; "relu" makes the ReLUs again that were converted, which
                changes it.
            limit: as for `invert_norm`.

        Returns:
            The network that was converted, where every activation is what it was; else a module that calls its layers
            with LeakyReLU in place of the ReLUs. Names in state dicts stay, and parameters are shared: this model is
            used up.

        Raises:
            InputError: it was restored already, an argument is out of range, or channels are over the limit; nothing
                is changed then.

        >>> from shoal.transforms.invert.invert_norm import invert_norm
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> invert_norm(net).restore(activation="relu") is net
        True
        """
        arguments.one_of("activation", activation, ("leaky_relu", "relu"), "; the first keeps the function")
        limit = limit_of(limit)
        if self.used_up:
            raise InputError("the model was restored already; use what restore() returned then")
        self.refuse_inexact(limit)
        if inexact := self._inexact_channels(_INEXACT):
            _log.warning("inverted norms were inexact in %s", inexact)
        mode = self.training
        self._scale_plainly()
        if activation == "relu" or all(site.was != "ReLU" for site in self.inverted):
            self.source.training = mode
            return self.source
        return RestoredModel(self.source, self._traces, self._sites)

    def refuse_inexact(self, limit: float | None) -> None:
        """
        Raises:
            InputError: a channel's inputs can be off by more than the limit; it is named.
        """
        inexact = self._inexact_channels(limit) if limit is not None else ""
        if inexact:
            raise InputError(
                f"inverting is less exact than limit={limit:g}, as scales are small relative to shifts; give a larger "
                "limit, or leave these layers plain",
                details={"layers": inexact},
            )

    def keep_scales(self) -> None:
        """Move the weights towards zero by eps, so that the scales are what the weights were."""
        self._given = tuple(weight.detach().clone() for weight, _ in self.weights())
        with torch.no_grad():
            for weight, eps in self.weights():
                weight.copy_(_towards_zero(weight, eps))

    def give_weights_back(self) -> None:
        """Undo `keep_scales`."""
        with torch.no_grad():
            for (weight, _), given in zip(self.weights(), self._given, strict=True):
                weight.copy_(given)

    def _scale_plainly(self) -> None:
        """Give the weights the values of the scales, for layers called in the plain form.

        Those that did not change since `keep_scales` become what they were: below eps their scales are not that.
        """
        self.used_up = True
        with torch.no_grad():
            for (weight, eps), given in zip(self.weights(), self._given, strict=True):
                if given.is_meta and not weight.is_meta:  # converted before it had values
                    weight.copy_(kept_from_zero(weight, eps))
                    continue
                given = given.to(weight)
                unchanged = weight == _towards_zero(given, eps)
                weight.copy_(torch.where(unchanged, given, kept_from_zero(weight, eps)))

    def _inexact_channels(self, limit: float) -> str:
        errors = {name: error for name, error in self.reconstruction_errors().items() if not error.is_meta}
        over = {name: (error > limit).nonzero().flatten().tolist() for name, error in errors.items()}
        return "; ".join(f"{name}: {_channels(channels)}" for name, channels in over.items() if channels)

    def extra_repr(self) -> str:
        return f"inverted={len(self.inverted)}, left={len(self.left)}"


class RestoredModel(_Rewritten):
    """A network of plain norms with LeakyReLU in place of some ReLUs; made by `InvertedModel.restore`."""

    made_by = "shoal.invert_norm(...).restore"

    def __init__(self, model: nn.Module, traces: Sequence[fx.Graph], sites: Mapping[str, Inverted]) -> None:
        super().__init__(model, [leaky_graph(graph, sites) for graph in traces], "RestoredGraph")


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _towards_zero(weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight.sign() * (weight.abs() - eps).clamp(min=0)


def limit_of(limit: object) -> float | None:
    """`limit=` as a float.

    Raises:
        InputError: it is neither None nor a number above 0.
    """
    if limit is None or (arguments.is_number(limit) and limit > 0):  # type: ignore[operator]
        return None if limit is None else float(limit)  # type: ignore[arg-type]
    raise InputError(f"limit={brief(limit)}: expected the largest error allowed, more than 0, such as 1e-3, or None")


def _channels(channels: Sequence[int]) -> str:
    listed = ", ".join(map(str, channels[:_MAX_CHANNELS_LISTED]))
    more = f" and {len(channels) - _MAX_CHANNELS_LISTED} more" if len(channels) > _MAX_CHANNELS_LISTED else ""
    return f"channel{'s' if len(channels) > 1 else ''} {listed}{more}"
