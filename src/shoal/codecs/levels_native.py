"""Which instruction set the native codec kernels run in, and how they are called.

No magic: all it does is look at tensors and pass addresses to `csrc/shoal_native.h`.
"""

from __future__ import annotations

import ctypes
import os

import torch

from shoal.errors import CodecError
from shoal.lowlevel.native import LEVELS, function, levels, library

LEVEL_VARIABLE = "SHOAL_CODEC_LEVEL"


def level_number() -> int:
    """Of the variable SHOAL_CODEC_LEVEL, else -1: the best there is.

    Raises:
        CodecError: this machine does not run the level asked for.
    """
    name = os.environ.get(LEVEL_VARIABLE)
    if not name:
        return -1
    if name not in levels():
        known = ", ".join(levels()) or "none"
        raise CodecError(f"{LEVEL_VARIABLE}={name}: this machine runs {known}; choose one of those or leave it unset")
    return LEVELS.index(name)


def are_here(*tensors: torch.Tensor) -> bool:
    """Whether the library was built, and these tensors are dense and on the CPU."""
    if library() is None:
        return False
    for x in tensors:  # noqa: SIM110  # a generator costs more than what it asks
        if not x.is_cpu or x.layout is not torch.strided or not x.is_contiguous():
            return False
    return True


def threads_for(elems: int, least_elems: int) -> int:
    """As many as torch uses, with at least so many elements for each."""
    return max(1, min(torch.get_num_threads(), elems // least_elems))


def run(name: str, call: ctypes.Structure) -> None:
    """Calls a function of the native library; ctypes gives the interpreter's lock away meanwhile.

    Raises:
        CodecError: the processor does not run the level asked for, or memory ran out.
    """
    called = function(name)
    if called is None:
        raise CodecError("the native library was not built; unset SHOAL_CODEC_KERNELS")
    if called(ctypes.byref(call)) != 0:
        raise CodecError(f"{name}: this processor does not run level {call.level}; unset {LEVEL_VARIABLE}")
