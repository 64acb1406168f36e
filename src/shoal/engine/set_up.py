"""How a model is set up, other than the values of its tensors: a first call may change that, and no later one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_OURS = ("_compiled_call_impl", "_call_impl", "shoal")


class SetUp:
    """The layers of a model, what they have and which hooks: equal where nothing was added, removed or switched.

    Some models finish their setting up in their first call: they register hooks, fill caches, make layers. Numbers do
    not count: those that change in each call do not tell a first one.

    Args:
        model: the network.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> before = SetUp(model)
        >>> before == SetUp(model)
        True
        >>> _ = model.register_forward_hook(print)
        >>> before == SetUp(model)
        False
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = tuple((name, type(module), _has(module)) for name, module in model.named_modules())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SetUp) and self._layers == other._layers

    __hash__ = None  # type: ignore[assignment]


def has_tensor_attributes(model: nn.Module) -> bool:
    """Whether a layer has tensors that are no parameters and no buffers, as the weight of a pruned one."""
    values = (value for module in model.modules() for value in vars(module).values())
    return any(isinstance(value, torch.Tensor) for value in values)


def _has(module: nn.Module) -> tuple[Any, ...]:
    return tuple((key, _kind(value)) for key, value in vars(module).items() if key not in _OURS)


def _kind(value: Any) -> Any:
    """What is compared of an attribute: of a dictionary, such as that of hooks, its keys as well."""
    if value is None or isinstance(value, (bool, str)):
        return value
    return (type(value), tuple(map(str, value))) if isinstance(value, dict) else type(value)
