"""Tensor-parallel layers whose activations are sent encoded: DTensor's parallel styles with another exchange.

    activations = ActivationExchange(shoal.distributed.Exchange(), "dynamic_tree")
    parallelize_module(model, mesh, {"fc1": ColumnParallel(activations), "fc2": RowParallel(activations)})

Parameters become DTensors as `ColwiseParallel` and `RowwiseParallel` make them: the names and shapes stay.
What differs is how activations (forward) and their gradients (backward) move: gathered, or summed, on codes. Dettmers
2016, section 2.2: the outputs of the parts are either stacked or added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.nn import functional as F

from examples.parallel.activation_exchange import ActivationExchange
from examples.parallel.activation_functions import (
    gathered,
    own_share,
    replicated,
    summed,
    summed_in_backward,
    summed_to_shares,
)
from examples.parallel.local_convolution import LocalConv2d
from examples.parallel.shares import Share, shares
from shoal.distributed.comm.agreement import agree
from shoal.errors import InputError


class ColumnParallel(ColwiseParallel):
    """`ColwiseParallel` for linear and local layers: each rank holds, and computes, a part of the output features.

    Args:
        activations: the exchange that the layer uses; layers of one model share it.
        input_layouts: `Replicate()` (the default; the gradient is summed over the ranks on codes), or `Shard(-1)`
            (`Shard(1)` for a local layer): the parts are gathered, their gradients summed back.
        output_layouts: `Shard(-1)` (`Shard(1)`; the default), or `Replicate()`: the parts are gathered.

    Raises:
        InputError: applied to another layer, or for other layouts.

    Features are in dimension 1 of a local layer's maps. With a codec of None the layer computes what the whole one
    does, up to the order of summation in float32.
    """

    def __init__(
        self,
        activations: ActivationExchange,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts)
        self.activations = activations
        self._layouts = input_layouts or Replicate(), output_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dim = _feature_dim(module, self)
        into, out = self._layouts
        exchange = _Layer(
            self.activations, dim, _sharded(into, dim, module), _sharded(out or Shard(dim), dim, module), str(module)
        )
        _become(module, {nn.Linear: ColumnLinear, LocalConv2d: ColumnLocalConv2d}, exchange)
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return module


class RowParallel(RowwiseParallel):
    """`RowwiseParallel` for linear layers: each rank holds a part of the input features; the results are added.

    Args:
        activations: the exchange that the layer uses.
        input_layouts: `Shard(-1)` (the default), or `Replicate()`: each rank takes its part, gradients are gathered.
        output_layouts: `Replicate()` (the default; summed on codes: a rounding of the parts and one of the sum), or
            `Shard(-1)`: each rank gets the sum of its features; one rounding.

    Raises:
        InputError: applied to another layer, or for other layouts.
    """

    def __init__(
        self,
        activations: ActivationExchange,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts)
        self.activations = activations

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise InputError(f"got {module} for RowParallel, expected nn.Linear; give it ColumnParallel")
        (into,), (out,) = self.input_layouts, self.output_layouts
        exchange = _Layer(self.activations, -1, _sharded(into, -1, module), _sharded(out, -1, module), str(module))
        _become(module, {nn.Linear: RowLinear}, exchange)
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return module

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        assert isinstance(module, RowLinear)
        bias: nn.Parameter | None = module.bias
        super()._partition_linear_fn(name, module, device_mesh)
        if bias is not None and module.layer.sharded_output:
            _shard(module, "bias", bias, 0, device_mesh, self.src_data_rank)


class SpaceParallel(ColwiseParallel):
    """For local layers: each rank holds the kernels of, and computes, a band of the output rows.

    Args:
        activations: the exchange that the layer uses.
        input_layouts: `Replicate()` (the default), or `Shard(2)`: bands of rows; only the rows that a rank's kernels
            read beyond its own band are sent.
        output_layouts: `Shard(2)` (the default), or `Replicate()`.

    Raises:
        InputError: applied to another layer, or for other layouts.

    Fewer bytes than `ColumnParallel` between local layers, where only a kernel's overlap is sent.
    """

    def __init__(
        self,
        activations: ActivationExchange,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts or Replicate(), output_layouts=output_layouts or Shard(2))
        self.activations = activations

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LocalConv2d):
            raise InputError(f"got {module} for SpaceParallel, expected LocalConv2d; give it ColumnParallel")
        (into,), (out,) = self.input_layouts, self.output_layouts
        exchange = _Layer(self.activations, 2, _sharded(into, 2, module), _sharded(out, 2, module), str(module))
        _become(module, {LocalConv2d: SpaceLocalConv2d}, exchange)
        distribute_module(module, device_mesh, self._partition_rows)
        return module

    def _partition_rows(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            _shard(module, parameter_name, parameter, 1, device_mesh, self.src_data_rank)


class _Layer:
    """How one layer's activations move: which dimension is shared out, and whether input and output are."""

    def __init__(self, activations: ActivationExchange, dim: int, into: bool, out: bool, what: str) -> None:
        self.activations, self.dim, self.sharded_input, self.sharded_output = activations, dim, into, out
        self.what = what
        layouts = {"input": "shared out" if into else "whole", "output": "shared out" if out else "whole"}
        agree(activations.exchange, f"the parallel {what}", dimension=dim, **layouts)

    def input_features(self, x: torch.Tensor, features: int) -> torch.Tensor:
        """All input features of a column-parallel layer."""
        if self.sharded_input:
            have = shares(features, self.activations.ranks)
            return gathered(x, self.activations, self.dim, have, what=f"input of {self.what}")
        return summed_in_backward(x, self.activations, what=f"input of {self.what}")

    def output_features(self, y: torch.Tensor, features: int) -> torch.Tensor:
        if self.sharded_output:
            return y
        have = shares(features, self.activations.ranks)
        return replicated(y, self.activations, self.dim, have, what=f"output of {self.what}")


class ColumnLinear(nn.Linear):
    """What `ColumnParallel` makes of `nn.Linear`."""

    layer: _Layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.on_share(self.layer.input_features(x, self.in_features), *local_parameters(self))
        return self.layer.output_features(y, self.out_features)

    def on_share(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's output features, from all input features."""
        return F.linear(x, weight, bias)


class ColumnLocalConv2d(LocalConv2d):
    """What `ColumnParallel` makes of `LocalConv2d`."""

    layer: _Layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.on_share(self.layer.input_features(x, self.in_channels), *local_parameters(self))
        return self.layer.output_features(y, self.out_channels)

    def on_share(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's output channels, from all input channels."""
        return self.on_all_rows(x, weight, bias)


class SpaceLocalConv2d(LocalConv2d):
    """What `SpaceParallel` makes of `LocalConv2d`."""

    layer: _Layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activations, what = self.layer.activations, self.layer.what
        bands = shares(self.out_size[0], activations.ranks)
        needs: Sequence[Share] = [self.input_rows(*band) for band in bands]
        start, stop = needs[activations.rank]
        if self.layer.sharded_input:
            have = shares(self.size[0], activations.ranks)
            x = gathered(x, activations, 2, have, needs, what=f"input of {what}")
        else:
            x = summed_in_backward(x, activations, what=f"input of {what}").narrow(2, start, stop - start)
        parameters = local_parameters(self)
        y = self.on_rows(x, parameters[0], parameters[1] if len(parameters) > 1 else None, *bands[activations.rank])
        return self.layer.output_features(y, self.out_size[0])


class RowLinear(nn.Linear):
    """What `RowParallel` makes of `nn.Linear`."""

    layer: _Layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activations, what = self.layer.activations, self.layer.what
        if not self.layer.sharded_input:
            have = shares(self.in_features, activations.ranks)
            x = own_share(x, activations, x.dim() - 1, have, what=f"input of {what}")
        weight, *biases = local_parameters(self)
        y = F.linear(x, weight)
        if not self.layer.sharded_output:
            y = summed(y, activations, what=f"output of {what}")
            return y + biases[0] if biases else y
        have = shares(self.out_features, activations.ranks)
        y = summed_to_shares(y, activations, y.dim() - 1, have, what=f"output of {what}")
        return y + biases[0] if biases else y


def local_parameters(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """This rank's parts of a layer's weight, and bias if it has one."""
    found: list[torch.Tensor] = []
    for parameter in module.parameters(recurse=False):
        found.append(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
    return tuple(found)


def _shard(
    module: nn.Module, name: str, parameter: nn.Parameter, dim: int, device_mesh: DeviceMesh, source: int | None
) -> None:
    sharded = distribute_tensor(parameter.detach(), device_mesh, [Shard(dim)], src_data_rank=source)
    module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _feature_dim(module: nn.Module, style: Any) -> int:
    if isinstance(module, nn.Linear):
        return -1
    if isinstance(module, LocalConv2d):
        return 1
    raise InputError(f"got {module} for {type(style).__name__}, expected nn.Linear or LocalConv2d")


def _sharded(layout: Placement, dim: int, module: nn.Module) -> bool:
    """Whether a layout is that of shares along `dim`."""
    if isinstance(layout, Replicate):
        return False
    if isinstance(layout, Shard) and layout.dim == dim:
        return True
    raise InputError(f"got the layout {layout} for {module}, expected Replicate() or Shard({dim})")


def _become(module: nn.Module, classes: dict[type, type], layer: _Layer) -> None:
    """Give a layer its parallel class: parameters, hooks and name stay, as in FSDP2."""
    for plain, parallel in classes.items():
        if type(module) is plain:
            module.__class__ = parallel
            module.layer = layer  # type: ignore[assignment]
            return
    raise InputError(f"got {type(module).__name__}, a subclass of its own; expected the plain layer")
