"""Three training steps of a network in plain PyTorch, in float64 and under Shoal, and whether these are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import shoal
from bench.fuzz_step import allocated

_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
STEPS = 3
_TIMES, _OF_ITS_OWN, _OF_ALL = 2.0, 1e-6, 1e-7  # plain PyTorch's error; of the tensor's size; of the largest tensor's
_ZERO, _OF_A_SUM = 1e-9, 2e-6  # of the largest tensor's size: zero but for rounding, and what rounding then leaves
_NO_REFERENCE = 0.3  # where plain PyTorch is that far from float64, random ops drew otherwise there
ROOM_BYTES = 1 << 30


@dataclass(frozen=True)
class Network:
    """A module and what it is called with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def widened(self) -> Network:
        """The same values in float64 and complex128; the module is changed in place."""
        self.module._apply(_widened)
        return Network(self.module, tree_map(_widened, self.args), tree_map(_widened, self.kwargs))


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(_WIDE.get(value.dtype, value.dtype)).requires_grad_(value.requires_grad)


def train(network: Network) -> dict[str, torch.Tensor]:
    """What each step leaves, by name. The loop holds what a step returned until the next one has, as users' do;
    parameters move the same way whatever their gradients are, so that each step is compared by itself."""
    found = {}
    model = network.module
    for step in range(STEPS):
        torch.manual_seed(step)
        args, kwargs = tree_map(_leaf, network.args), tree_map(_leaf, network.kwargs)
        result = model(*args, **kwargs)
        outputs = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        loss = sum((_weighted(one) for one in outputs if one.requires_grad), start=torch.zeros(()))
        loss.backward()
        left = {f"output {place}": one for place, one in enumerate(outputs)}
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        left |= {f"gradient of input {place}": one.grad for place, one in enumerate(read) if one.grad is not None}
        left |= {f"gradient of {name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
        left |= {f"buffer {name}": one for name, one in model.named_buffers()}
        found |= {f"{step}: {name}": one.detach().clone() for name, one in left.items()}
        del left, outputs, read
        model.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 2.0**-10)
    return found


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _weighted(output: torch.Tensor) -> torch.Tensor:
    """A sum in which no two elements count alike."""
    real = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
    return (real * torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).view(real.shape)).sum()


@dataclass
class Training:
    """Plain PyTorch's steps of a network, and Shoal's compared with them.

    Args:
        build: makes the same network every time.

    Raises:
        RuntimeError: plain PyTorch does not train it.
    """

    build: Callable[[], Network]

    def __post_init__(self) -> None:
        self._plain = train(self.build())
        self._exact: dict[str, torch.Tensor] = {}

    def within(self, budget_bytes: int) -> int:
        """Train under Shoal.

        Returns:
            The predicted peak; 0 where no graph of the network is trained.

        Raises:
            AssertionError: the step's results are further from float64 than plain PyTorch's.
            ShoalError: it is refused.
        """
        torch._dynamo.reset()
        network = self.build()
        optimizer = "sgd" if any(True for _ in network.module.parameters()) else None
        shoal.compile(network.module, budget_bytes, optimizer=optimizer, allow="exact")
        trained = train(network)
        if any(not _same(trained.get(name), self._plain.get(name)) for name in {**self._plain, **trained}):
            self._exact = self._exact or train(self.build().widened())
            assert not (found := wrong(trained, self._plain, self._exact)), f"in {budget_bytes} bytes: {found}"
        return network.module.shoal.predicted_peak_bytes or 0


def trains_in_less(build: Callable[[], Network], share: float = 0.85) -> None:
    """Train in that share of what plain PyTorch's step takes, or in the minimum that is named, which is below it."""
    training = Training(build)
    plain_bytes = _peak_bytes(build())
    try:
        training.within(int(share * plain_bytes))
    except shoal.BudgetError as error:
        assert error.least_feasible_bytes is not None, error
        assert error.least_feasible_bytes < plain_bytes, error
        training.within(error.least_feasible_bytes)


def _peak_bytes(network: Network) -> int:
    """The most bytes of one step of plain PyTorch, counted by its profiler."""

    def step() -> None:
        outputs = tree_leaves(network.module(*network.args, **network.kwargs))
        sum((_weighted(one) for one in outputs if one.requires_grad), start=torch.zeros(())).backward()

    held = [*network.module.parameters(), *network.module.buffers(), *network.args, *network.kwargs.values()]
    return sum(one.nbytes for one in held) + allocated(step)[1]


def outcome(build: Callable[[], Network]) -> str:
    """Train with room for everything and at the minimum that is named.

    Returns:
        "right", "not trained" where plain PyTorch does not, or "refused: " and the line.
    """
    try:
        training = Training(build)
    except RuntimeError:  # of complex sparse tensors, say, or where no output wants a gradient
        return "not trained"
    try:
        training.within(ROOM_BYTES)
        budget_bytes, named_bytes = 1, None
        while budget_bytes < ROOM_BYTES:  # too few bytes for the weights name none: twice as many are asked for
            try:
                training.within(budget_bytes)
                break
            except shoal.BudgetError as error:
                assert named_bytes is None, f"{named_bytes} bytes named, then: {error}"
                named_bytes = error.least_feasible_bytes
                budget_bytes = named_bytes or 2 * budget_bytes
    except shoal.ShoalError as error:
        return f"refused: {type(error).__name__}: {error}"
    return "right"


def wrong(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> list[str]:
    """What is further from float64 than plain PyTorch's, and by how much.

    >>> one = {"0: output 0": torch.ones(2)}
    >>> wrong({"0: output 0": torch.zeros(2)}, one, one)
    ['0: output 0: off by 1.0e+00, where 1.1e-06 are allowed']
    """
    found = [f"{name}: in plain PyTorch only" for name in plain.keys() - ours.keys()]
    # AOTAutograd makes zeros of a gradient that eager PyTorch does not compute.
    found += [f"{name}: in Shoal only" for name in ours.keys() - plain.keys() if ours[name].any()]
    for name in plain.keys() & ours.keys():
        if _same(ours[name], plain[name]):
            continue
        kind = name.split(" ")[1]
        largest = max(_size(tensor) for other, tensor in exact.items() if other.split(" ")[1] == kind)
        true = exact[name]
        # The gradient of a bias before a batch norm is the rounding of a sum whose terms cancel.
        is_zero = _size(true) <= _ZERO * largest
        if not is_zero and _error(plain[name], true) > _NO_REFERENCE * _size(true):
            true = plain[name]
        allowed = _TIMES * _error(plain[name], true) + _OF_ITS_OWN * _size(true)
        allowed += (_OF_A_SUM if is_zero else _OF_ALL) * largest
        if not (error := _error(ours[name], true)) <= allowed:
            found.append(f"{name}: off by {error:.1e}, where {allowed:.1e} are allowed")
    return sorted(found)


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0


def _error(found: torch.Tensor, true: torch.Tensor) -> float:
    if found.shape != true.shape or not found.isfinite().equal(true.isfinite()):
        return float("inf")
    wide = torch.complex128 if true.is_complex() else torch.float64
    return _size(found.nan_to_num(0, 0, 0).to(wide) - true.nan_to_num(0, 0, 0).to(wide))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Same dtype, shape and bits; `-0.0` and `0.0` are the same number."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)
