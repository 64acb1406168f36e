"""The model that a command names: a function in a file of the user's, and an input for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.app.models import made_by
from shoal.core.named import function_named
from shoal.errors import InputError


@dataclass(frozen=True)
class Subject:
    """A model in training mode, and the arguments of its forward pass.

    Attributes:
        where: how it was named.
    """

    where: str
    model: nn.Module
    example: tuple[Any, ...]

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
        return ", ".join(
            " x ".join(map(str, value.shape)) or "scalar" for value in self.example if isinstance(value, torch.Tensor)
        )

    def of_samples(self, count: int) -> tuple[Any, ...]:
        """The arguments with as many samples: every tensor whose first size is the batch is cut."""
        batch = self.samples
        return tuple(
            value[:count] if isinstance(value, torch.Tensor) and value.dim() and len(value) == batch else value
            for value in self.example
        )

    @property
    def samples(self) -> int:
        """The first size of the first tensor that has one; 1 without any."""
        return next((len(value) for value in self.example if isinstance(value, torch.Tensor) and value.dim()), 1)


def load_subject(where: str, shapes: Sequence[str] = (), device: str | None = None) -> Subject:
    """Call the function that `where` names.

    Args:
        where: FILE.py:FUNCTION or MODULE:FUNCTION. The function takes nothing and returns a module, or a pair of a
            module and the argument of its forward pass or a tuple of its arguments.
        shapes: of the arguments, in place of those that the function returns; see `tensor_of`.
        device: where model and arguments are put; None: where they are.

    Raises:
        InputError: there is no such file or function, it raised, or what it returned is none of these.
    """
    model, example = made_by(where, function_named(where))
    if shapes:
        example = tuple(map(tensor_of, shapes))
    elif example is None:
        raise InputError(
            f"{where}() returned no input beside the model; return a pair, or give its shape: --example 8x3x224x224"
        )
    arguments = example if isinstance(example, tuple | list) else (example,)
    if device is not None:
        model = model.to(device)
        arguments = tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in arguments)
    return Subject(where, model.train(), tuple(arguments))


def tensor_of(text: str) -> torch.Tensor:
    """A tensor of a shape, such as 8x3x224x224, and of a dtype behind a colon: random numbers, or zeros of an integer.

    Raises:
        InputError: it is none.

    >>> tensor_of("2x3").shape, tensor_of("2x16:int64").dtype
    (torch.Size([2, 3]), torch.int64)
    """
    sizes, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    numbers = sizes.lower().split("x")
    if not isinstance(dtype, torch.dtype) or not all(n.isdecimal() and len(n) < 20 and int(n) for n in numbers):
        raise InputError(
            f"--example {text[:60]}: expected sizes with an x in between, and a dtype behind a colon where it is not "
            "float32, such as 8x3x224x224 or 8x128:int64"
        )
    shape = tuple(map(int, numbers))
    if dtype.itemsize * math.prod(shape) > 2**47:  # what x86-64 and AArch64 leave a process
        raise InputError(f"--example {text[:60]}: no process can address so many bytes; give smaller sizes")
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
