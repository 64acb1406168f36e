"""Adaptive Weight Precision: the number of bits in which each layer's weights are sent, from how their norms change.

Zhuang, Malossi, Casas, "Reducing data motion to accelerate the training of deep neural networks" (A2DTWP), algorithm 1.
A layer's weights start in few bits. After every batch the change of their l2 norm, delta = (|W_i| - |W_i-1|) / |W_i-1|,
is compared with a threshold T, which is negative in the paper: "below" means that the norm falls faster than |T|. Once
that happened in INTERVAL batches since the count was last reset, the layer gets N bits more and the count is reset.
Bits never decrease.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.codecs.memory_order import flat, without_gaps
from shoal.core import arguments
from shoal.errors import InputError, brief

MAX_BITS = 32  # of a float32
_NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_ROW_ELEMS = 1024
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Groups = Mapping[str, Sequence[torch.Tensor]]
SumUp = Callable[[list[float]], list[float]]


class AdaptivePrecision:
    """Drives the width of every layer's weights on their way to the device (A2DTWP, section II, algorithm 1).

    Biases and what belongs to a normalisation never count and are never packed.

    Args:
        model_or_groups: a model whose float32 weights of two or more dimensions are watched; or groups of tensors by
            name, each a layer.
        threshold: T, a relative change of the norm; in the paper -5e-2 (AlexNet), -2e-3 (VGG) and -2e-5 (ResNet).
        interval: INTERVAL, in batches; 4000 (AlexNet, VGG) and 2000 (ResNet) in the paper.
        bits_step: N, bits that a layer gets when it needs more.
        first_bits: of every layer at the start.
        by: "layer": each weight has bits of its own. "block": those of a building block share them, which the
            paper found best for ResNets; a block is a module with children, containers apart, that holds no other such.

    Attributes:
        groups: weights by layer or block.
        bits: of each layer or block, from 1 to 32.
        counts: IntervalCounter of each.

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
        if not arguments.is_number(threshold):
            raise InputError(
                f"threshold={brief(threshold)}: expected a finite number, negative in the paper, such as -2e-3"
            )
        for what, number in (("interval", interval), ("bits_step", bits_step), ("first_bits", first_bits)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InputError(f"{what}={number!r}: expected a whole number of 1 or more")
        if first_bits > MAX_BITS:
            raise InputError(f"first_bits={first_bits}: expected at most {MAX_BITS}, the bits of a float32")
        self.threshold = threshold
        self.interval = interval
        self.bits_step = bits_step
        self.bits = dict.fromkeys(self.groups, first_bits)
        self.counts = dict.fromkeys(self.groups, 0)
        self._norms: dict[str, float] | None = None
        self._sum_up: SumUp | None = None

    @property
    def mean_bytes(self) -> float:
        """Bytes a watched weight is sent in, over all of them."""
        elems = {name: sum(tensor.numel() for tensor in tensors) for name, tensors in self.groups.items()}
        return sum(-(-bits // 8) * elems[name] for name, bits in self.bits.items()) / max(1, sum(elems.values()))

    def update(self) -> list[str]:
        """Call it once a batch, after the optimizer's step; the layers or blocks whose bits went up."""
        return self.observe(self.norms())

    def observe(self, norms: Sequence[float]) -> list[str]:
        """What follows from the norms after a batch.

        Args:
            norms: l2 norm of each layer or block, in the order of `groups`.

        Returns:
            The layers or blocks whose bits went up. A norm that is NaN never counts; one that leaves zero rises.

        Raises:
            InputError: there are more or fewer norms than layers.
        """
        if len(norms) != len(self.bits):
            raise InputError(f"got {len(norms)} norms, expected {len(self.bits)}: one of each layer")
        now = dict(zip(self.bits, map(float, norms), strict=True))
        before, self._norms = self._norms, now
        grown: list[str] = []
        if before is None:
            return grown
        for name in now:
            if relative_change(before[name], now[name]) < self.threshold:
                self.counts[name] += 1
            if self.counts[name] == self.interval:
                self.counts[name] = 0
                if self.bits[name] < MAX_BITS:
                    # A new dictionary: one that was read before stays that of its batch.
                    self.bits = self.bits | {name: min(MAX_BITS, self.bits[name] + self.bits_step)}
                    grown.append(name)
        return grown

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
        group = self._group_of.get(name, name)
        if group not in self.bits:
            raise InputError(f"no layer is called {name!r}; there are {', '.join(self.bits) or 'none'}")
        return -(-self.bits[group] // 8)

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

    def state_dict(self) -> dict[str, Any]:
        """Bits, counts and the last norms of every layer: plain numbers."""
        return {"bits": dict(self.bits), "counts": dict(self.counts), "norms": self._norms and dict(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            InputError: the state is of other layers.
        """
        try:
            bits, counts, norms = state["bits"], state["counts"], state["norms"]
            same = set(bits) == set(counts) == set(self.bits) and (norms is None or set(norms) == set(self.bits))
        except (KeyError, TypeError) as error:
            raise InputError(f"got a state without {error}; give what state_dict() returned") from error
        if not same:
            missing = sorted(set(self.bits) ^ set(bits))
            raise InputError(f"the state is of other layers ({', '.join(missing[:3])}); load it into the same model")
        self.bits = {name: int(bits[name]) for name in self.bits}
        self.counts = {name: int(counts[name]) for name in self.bits}
        self._norms = None if norms is None else {name: float(norms[name]) for name in self.bits}


def relative_change(before: float, now: float) -> float:
    """(now - before) / before; from zero 0 or infinite.

    >>> relative_change(10.0, 9.0)
    -0.1
    """
    if before == 0.0:
        return 0.0 if now == 0.0 else math.inf
    return (now - before) / before


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
