"""`AdaptivePrecision`: AWP on a model, updated once a batch: the bytes in which each weight is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from shoal.codecs.memory_order import flat, without_gaps
from shoal.core import arguments
from shoal.distributed.weights.awp import LayerBits
from shoal.errors import InputError

_NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_ROW_ELEMS = 1024
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Groups = Mapping[str, Sequence[torch.Tensor]]
SumUp = Callable[[list[float]], list[float]]


class AdaptivePrecision(LayerBits):
    """Drives the width of every layer's weights on their way to the device (A2DTWP, section II, algorithm 1).

    Biases and what belongs to a normalisation never count and are never packed.

    Args:
        model_or_groups: a model whose float32 weights of two or more dimensions are watched; or groups of tensors by
            name, each a layer.
        threshold: T; see `shoal.distributed.weights.awp.LayerBits`.
        interval: INTERVAL, in batches.
        bits_step: N.
        first_bits: of every layer at the start.
        by: "layer": each weight has bits of its own. "block": those of a building block share them, which the
            paper found best for ResNets; a block is a module with children, containers apart, that holds no other such.

    Attributes:
        groups: weights by layer or block; `bits` and `counts` are those of each.

    Raises:
        InputError: a number is out of its range, `by` is neither, or there is no weight to watch.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> precision = AdaptivePrecision(model, threshold=-0.05, interval=1)
    >>> grown = precision.update()
    >>> with torch.no_grad():
    ...     _ = model[2].weight.mul_(0.5)
    >>> precision.update(), precision.bytes_of("0.weight"), precision.bytes_of("2.weight")
    (['2.weight'], 1, 2)

    Limits: the first update only remembers the norms.
    """

    def __init__(
        self,
        model_or_groups: nn.Module | Groups,
        threshold: float,
        interval: int,
        *,
        bits_step: int = 8,
        first_bits: int = 8,
        by: str = "layer",
    ) -> None:
        self.groups, self._group_of = grouped(model_or_groups, by)
        super().__init__(
            list(self.groups), threshold=threshold, interval=interval, bits_step=bits_step, first_bits=first_bits
        )
        self._sum_up: SumUp | None = None

    @property
    def mean_bytes(self) -> float:
        """Bytes a watched weight is sent in, over all of them."""
        elems = {name: sum(tensor.numel() for tensor in tensors) for name, tensors in self.groups.items()}
        return sum(LayerBits.bytes_of(self, name) * elems[name] for name in elems) / max(1, sum(elems.values()))

    def update(self) -> list[str]:
        """Call it once a batch, after the optimizer's step; the layers or blocks whose bits went up."""
        return self.observe(self.norms())

    def norms(self) -> list[float]:
        """The l2 norm of each layer or block, all of them in one pass."""
        tensors = [tensor for group in self.groups.values() for tensor in group]
        sums = square_sums(tensors)
        if self._sum_up is not None:
            sums = self._sum_up(sums)
        left = iter(sums)
        return [math.sqrt(math.fsum(next(left) for _ in group)) for group in self.groups.values()]

    def bytes_of(self, name: str) -> int:
        """1 to 4, of a parameter by its name in the model, or of a layer or block.

        Raises:
            InputError: no weight that is watched has this name.
        """
        return super().bytes_of(self._group_of.get(name, name))

    def watches(self, name: str) -> bool:
        """Whether the parameter of this name is sent packed."""
        return name in self._group_of

    def watch(self, tensors: Mapping[str, torch.Tensor], sum_up: SumUp | None = None) -> None:
        """Take the norms of other tensors from now on: the masters of the same weights, or shards of them.

        Args:
            tensors: by the name of the parameter.
            sum_up: makes sums of squares over shards to those over all of them, the same on all ranks.

        Raises:
            InputError: a watched weight is missing, or the precision was made of groups.
        """
        if missing := sorted(set(self._group_of) - set(tensors)):
            raise InputError(f"got no tensor for {', '.join(missing[:3])}; make the precision from this model")
        groups: dict[str, list[torch.Tensor]] = {name: [] for name in self.groups}
        for name, group in self._group_of.items():
            groups[group].append(tensors[name])
        self.groups, self._sum_up = groups, sum_up


def grouped(
    model_or_groups: nn.Module | Groups, by: str = "layer"
) -> tuple[dict[str, list[torch.Tensor]], dict[str, str]]:
    """Tensors by layer or block, and the layer or block of each parameter's name."""
    arguments.one_of("by", by, ("layer", "block"))
    arguments.instance("model_or_groups", model_or_groups, nn.Module, Mapping)
    if not isinstance(model_or_groups, nn.Module):
        groups = {name: list(tensors) for name, tensors in model_or_groups.items()}
        return groups, {name: name for name in groups}
    group_of = {name: _block_of(model_or_groups, name) if by == "block" else name for name in packable(model_or_groups)}
    if not group_of:
        raise InputError("the model has no float32 weight of two or more dimensions outside of normalisations")
    parameters = dict(model_or_groups.named_parameters())
    groups = {}
    for name, group in group_of.items():
        groups.setdefault(group, []).append(parameters[name])
    return groups, group_of


def packable(model: nn.Module) -> list[str]:
    """The names of the parameters that may be sent packed: float32, two or more dimensions, of no normalisation."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2
        and parameter.dtype == torch.float32
        and not isinstance(model.get_submodule(name.rpartition(".")[0]), _NORMALISATIONS)
    ]


def _block_of(model: nn.Module, name: str) -> str:
    """The name of the building block that a parameter is in, else its own."""
    parts = name.split(".")[:-1]
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        module = model.get_submodule(path)
        if _is_composite(module):
            return path if not any(_is_composite(inner) for inner in module.modules() if inner is not module) else name
    return name


def _is_composite(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and next(module.children(), None) is not None


@torch.no_grad()
def square_sums(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The sum of squares of each tensor, read once.

    Replaces `[t.double().square().sum().item() for t in tensors]`; on CUDA one launch and one wait for all of them.
    Exact enough to see a change of 1e-5: `torch._foreach_norm` on the CPU sums up to 100 million squares in float32:
    1 % off there, 4e-5 for a convolution of 2.4 million weights, more than ResNet's threshold. Here squares are
    summed in rows of 1024, and the rows in float64, as fast as memory is read: within 1e-6.

    Args:
        tensors: of floating point, any shape, on one device.

    >>> square_sums([torch.ones(3), torch.full((2, 2), 2.0)])
    [3.0, 16.0]
    """
    if not tensors:
        return []
    if tensors[0].device.type != "cpu":
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(tensors))])
        return norms.square().tolist()
    return [_on_the_cpu(tensor) for tensor in tensors]


def _on_the_cpu(tensor: torch.Tensor) -> float:
    values = flat(without_gaps(tensor))
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    whole = values.numel() // _ROW_ELEMS * _ROW_ELEMS
    rows = torch.linalg.vector_norm(values[:whole].view(-1, _ROW_ELEMS), dim=1).double()
    rest = values[whole:].double()
    return float(torch.dot(rows, rows) + torch.dot(rest, rest))
