"""The model that a command names: a function in a file of the user's, and an input for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.app.models import made_by
from shoal.capture.call_arguments import arguments_of
from shoal.core.named import function_named
from shoal.errors import InputError


@dataclass(frozen=True)
class Subject:
    """A model in training mode, and what it is called with.

    Attributes:
        where: how it was named.
        example: as of `shoal.plan`.
    """

    where: str
    model: nn.Module
    example: tuple[Any, ...] | dict[str, Any]

    @property
    def name(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    @property
    def device(self) -> torch.device:
        """Of its parameters."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    @property
    def shapes(self) -> str:
        """Of the tensors among the arguments.

        >>> Subject("train.py:make_model", nn.ReLU(), (torch.empty(8, 3, 32, 32), 1)).shapes
        '8 x 3 x 32 x 32'
        """
        return ", ".join(" x ".join(map(str, value.shape)) or "scalar" for value in self._tensors)

    def of_samples(self, count: int) -> tuple[Any, ...] | dict[str, Any]:
        """The example with `count` samples: every tensor whose first size is the batch is cut."""
        batch = self.samples
        cut = lambda value: value[:count] if value.dim() and len(value) == batch else value  # noqa: E731
        return tree_map_only(torch.Tensor, cut, self.example)

    @property
    def samples(self) -> int:
        """The first size of the first tensor that has one; 1 without any."""
        return next((len(value) for value in self._tensors if value.dim()), 1)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [value for value in tree_leaves(self.example) if isinstance(value, torch.Tensor)]


def load_subject(where: str, shapes: Sequence[str] = (), device: str | None = None) -> Subject:
    """Call the function that `where` names.

    Args:
        where: FILE.py:FUNCTION or MODULE:FUNCTION. The function takes nothing and returns a module, or a pair of a
            module and an example of its input, as for `shoal.plan`.
        shapes: of the arguments, in place of those that the function returns; see `tensor_of`. Keyword arguments are
            written as NAME=SHAPE, all or none.
        device: where model and arguments are put; None: where they are.

    Raises:
        InputError: there is no such file or function, it raised, or what it returned is none of these.
    """
    model, example = made_by(where, function_named(where))
    if shapes:
        example = _example_of(shapes)
    elif example is None:
        raise InputError(
            f"{where}() returned no input with the model; return a pair, or give its shape: --example 8x3x224x224"
        )
    args, kwargs = arguments_of(example, f"the input that {where}() returned")
    if shapes:
        _check_names(model, shapes, args, kwargs)
    if device is not None:
        model = model.to(device)
        args, kwargs = tree_map_only(torch.Tensor, lambda value: value.to(device), (args, kwargs))
    return Subject(where, model.train(), kwargs or args)


def _example_of(shapes: Sequence[str]) -> tuple[Any, ...] | dict[str, Any]:
    named = [shape.partition("=") for shape in shapes]
    if all(equals for _, equals, _ in named):
        return {name: tensor_of(shape, text) for (name, _, shape), text in zip(named, shapes, strict=True)}
    if any(equals for _, equals, _ in named):
        raise InputError(f"--example {' '.join(shapes)[:60]}: name all inputs, such as x=8x3x32x32, or none")
    return tuple(map(tensor_of, shapes))


def _check_names(model: nn.Module, shapes: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Whether the model's forward pass takes these inputs, of these names."""
    takes = signature(model.forward)
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"--example {' --example '.join(shapes)[:60]}: {type(model).__name__}.forward: {error}; type one --example "
            "for each input it takes",
            details={"it takes": ", ".join(map(str, takes.parameters.values())) or "none"},
        ) from None


def tensor_of(text: str, typed: str | None = None) -> torch.Tensor:
    """A tensor of a shape, such as 8x3x224x224, and of a dtype after a colon: random numbers, or zeros of an integer.

    Args:
        text: the shape.
        typed: what it is a part of, for errors.

    Raises:
        InputError: it is none.

    >>> tensor_of("2x3").shape, tensor_of("2x16:int64").dtype
    (torch.Size([2, 3]), torch.int64)
    """
    sizes, _, kind = text.partition(":")
    typed = typed or text
    dtype = getattr(torch, kind or "float32", None)
    numbers = sizes.lower().split("x")
    if not isinstance(dtype, torch.dtype) or not all(n.isdecimal() and len(n) < 20 and int(n) for n in numbers):
        raise InputError(
            f"--example {typed[:60]}: expected sizes with an x in between, and a dtype after a colon where it is not "
            "float32, such as 8x3x224x224 or 8x128:int64"
        )
    shape = tuple(map(int, numbers))
    if dtype.itemsize * math.prod(shape) > 2**47:  # what x86-64 and AArch64 leave a process
        raise InputError(f"--example {typed[:60]}: no process can address that many bytes; give smaller sizes")
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
