"""Which code runs a codec's raw functions: Triton on CUDA, the native library on the CPU, else the torch reference.

No magic: all it does is ask `X_triton` and `X_native` whether they apply. Every one gives the same bits. The variable
SHOAL_CODEC_KERNELS names the only one to ask: `triton`, `native`, or `torch` for the reference.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from shoal.errors import InputError

VARIABLE = "SHOAL_CODEC_KERNELS"
KERNELS = ("triton", "native")  # in the order they are asked


def kernel(name: str, *tensors: torch.Tensor) -> ModuleType:
    """The module whose functions of `name` run on these tensors.

    Args:
        name: "table_codes", "truncation", "one_bit" or "sign_mask".
        tensors: all that the call reads and writes.

    >>> kernel("truncation", torch.ones(3, device="meta")).__name__
    'shoal.codecs.truncation_reference'
    """
    asked = os.environ.get(VARIABLE)
    if asked and asked not in (*KERNELS, "torch"):
        raise InputError(f"{VARIABLE}={asked}: choose one of {', '.join(KERNELS)}, torch, or leave it unset")
    for kind in KERNELS:
        if asked in (None, "", kind):
            found = _module(f"shoal.codecs.{name}_{kind}")
            if found.applies(*tensors):
                return found
    return _module(f"shoal.codecs.{name}_reference")


@cache
def _module(name: str) -> ModuleType:
    return import_module(name)
