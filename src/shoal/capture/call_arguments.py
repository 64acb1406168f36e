"""What a model's forward pass is called with, from an example of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from shoal.errors import InputError, brief

Example: TypeAlias = torch.Tensor | Sequence[Any] | Mapping[str, Any]


def arguments_of(example: Example, what: str = "example") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The forward pass's positional and keyword arguments.

    Args:
        example: its only argument, a tensor; a sequence of its positional arguments; or a mapping of its keyword
            arguments, such as a batch of a Hugging Face tokenizer.
        what: its name in errors.

    Raises:
        InputError: it is none of these.

    >>> arguments_of({"labels": 1}), arguments_of(({"labels": 1},))
    (((), {'labels': 1}), (({'labels': 1},), {}))
    """
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping) and all(isinstance(name, str) for name in example):
        return (), dict(example)
    if not isinstance(example, Sequence) or isinstance(example, str):
        raise InputError(
            f"{what} is {brief(example)}; expected a tensor, a tuple of arguments or a dict of keyword arguments; type "
            f"(x,) to call the model with one {type(example).__name__} x"
        )
    return tuple(example), {}
