"""Where Triton kernels run: on CUDA tensors, and in Triton's interpreter on the CPU, slow, for tests.

No magic: a module of kernels is imported when a tensor first asks for it, and one small kernel is tried on each device.
Without Triton, or where that kernel fails, `shoal.lowlevel.dispatch` takes another implementation. TRITON_INTERPRET=1
chooses the interpreter.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from shoal.errors import ShoalError
from shoal.lowlevel.dispatch import VARIABLE

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
