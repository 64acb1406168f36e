"""Where Triton kernels run: on CUDA tensors, and in Triton's interpreter on the CPU, slow, for tests.

No magic: a module of kernels is imported when a tensor first asks for it, and one small kernel is tried on each device.
Without Triton, or where that kernel fails, `shoal.lowlevel.dispatch` takes another implementation. TRITON_INTERPRET=1
chooses the interpreter.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

from shoal.errors import ShoalError
from shoal.lowlevel.dispatch import VARIABLE

_MAX_KNOWN = 4096  # launches that one caller repeats
_INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))  # Triton, too, asks once


@dataclass(frozen=True)
class TritonKernels:
    """A module of Triton kernels.

    Attributes:
        module: its name; it has an attribute INTERPRETED.
        instead: what does the work where there are none, for the message.
        error: what `found` raises.
        try_on: starts a small kernel on a CUDA device, and raises where it does not run.
    """

    module: str
    instead: str
    error: type[ShoalError]
    try_on: Callable[[torch.device], object]

    def here(self) -> ModuleType | None:
        """The module, or None where Triton is not installed."""
        return _imported(self.module)

    def found(self) -> ModuleType:
        """The module.

        Raises:
            ShoalError: there is none; of the class `error`.
        """
        here = self.here()
        if here is None:
            raise self.error(f"Triton is not installed; install triton, or use {self.instead}")
        return here

    def run_on(self, device: torch.device) -> bool:
        """Whether a kernel runs there: Triton wants a device that it knows and a C compiler."""
        if device.type != "cuda" and not (_INTERPRETED and device.type == "cpu"):
            return False
        return self.here() is not None and _run_on(self, device)


class Launch(NamedTuple):
    """How a kernel is launched.

    Attributes:
        kernel: of Triton.
        grid: how many programs along each dimension.
        arguments: of some tensors, in the order of the kernel's parameters.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Callable[..., tuple[Any, ...]]


class Launches:
    """Launches that are repeated: Triton looks at every argument each time, this at a key and at the addresses.

    What a kernel is compiled for follows from its numbers, from the dtypes of its tensors and from whether these begin
    at multiples of 16 bytes. A launch whose tensors all do is found again by its key; any other goes Triton's own way.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, Callable[..., tuple[Any, ...]]]] = {}

    def run(self, key: Hashable, tensors: tuple[torch.Tensor | None, ...], made: Callable[[], Launch]) -> None:
        """Launch a kernel on the current device.

        Args:
            key: of all that `made` depends on, with the dtypes of the tensors, which of them are None, and the device.
            tensors: what the arguments are made of.
            made: how it is launched; called for a key that is new.
        """
        together = 0
        for tensor in tensors:
            if tensor is not None:
                together |= tensor.data_ptr()
        known = self._known.get(key)
        if known is not None and not together & 15:
            launch, arguments = known
            launch(*arguments(*tensors))
            return
        kernel, grid, arguments = made()
        compiled = kernel[grid](*arguments(*tensors))
        first = next(tensor for tensor in tensors if tensor is not None)
        if first.is_cuda and not together & 15 and hasattr(compiled, "packed_metadata"):
            if len(self._known) >= _MAX_KNOWN:  # sizes that vary without end
                self._known.clear()
            self._known[key] = compiled[(*grid, 1, 1)[:3]], arguments


@cache
def _imported(module: str) -> ModuleType | None:
    try:
        return import_module(module)
    except ImportError:
        return None


@cache
def _run_on(kernels: TritonKernels, device: torch.device) -> bool:
    if device.type != "cuda":
        return bool(kernels.found().INTERPRETED)
    try:
        kernels.try_on(device)
    except Exception as error:  # whatever the compiler raises: other implementations remain
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"Triton does not run on {device} ({reason}); {VARIABLE}=native spares the attempt", stacklevel=2)
        return False
    return True
