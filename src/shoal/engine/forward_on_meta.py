"""Whether a network takes an input of some sizes, by its forward pass on the meta device, where nothing is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shoal.capture.call_arguments import Example, arguments_of
from shoal.engine.search.max_patch import Patch, multiples, nearest
from shoal.errors import InputError

_AXES = (1, 2, 3)  # of images, other than samples and channels


def why_not(model: nn.Module, example: Example) -> str:
    """Why the network cannot be called so; "" if it can."""
    try:
        _forward_on_meta(model, *arguments_of(example))
    except Exception as error:  # of the model, at a size that may be none of its own
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return ""


def sizes_that_would_do(model: nn.Module, example: Example) -> str:
    """In words which sizes of images a network takes that does not take those of its only argument; "" where no size
    near them is found, or that is none of images.
    """
    args, kwargs = arguments_of(example)
    values = [*args, *kwargs.values()]
    images = values[0] if len(values) == 1 else None
    if not isinstance(images, torch.Tensor) or images.dim() - 2 not in _AXES or 0 in images.shape:
        return ""
    samples, channels, *sides = images.shape
    dtype = images.dtype

    def refused(patch: Patch) -> str:
        resized = torch.empty(samples, channels, *patch, dtype=dtype, device="meta")
        return why_not(model, dict.fromkeys(kwargs, resized) or resized)

    try:
        multiple = multiples(refused, tuple(sides))
    except InputError:
        return ""
    divides = all(side % step == 0 for side, step in zip(sides, multiple, strict=True))
    return "" if divides else f"it takes {nearest(tuple(sides), multiple)}"


def _forward_on_meta(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    state = {name: on_meta(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.func.functional_call(model, state, tree_map(on_meta, args), tree_map(on_meta, kwargs))
    finally:
        for module, training in modes:
            module.training = training
